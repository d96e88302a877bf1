"""Listings that last: while what they read is merged and collected, while threads grow, end, and are made anew."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver

from langgraph.checkpoint.lsm import LSMSaver
from lsm.errors import ReadTimeout
from lsm.fetch import SegmentGone
from lsm.format.names import manifest_key
from tests.conftest import Backend
from tests.support.checkpoints import at, chain, checkpoint, ids, listed, put

Key = tuple[str, str, str]
THREADS = ("a", "b", "c")
NAMESPACES = ("", "child:1")


def noise(seed: int, length: int = 300) -> str:
    """Text that no compression makes small."""
    return "".join(map(chr, random.Random(seed).choices(range(32, 127), k=length)))


def addresses(configs: list[Any]) -> list[Key]:
    """Thread, namespace and id of each."""
    parts = [config["configurable"] for config in configs]
    return [(each["thread_id"], each["checkpoint_ns"], each["checkpoint_id"]) for each in parts]


def keys(found: list[CheckpointTuple]) -> list[Key]:
    """The addresses of what was found, in order."""
    return addresses([each.config for each in found])


def filled(saver: LSMSaver, count: int) -> list[Any]:
    """So many checkpoints over several threads and namespaces, in segments and in frames. Their configs, oldest
    first."""
    made: list[Any] = []
    for number in range(count):
        config = at(THREADS[number % 3], namespace=NAMESPACES[number % 5 == 4])
        made.append(put(saver, config, {"text": noise(number)}, step=number % 4))
        if number % 40 == 39:
            saver.put_writes(made[-1], [("text", number)], "task")
            for thread_id in THREADS:
                saver.flush(thread_id)
    return made


def collected(saver: LSMSaver) -> None:
    """Everything is merged, and what was merged is gone."""
    for thread_id in THREADS:
        saver.flush(thread_id)
        saver.compact(thread_id)
    saver._runtime.run(saver._engine.collect(0))


def interrupted(found: Iterator[CheckpointTuple], count: int, between: Callable[[], None]) -> list[CheckpointTuple]:
    """What an iterator gives, if something happens after so many."""
    first = [next(found) for _ in range(count)]
    between()
    return first + list(found)


@pytest.fixture
def savers(backend: Backend) -> Iterator[tuple[LSMSaver, LSMSaver]]:
    """One that lists, and keeps nothing at hand; and another process that does the rest."""
    with backend.open(compaction="off", cache_bytes=0) as lister, backend.open(compaction="off") as other:
        yield lister, other


SEARCHES: dict[str, Callable[[list[Any]], tuple[Any, dict[str, Any], Callable[[int], bool]]]] = {
    "a thread": lambda made: (at("a", namespace=None), {}, lambda number: number % 3 == 0),  # type: ignore[arg-type]
    "a namespace": lambda made: (at("a"), {}, lambda number: number % 3 == 0 and number % 5 != 4),
    "all threads": lambda made: (None, {}, lambda number: True),
    "a filter": lambda made: (None, {"filter": {"step": 1}}, lambda number: number % 4 == 1),
    "below": lambda made: (None, {"before": made[-60]}, lambda number: number < len(made) - 60),
    "all of it": lambda made: (
        at("b"),
        {"filter": {"step": 1}, "before": made[-9], "limit": 11},
        lambda number: number % 3 == 1 and number % 5 != 4 and number % 4 == 1 and number < len(made) - 9,
    ),
}


@pytest.mark.parametrize("after", [1, 9])
@pytest.mark.parametrize("search", SEARCHES)
def test_a_listing_that_outlives_a_collection_is_whole(
    savers: tuple[LSMSaver, LSMSaver], search: str, after: int
) -> None:
    lister, other = savers
    made = filled(other, 300)
    config, options, wanted = SEARCHES[search](made)
    expected = ids([each for number, each in enumerate(made) if wanted(number)])[::-1][: options.get("limit")]

    def between() -> None:
        for number in range(20):  # newer than all that is listed
            put(other, at(THREADS[number % 3]), {"text": "later"}, step=number % 4)
        collected(other)

    found = interrupted(lister.list(config, **options), after, between)
    assert [each.checkpoint["id"] for each in found] == expected
    for each in found:
        number = ids(made).index(each.checkpoint["id"])
        assert each.checkpoint["channel_values"] == {"text": noise(number)}
        assert each.pending_writes == ([("task", "text", number)] if number % 40 == 39 else [])


def test_a_listing_that_outlives_one_collection_after_another_is_whole(savers: tuple[LSMSaver, LSMSaver]) -> None:
    lister, other = savers
    made = filled(other, 120)
    found: list[CheckpointTuple] = []
    for each in lister.list(None):
        found.append(each)
        if len(found) % 10 == 0:
            put(other, at(THREADS[len(found) % 3]), {"text": "later"})
            collected(other)
    assert [each.checkpoint["id"] for each in found] == ids(made)[::-1]


def test_what_a_listing_has_not_come_to_may_be_collected(savers: tuple[LSMSaver, LSMSaver]) -> None:
    """Of one namespace, a listing reads no further than it must: the index of what is older is gone when it comes."""
    lister, other = savers
    made = []
    for number in range(240):
        made.append(put(other, at("a"), {"text": noise(number)}))
        if number % 40 == 39:
            other.flush("a")
    found = interrupted(lister.list(at("a")), 1, lambda: collected(other))
    assert [each.checkpoint["id"] for each in found] == ids(made)[::-1]


def test_a_thread_that_is_deleted_half_way_takes_only_its_own(savers: tuple[LSMSaver, LSMSaver]) -> None:
    lister, other = savers
    made = filled(other, 300)

    def between() -> None:
        other.delete_thread("b")
        collected(other)

    found = keys(interrupted(lister.list(None), 10, between))
    whole = addresses(made[::-1])
    assert [key for key in found if key[0] != "b"] == [key for key in whole if key[0] != "b"]
    assert found == [key for key in whole if key in set(found)]
    assert len(found) < len(whole)


def test_what_is_removed_by_the_batch_does_not_end_a_listing(savers: tuple[LSMSaver, LSMSaver]) -> None:
    """All that was chosen may be gone: what comes after it is not."""
    lister, other = savers
    configs = chain(other, "last", [{"text": noise(number)} for number in range(3)])
    chain(other, "first", [{"text": noise(number)} for number in range(100, 260)])
    for thread_id in ("first", "last"):
        other.flush(thread_id)

    def between() -> None:
        other.delete_thread("first")
        other._runtime.run(other._engine.collect(0))

    found = interrupted(lister.list(None), 1, between)
    assert keys(found)[-3:] == [("last", "", each) for each in ids(configs)[::-1]]


def test_a_checkpoint_that_comes_later_does_not_come_out_of_order(savers: tuple[LSMSaver, LSMSaver]) -> None:
    """One thread is read anew after others have come further: what it has got meanwhile is not given late."""
    lister, other = savers
    made = []
    late = checkpoint({"text": "late"})
    for number in range(120):
        if number == 110:
            late = checkpoint({"text": "late"})
        made.append(put(other, at("a" if number in (0, 40, 119) else "b"), {"text": noise(number)}))
    for thread_id in ("a", "b"):
        other.flush(thread_id)

    def between() -> None:
        other.put(at("a"), late, {"source": "loop", "step": 1, "parents": {}}, late["channel_versions"])
        for thread_id in ("a", "b"):
            other.flush(thread_id)
            other.compact(thread_id)
        other._runtime.run(other._engine.collect(0))

    found = [each.checkpoint["id"] for each in interrupted(lister.list(None), 20, between)]
    assert found == ids(made)[::-1]


@pytest.mark.parametrize("before_collection", [True, False])
def test_namespaces_that_share_an_id_come_in_one_order(
    savers: tuple[LSMSaver, LSMSaver], before_collection: bool
) -> None:
    lister, other = savers
    shared = [checkpoint({"text": noise(number)}) for number in range(40)]
    for made in shared:
        for thread_id in THREADS:
            for namespace in ("", "x", "y"):
                config = at(thread_id, namespace=namespace)
                other.put(config, made, {"source": "loop", "step": 1, "parents": {}}, made["channel_versions"])
    for thread_id in THREADS:
        other.flush(thread_id)
    found = keys(
        interrupted(lister.list(None), 25, (lambda: collected(other)) if before_collection else (lambda: None))
    )
    assert sorted(found) == sorted({*found})
    assert found == [
        (thread_id, namespace, made["id"])
        for made in shared[::-1]
        for namespace in ("y", "x", "")
        for thread_id in sorted(THREADS, key=manifest_key)
    ]


def test_a_listing_has_what_the_savers_of_langgraph_have(savers: tuple[LSMSaver, LSMSaver]) -> None:
    lister, other = savers
    memory = InMemorySaver()
    for number in range(60):
        made = checkpoint({"text": noise(number)})
        config = at(THREADS[number % 3], namespace=NAMESPACES[number % 5 == 4])
        for saver in (memory, other):
            saver.put(config, made, {"source": "loop", "step": number % 4}, made["channel_versions"])  # type: ignore[typeddict-item]
        if number % 20 == 19:
            collected(other)
    for config in (at("a"), at("b", namespace="child:1")):
        for options in ({}, {"filter": {"step": 2}}, {"limit": 3}):
            assert keys(list(lister.list(config, **options))) == keys(list(memory.list(config, **options)))  # type: ignore[arg-type]
    whole = sorted(keys(list(memory.list(None))), key=lambda key: key[2], reverse=True)
    assert keys(list(lister.list(None))) == whole


@pytest.mark.processes
def test_lists_of_everything_beside_writers_and_whoever_deletes(savers: tuple[LSMSaver, LSMSaver]) -> None:
    """What is never deleted is in every list, whatever becomes of the rest, and nothing raises."""
    lister, other = savers
    kept: list[Key] = []
    for number in range(3):
        kept += addresses(chain(other, f"kept-{number}", [{"a": 1}] * 12))
    done = threading.Event()

    def come_and_go(number: int) -> None:
        for turn in range(8):
            thread_id = f"gone-{number}"
            chain(other, thread_id, [{"a": noise(turn)}] * 24)
            other.flush(thread_id)
            other.delete_thread(thread_id)

    def look() -> int:
        times = 0
        while times < 5 or not done.is_set():
            found = keys(list(lister.list(None)))
            assert [key for key in found if key in set(kept)] == sorted(kept, key=lambda key: key[2], reverse=True)
            assert len(set(found)) == len(found)
            assert [key[2] for key in found] == sorted((key[2] for key in found), reverse=True)
            times += 1
        return times

    with ThreadPoolExecutor(5) as pool:
        lookers = [pool.submit(look) for _ in range(2)]
        try:
            for each in [pool.submit(come_and_go, number) for number in range(3)]:
                each.result(60)
        finally:
            done.set()
        assert all(each.result(60) >= 5 for each in lookers)
    assert listed(lister, None) == sorted((key[2] for key in kept), reverse=True)


def test_a_listing_for_which_no_view_lasts_ends_in_an_error(
    savers: tuple[LSMSaver, LSMSaver], monkeypatch: pytest.MonkeyPatch
) -> None:
    lister, other = savers
    lister._engine.process.limits = replace(lister._engine.process.limits, commit_deadline=0.0)
    filled(other, 60)

    def gone(process: Any, thread: Any, view: Any, items: Any) -> Any:
        yield from ()
        put(other, at("a"), {"text": "later"})
        collected(other)
        raise SegmentGone(view.segments()[0])

    monkeypatch.setattr("lsm.listing.materialise", gone)
    with pytest.raises(ReadTimeout, match=r"thread 'a'.*a listing"):
        list(lister.list(at("a")))
