"""What is done to whole threads: delete, copy, prune, delete runs. What is kept stays as it was, to the letter,
but for a parent that went: a checkpoint does not point at what is not there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.types import Command

from langgraph.checkpoint.lsm import LSMSaver
from tests.conftest import Backend
from tests.support.checkpoints import at, chain, checkpoint, ids, listed, put
from tests.support.compare import exact
from tests.support.graphs import Run, finish, nested


def everything(saver: LSMSaver, *thread_ids: str) -> list[Any]:
    """All that a saver shows of threads."""
    return [exact(found) for name in thread_ids for found in saver.list(at(name, namespace=None))]  # type: ignore[arg-type]


def fill(saver: LSMSaver, thread_id: str, count: int = 4, **metadata: Any) -> list[Any]:
    """Chains in two namespaces, with writes. Returns the configs of the root namespace."""
    roots: list[Any] = []
    for namespace in ("", "child"):
        parent = at(thread_id, namespace=namespace)
        for step in range(count):
            parent = put(saver, parent, {"text": f"{namespace} {step} " * 50}, step=step, **metadata)
            saver.put_writes(parent, [("text", step), ("__error__", f"at {step}")], "task", "~a")
            if not namespace:
                roots.append(parent)
    return roots


def test_a_deleted_thread_is_gone_and_its_id_is_free(backend: Backend) -> None:
    with backend.open() as saver, backend.open() as other:
        configs = fill(saver, "thread")
        fill(saver, "neighbour")
        before = everything(saver, "neighbour")
        assert other.get_tuple(configs[-1]) is not None  # the other has the thread in its cache
        saver.delete_thread("thread")
        for one in (saver, other):
            assert one.get_tuple(at("thread")) is None
            assert one.get_tuple(configs[-1]) is None
            assert everything(one, "thread") == []
            assert everything(one, "neighbour") == before
            assert one.get_delta_channel_history(config=configs[-1], channels=["text"]) == {"text": {"writes": []}}
        saver.delete_thread("thread")
        saver.delete_thread("never there")

        # The other writes on, from what it knew: a new thread, to which nothing of the old one comes back.
        again = put(other, at("thread"), {"text": "new"})
        assert listed(saver, at("thread", namespace=None)) == ids([again])  # type: ignore[arg-type]
        other.put_writes(configs[-1], [("late", 1)], "late")
        assert saver.get_tuple(configs[-1]) is None
        assert saver.get_tuple(at("thread")).checkpoint["channel_values"] == {"text": "new"}


def test_writes_of_a_deleted_thread_do_not_come_back(backend: Backend) -> None:
    with backend.open() as saver:
        config = put(saver, at("thread"), {"a": 1})
        saver.put_writes(config, [("a", "old")], "task")
        found = saver.get_tuple(config)
        saver.delete_thread("thread")
        saver.put(at("thread"), found.checkpoint, found.metadata, {})
        again = saver.get_tuple(config)
        assert again.pending_writes == []
        assert again.checkpoint["channel_values"] == {}


def test_a_copy_is_whole_and_on_its_own(backend: Backend) -> None:
    with backend.open() as saver:
        configs = fill(saver, "source", run_id="run")
        put(saver, configs[1], {"text": "a fork"})
        saver.flush("source")
        fill(saver, "source", 2)  # some in segments, some not
        before = everything(saver, "source")
        saver.copy_thread("source", "target")
        assert everything(saver, "source") == before
        copied = [found._replace(config={}, parent_config=None) for found in saver.list(at("target", namespace=None))]  # type: ignore[arg-type]
        original = [found._replace(config={}, parent_config=None) for found in saver.list(at("source", namespace=None))]  # type: ignore[arg-type]
        assert exact(copied) == exact(original)
        for found in saver.list(at("target", namespace=None)):  # type: ignore[arg-type]
            assert found.config["configurable"]["thread_id"] == "target"
            if found.parent_config:
                assert saver.get_tuple(found.parent_config).config["configurable"]["thread_id"] == "target"

        put(saver, at("target", ids(configs)[-1]), {"text": "only in the copy"})
        saver.put_writes(at("target", ids(configs)[0]), [("text", "only in the copy")], "other")
        assert everything(saver, "source") == before
        saver.delete_thread("source")
        assert saver.get_tuple(at("target")).checkpoint["channel_values"] == {"text": "only in the copy"}


def test_a_copy_into_a_thread_that_exists_merges(backend: Backend) -> None:
    with backend.open() as saver:
        source, target = fill(saver, "source"), fill(saver, "target")
        saver.copy_thread("source", "target")
        assert listed(saver, at("target")) == sorted(ids(source) + ids(target), reverse=True)
        saver.copy_thread("source", "target")
        assert listed(saver, at("target")) == sorted(ids(source) + ids(target), reverse=True)
        assert saver.get_tuple(at("target", ids(source)[2])).pending_writes == [
            ("task", "__error__", "at 2"),
            ("task", "text", 2),
        ]


@pytest.mark.parametrize("before", ["", "flush", "compact"])
@pytest.mark.parametrize("after", ["", "flush", "compact"])
def test_writes_that_came_before_their_checkpoint_are_copied(before: str, after: str) -> None:
    saver = LSMSaver.from_conn_string("memory://", compaction="off")

    def rearrange(thread_id: str, how: str) -> None:
        if how:
            saver._runtime.run(getattr(saver._engine, how)(thread_id))

    first = put(saver, at("source"), {"text": "first"})
    later = checkpoint({"text": "later"}, version="2")
    saver.put_writes(at("source", later["id"]), [("text", 1), ("text", 2)], "task")
    rearrange("source", before)
    saver.copy_thread("source", "target")
    rearrange("target", after)
    for thread_id in ("source", "target"):
        stored = saver.put(at(thread_id, ids([first])[0]), later, {}, {"text": "2"})  # type: ignore[typeddict-item]
        for config in (stored, at(thread_id)):
            assert saver.get_tuple(config).pending_writes == [("task", "text", 1), ("task", "text", 2)]


def test_copies_that_change_nothing(backend: Backend) -> None:
    with backend.open() as saver:
        fill(saver, "thread")
        before = everything(saver, "thread")
        saver.copy_thread("thread", "thread")
        saver.copy_thread("never there", "thread")
        saver.copy_thread("never there", "nor there")
        assert everything(saver, "thread") == before
        assert everything(saver, "nor there") == []
        assert {found.config["configurable"]["thread_id"] for found in saver.list(None)} == {"thread"}


def test_prune_keeps_the_latest_of_each_namespace(backend: Backend) -> None:
    with backend.open() as saver:
        configs = fill(saver, "thread")
        fill(saver, "neighbour")
        neighbour = everything(saver, "neighbour")
        latest = [saver.get_tuple(at("thread", namespace=namespace)) for namespace in ("child", "")]
        kept = [exact(found._replace(parent_config=None)) for found in latest]  # what went is nobody's parent
        saver.prune(["thread", "never there"])
        assert sorted(everything(saver, "thread"), key=repr) == sorted(kept, key=repr)
        assert everything(saver, "neighbour") == neighbour
        for config in configs[:-1]:
            assert saver.get_tuple(config) is None
        assert list(saver.list(at("thread"), before=configs[-1])) == []
        assert list(saver.list(at("thread"), filter={"step": 0})) == []
        assert list(saver.list(configs[0])) == []
        saver.prune(["thread"])
        saver.compact("thread")
        assert sorted(everything(saver, "thread"), key=repr) == sorted(kept, key=repr)
        longer = put(saver, configs[-1], {"text": "goes on"})
        assert listed(saver, at("thread")) == ids([longer, configs[-1]])


def test_the_latest_is_the_greatest_id_not_the_last_that_was_stored(backend: Backend) -> None:
    with backend.open() as saver:
        configs = chain(saver, "thread", [{"a": 1}, {"a": 2}, {"a": 3}])
        oldest = saver.get_tuple(configs[0])
        saver.put(at("thread"), oldest.checkpoint, oldest.metadata, {})  # stored last
        assert saver.get_tuple(at("thread")).checkpoint["id"] == ids(configs)[-1]
        saver.prune(["thread"])
        assert listed(saver, at("thread")) == ids(configs)[-1:]


def test_prune_with_delete(backend: Backend) -> None:
    with backend.open() as saver:
        for name in ("a", "b", "c"):
            fill(saver, name)
        before = everything(saver, "c")
        asyncio.run(saver.aprune(["a", "b", "never there"], strategy="delete"))
        assert everything(saver, "a", "b") == []
        assert everything(saver, "c") == before
        saver.prune([], strategy="delete")
        assert everything(saver, "c") == before


def test_a_pruned_checkpoint_that_is_stored_again_is_there_again(backend: Backend) -> None:
    with backend.open() as saver:
        configs = chain(saver, "thread", [{"a": 1}, {"a": 2}, {"a": 3}])
        pruned = saver.get_tuple(configs[1])
        saver.prune(["thread"])
        saver.put(configs[0], pruned.checkpoint, pruned.metadata, pruned.checkpoint["channel_versions"])
        assert listed(saver, at("thread")) == ids(configs)[:0:-1]
        assert saver.get_tuple(configs[1]).checkpoint == pruned.checkpoint


def subgraph_namespaces(saver: LSMSaver) -> set[str]:
    return {found.config["configurable"]["checkpoint_ns"].split(":")[0] for found in saver.list(None)}


def test_prune_drops_finished_subgraph_calls_and_keeps_what_is_under_way(backend: Backend) -> None:
    with backend.open() as saver:
        run = Run(nested(saver), "thread", "async", asynchronous=False)
        finish(run.invoke({"note": "note 0"}))
        waiting = finish(run.state(subgraphs=True))
        saver.prune(["thread"])
        # It waits for an answer within a subgraph: all that the answer needs is still there.
        still = finish(run.state(subgraphs=True))
        assert (still.values, still.next, still.interrupts) == (waiting.values, waiting.next, waiting.interrupts)
        assert still.tasks[0].state.values == waiting.tasks[0].state.values
        assert still.tasks[0].state.next == waiting.tasks[0].state.next == ("second",)
        assert finish(run.invoke(Command(resume="answer 0")))["note"].endswith("answer 0, call 1")

        finish(run.invoke({"note": "note 1"}))
        finish(run.invoke(Command(resume="answer 1")))
        # The calls of the subgraph without memory are over; the one that remembers stays.
        assert any(":" in found.config["configurable"]["checkpoint_ns"] for found in saver.list(None))
        saver.prune(["thread"])
        left = [found.config["configurable"]["checkpoint_ns"] for found in saver.list(None)]
        assert sorted(left) == ["", "remembers"]
        finish(run.invoke({"note": "note 2"}))
        assert finish(run.invoke(Command(resume="answer 2")))["note"].endswith("answer 2, call 3")


def test_deleted_runs_take_their_checkpoints_and_writes_only(backend: Backend) -> None:
    with backend.open() as saver:
        configs: list[Any] = []
        for number in range(6):
            parent = configs[-1] if configs else at("thread")
            configs.append(
                put(saver, parent, {f"channel {number}": number, "last": number}, run_id=f"run-{number // 2}")
            )
            saver.put_writes(configs[-1], [("last", number)], "task")
        fill(saver, "other", run_id="run-1")
        fill(saver, "without runs")
        untouched = everything(saver, "without runs")
        saver.flush("thread")
        kept = {number: saver.get_tuple(configs[number]) for number in (0, 1, 4, 5)}
        kept[4] = kept[4]._replace(parent_config=None)  # its parent goes

        saver.delete_for_runs(["run-1", "never there"])
        assert listed(saver, at("thread")) == ids([configs[number] for number in (5, 4, 1, 0)])
        for number, expected in kept.items():
            # With the values that they inherited from the checkpoints that went.
            assert exact(saver.get_tuple(configs[number])) == exact(expected)
        for number in (2, 3):
            assert saver.get_tuple(configs[number]) is None
        assert everything(saver, "other") == []
        assert everything(saver, "without runs") == untouched
        assert list(saver.list(None, filter={"run_id": "run-1"})) == []

        saver.delete_for_runs(["run-2"])
        assert (
            saver.get_tuple(at("thread")).checkpoint["id"] == ids(configs)[1]
        )  # the latest is the latest that is left
        saver.compact("thread")
        assert listed(saver, at("thread")) == ids([configs[1], configs[0]])
        saver.delete_for_runs([])
        saver.delete_for_runs(["run-0"])
        assert everything(saver, "thread") == []


def test_a_list_of_everything_goes_by_checkpoint_id_over_all_threads(backend: Backend) -> None:
    with backend.open() as saver:
        made = []
        for number in range(12):
            namespace = "child:1" if number % 4 == 3 else ""
            made.append(put(saver, at(f"thread-{number % 3}", namespace=namespace), {"a": number}, step=number % 2))
        assert listed(saver, None) == ids(made)[::-1]
        assert listed(saver, None, limit=5) == ids(made)[:-6:-1]
        assert listed(saver, None, limit=0) == []
        assert listed(saver, None, filter={"step": 1}, limit=2) == ids([made[11], made[9]])
        assert listed(saver, None, before=made[6]) == ids(made)[5::-1]
        assert listed(saver, at("thread-1", namespace=None)) == ids(made)[10::-3]  # type: ignore[arg-type]


@pytest.mark.parametrize("compacted", [False, True])
def test_what_is_copied_again_is_older_than_what_came_first(backend: Backend, compacted: bool) -> None:
    """The thread to copy from was pruned meanwhile: the copy stays as it was, however it is read."""
    with backend.open(compaction="off") as saver:
        configs = chain(saver, "source", [{"value": number} for number in range(3)])
        saver.put_writes(configs[0], [("value", "first")], "task")
        saver.copy_thread("source", "copy")
        before = list(saver.list(at("copy")))
        saver.prune(["source"])
        again = saver.get_tuple(configs[2])
        assert again is not None
        saver.put(at("source"), again.checkpoint, {"source": "loop", "step": 2, "parents": {}, "again": True}, {})
        saver.copy_thread("source", "copy")
        saver.copy_thread("source", "copy")
        if compacted:
            saver._runtime.run(saver._engine.compact("copy"))
        for reader in (saver, backend.open(compaction="off")):
            assert list(reader.list(at("copy"))) == before
            assert [reader.get_tuple(each.config) for each in before] == before
            assert reader.get_tuple(at("copy")) == before[0]


def test_what_a_prune_has_hidden_stays_hidden_when_a_copy_brings_it_back(backend: Backend) -> None:
    """What is there wins: also for a listing by a filter, which first meets the copied record that matches."""
    with backend.open(compaction="off") as saver:
        first: Any = {**empty_checkpoint(), "id": "1"}
        config = saver.put(at("a"), first, {"source": "loop", "step": 1}, {})
        saver.put_writes(config, [("log", "entry")], "task")
        second: Any = {**empty_checkpoint(), "id": "2"}
        counters: Any = {"source": "loop", "step": 2, "counters_since_delta_snapshot": {"log": 1}}
        saver.put(config, second, counters, {})
        saver.copy_thread("a", "b")
        saver.prune(["a"])
        saver.copy_thread("b", "a")
        assert [found.checkpoint["id"] for found in saver.list(at("a"))] == ["2"]
        assert list(saver.list(at("a"), filter={"step": 1})) == []
        assert [found.checkpoint["id"] for found in saver.list(at("a"), filter={"step": 2})] == ["2"]
        assert [found.checkpoint["id"] for found in saver.list(at("b"), filter={"step": 1})] == ["1"]
