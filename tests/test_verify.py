"""Verification: whole stores are found whole, and whatever is wrong with one is found and named."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from lsm.drive import Runtime, run
from lsm.engine import Engine
from lsm.format.manifest import Header, pack_header, unpack_header
from lsm.format.names import manifest_key, segment_key, segments_prefix
from lsm.format.records import Checkpoint, Writes
from lsm.format.segment import SegmentInfo
from lsm.steps import Create, Delete, Get, GetRanges, List, PutIf
from lsm.storage import Storage, open_storage
from lsm.storage.memory import MemoryStorage
from lsm.verify import Report, verify_store, verify_thread
from tests.conftest import Backend
from tests.support.checkpoints import at, put

EMPTY = ("msgpack", b"{}")


def engine_on(storage: Storage) -> Engine:
    return Engine(storage.url, storage.appends, os.urandom)


def verified(storage: Storage, thread_id: str = "t", **options: Any) -> Report:
    engine = engine_on(storage)
    return run(verify_thread(engine.process, engine.process.thread(thread_id), **options), storage)


def write(engine: Engine, storage: Storage, count: int, seed: int = 1, compact_at: int | None = None) -> None:
    """A thread with three namespaces, values that grow, values that are large, and a delta channel."""
    chance = random.Random(seed)
    heads: dict[str, str] = {}
    text = b""
    for number in range(count):
        namespace = chance.choice(["", "call:1", "other"])
        id_, version = f"{number:06d}", f"{number:08d}"
        text = (text + chance.randbytes(chance.choice([10, 100])))[-9_000:]
        value = ("bytes", text if chance.random() < 0.9 else chance.randbytes(30_000))
        parent = heads.get(namespace)
        run(
            engine.put(
                "t",
                namespace,
                id_,
                parent,
                EMPTY,
                EMPTY,
                {"text": version, "fixed": 1},
                {"text": (version, value), **({} if parent else {"fixed": (1, ("bytes", b"fixed"))})},
                terms=[b"%08d" % (number % 7)],
                deltas=["log"],
            ),
            storage,
        )
        heads[namespace] = id_
        for task in range(chance.choice([0, 1, 2])):
            said = ("bytes", chance.randbytes(chance.choice([10, 100, 20_000])))
            run(engine.put_writes("t", namespace, id_, f"task-{task}", "", [(0, "log", said)]), storage)
        if number == compact_at:
            run(engine.compact("t"), storage)


def test_stores_are_whole_whatever_was_done_to_them(backend: Backend) -> None:
    storage = open_storage(backend.url, **backend.options)
    engine = engine_on(storage)
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("written", lambda: write(engine, storage, 120)),
        ("compacted", lambda: run(engine.compact("t"), storage)),
        ("written again", lambda: write(engine, storage, 60, seed=2)),
        ("merged", lambda: run(engine.compact_due("t"), storage)),
        ("copied", lambda: run(engine.copy("t", "u"), storage)),
        ("copied again", lambda: run(engine.copy("u", "t"), storage)),
        ("pruned", lambda: run(engine.prune(["t"]), storage)),
        ("collected", lambda: run(engine.collect(0), storage)),
    ]
    checkpoints = {}
    for name, step in steps:
        step()
        report = verified(storage)
        checkpoints[name] = report.checkpoints
        assert (name, report.problems) == (name, [])
        assert report.checkpoints
        assert report.blobs
    assert report.garbage.objects == 0
    copied = verified(storage, "u")
    assert (copied.problems, copied.checkpoints) == ([], checkpoints["copied"])
    assert checkpoints["pruned"] < checkpoints["copied again"] == checkpoints["copied"]
    found = run(verify_store(engine.process), storage)
    assert (found.threads, found.problems) == (2, {})
    assert found.checkpoints == report.checkpoints + copied.checkpoints


def test_a_copy_into_a_thread_brings_its_highest_versions_along() -> None:
    storage = MemoryStorage()
    engine = engine_on(storage)
    for thread_id, versions in (("source", ["1", "2", "9"]), ("t", ["1"])):
        for version in versions:
            value = {"c": (version, ("bytes", b"value"))}
            run(engine.put(thread_id, "", version, None, EMPTY, EMPTY, {"c": version}, value), storage)
        run(engine.flush(thread_id), storage)
    run(engine.put("source", "", "99", None, EMPTY, EMPTY, {"c": "0"}, {"c": ("0", ("bytes", b"v"))}), storage)
    run(engine.copy("source", "t"), storage)
    assert verified(storage).problems == []


@pytest.fixture
def store() -> MemoryStorage:
    """A small store with all kinds of objects and records, and no garbage."""
    storage = MemoryStorage()
    engine = engine_on(storage)
    write(engine, storage, 50, compact_at=35)
    run(engine.collect(0), storage)
    assert verified(storage).problems == []
    return storage


def keys(storage: Storage) -> list[str]:
    return [manifest_key("t"), *(entry.key for entry in storage.execute(List(segments_prefix("t"))).entries)]


def store_as(storage: Storage, key: str, body: bytes) -> None:
    storage.execute(PutIf(key, body, storage.execute(Get(key)).tag))


def test_every_damaged_byte_is_found(store: MemoryStorage) -> None:
    chance = random.Random(3)
    for key in keys(store):
        body = store.execute(Get(key)).body
        places = {0, 5, len(body) - 1, len(body) - 9, *(chance.randrange(len(body)) for _ in range(8))}
        for place in places:
            damaged = bytearray(body)
            damaged[place] ^= 1 << chance.randrange(8)
            store_as(store, key, bytes(damaged))
            problems = verified(store).problems
            assert problems, (key, place)
            assert all(key in problem for problem in problems), (key, place, problems)
        store_as(store, key, body)


@pytest.mark.parametrize("less", [1, 100, 2_000])
def test_what_was_cut_off_is_found(store: MemoryStorage, less: int) -> None:
    for key in keys(store):
        body = store.execute(Get(key)).body
        store_as(store, key, body[:-less])
        assert any(key in problem for problem in verified(store).problems), key
        store_as(store, key, body)


def test_what_has_gone_is_found(store: MemoryStorage) -> None:
    for key in keys(store)[1:]:
        body = store.execute(Get(key)).body
        store.execute(Delete([key]))
        (problem,) = verified(store).problems
        assert key.rsplit("/", 1)[-1] in problem
        store.execute(Create(key, body))


def test_one_problem_does_not_hide_another(store: MemoryStorage) -> None:
    damaged = keys(store)[1:3]
    for key in damaged:
        store_as(store, key, store.execute(Get(key)).body[:-1] + b"?")
    problems = verified(store).problems
    assert all(any(key in problem for problem in problems) for key in damaged)


def other_header(storage: Storage, change: Callable[[Header], Header]) -> list[str]:
    """The problems of the store with another header in front of its frames."""
    key = manifest_key("t")
    body = storage.execute(Get(key)).body
    header, end = unpack_header(body, key)
    store_as(storage, key, pack_header(change(header), "none") + body[end:])
    problems = verified(storage).problems
    store_as(storage, key, body)
    return problems


def first_log(change: Callable[[SegmentInfo], SegmentInfo]) -> Callable[[Header], Header]:
    def changed(header: Header) -> Header:
        at = next(number for number, info in enumerate(header.segments) if info.rows)
        return replace(
            header, segments=(*header.segments[:at], change(header.segments[at]), *header.segments[at + 1 :])
        )

    return changed


def without_first(kind: type) -> Callable[[Header], Header]:
    def changed(header: Header) -> Header:
        gone = next(record for record in header.carried if isinstance(record, kind))
        return replace(header, carried=tuple(record for record in header.carried if record is not gone))

    return changed


def altered(kind: type, **fields: Any) -> Callable[[Header], Header]:
    def changed(header: Header) -> Header:
        record = next(each for each in header.carried if isinstance(each, kind))
        other: Any = replace(record, **fields)
        return replace(header, carried=tuple(other if each is record else each for each in header.carried))

    return changed


def other_inline(header: Header) -> Header:
    place = next(place for place, value in header.inline.items() if value)
    return replace(header, inline={**header.inline, place: b"?" * len(header.inline[place])})


def other_table(header: Header) -> Header:
    """A checkpoint whose value lies where an older one does."""
    first, second = [record for record in header.carried if isinstance(record, Checkpoint)][:2]
    other = replace(first, table={**first.table, "text": second.table["text"]})
    return replace(header, carried=tuple(other if each is first else each for each in header.carried))


LIES: dict[str, Callable[[Header], Header]] = {
    "another head": lambda header: replace(header, heads=(("", "000000"), *header.heads[1:])),
    "a head of nothing": lambda header: replace(header, heads=(*header.heads, ("nowhere", "000001"))),
    "writes of a head are missing": without_first(Writes),
    "a carried checkpoint with another parent": altered(Checkpoint, parent="000000"),
    "carried writes of another task": altered(Writes, task_id="nobody"),
    "a carried checkpoint that leads elsewhere": other_table,
    "another value at hand": other_inline,
    "too low a peak": lambda header: replace(
        header,
        peaks=(),
        carried=tuple(
            replace(each, versions={"text": "00000000"}) if isinstance(each, Checkpoint) else each
            for each in header.carried
        ),
    ),
    "fewer rows": first_log(lambda info: replace(info, rows=info.rows - 1)),
    "fewer checkpoints": first_log(lambda info: replace(info, checkpoints=info.checkpoints - 1)),
    "no filter": first_log(lambda info: replace(info, terms=b"")),
    "an index without its first run": first_log(
        lambda info: replace(info, blob_index=replace(info.blob_index, runs=info.blob_index.runs[1:]))
    ),
    "two segments of one number": lambda header: replace(
        header, segments=(header.segments[0], replace(header.segments[1], number=header.segments[0].number))
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_header_that_lies_is_found_out(store: MemoryStorage, lie: Callable[[Header], Header]) -> None:
    assert other_header(store, lambda header: header) == []
    assert other_header(store, lie) != []


def test_a_chain_with_a_hole_is_found() -> None:
    storage = MemoryStorage()
    engine = engine_on(storage)
    for id_, parent in (("1", None), ("3", "2"), ("4", "3")):
        run(engine.put("t", "", id_, parent, EMPTY, EMPTY, {}, {}, deltas=["log"]), storage)
    (problem,) = verified(storage).problems
    assert "'2'" in problem
    assert "'log'" in problem
    run(engine.compact("t"), storage)
    assert len(verified(storage).problems) == 1


def test_a_chain_is_whole_where_a_value_ends_it_or_a_rewrite_cut_it() -> None:
    storage = MemoryStorage()
    engine = engine_on(storage)
    seed = {"log": (1, ("bytes", b"seed"))}
    run(engine.put("t", "", "2", "1", EMPTY, EMPTY, {"log": 1}, seed, deltas=[]), storage)
    for id_, parent in (("3", "2"), ("4", "3"), ("5", "4")):
        run(engine.put("t", "", id_, parent, EMPTY, EMPTY, {}, {}, deltas=["log"]), storage)
        run(engine.put_writes("t", "", id_, "task", "", [(0, "log", ("bytes", b"said"))]), storage)
    assert verified(storage).problems == []
    run(engine.prune(["t"]), storage)
    assert verified(storage).problems == []


def test_garbage_is_counted_and_is_no_problem(store: MemoryStorage) -> None:
    store.execute(Create(segment_key("t", "0" * 26), b"12345"))
    store.execute(Create(segment_key("nobody", "0" * 26), b"123"))
    report = verified(store)
    assert (report.problems, report.garbage.objects, report.garbage.bytes) == ([], 1, 5)
    found = run(verify_store(engine_on(store).process), store)
    assert (found.garbage.objects, found.garbage.bytes) == (2, 8)


def test_a_torn_tail_is_no_problem_and_the_only_thing_that_is_repaired(tmp_path: Path) -> None:
    with LSMSaver.from_conn_string(tmp_path.as_uri()) as saver:
        config = put(saver, at("t"), {"value": 1})
        put(saver, config, {"value": 2})
    path = tmp_path / manifest_key("t")
    sound = path.read_bytes()
    path.write_bytes(sound + sound[-40:-20])
    storage = open_storage(tmp_path.as_uri())
    for _ in range(2):
        report = verified(storage)
        assert (report.problems, report.torn, report.repaired) == ([], 20, False)
    report = verified(storage, repair=True)
    assert (report.problems, report.torn, report.repaired) == ([], 20, True)
    assert path.read_bytes() == sound
    report = verified(storage, repair=True)
    assert (report.torn, report.repaired) == (0, False)


def test_damage_is_not_repaired(tmp_path: Path) -> None:
    with LSMSaver.from_conn_string(tmp_path.as_uri()) as saver:
        put(saver, put(saver, at("t"), {"value": 1}), {"value": 2})
    path = tmp_path / manifest_key("t")
    damaged = bytearray(path.read_bytes())
    damaged[-60] ^= 1
    path.write_bytes(damaged)
    assert verified(open_storage(tmp_path.as_uri()), repair=True).problems
    assert path.read_bytes() == bytes(damaged)


def test_a_store_names_all_that_is_wrong_with_it(store: MemoryStorage) -> None:
    engine = engine_on(store)
    run(engine.copy("t", "u"), store)
    run(engine.copy("t", "v"), store)
    store_as(store, manifest_key("u"), b"nonsense")
    store.execute(Create(f"manifests/00/=={'0' * 64}", b"nonsense"))
    store_as(store, "lsm.json", b"nonsense")
    seen: list[str] = []
    found = run(verify_store(engine.process, lambda report: seen.append(report.thread_id)), store)
    assert set(found.problems) == {"u", f"manifests/00/=={'0' * 64}", "lsm.json"}
    assert sorted(seen) == [f"manifests/00/=={'0' * 64}", "t", "u", "v"]


def test_a_thread_may_be_written_to_meanwhile(tmp_path: Path) -> None:
    storage = open_storage(tmp_path.as_uri(), fsync=False)
    runtime = Runtime(storage)
    engine = engine_on(storage)
    write(engine, storage, 50)
    other = runtime.submit(_busy(engine))
    for _ in range(8):
        assert verified(storage).problems == []
    other.result()
    runtime.close()
    assert verified(storage).problems == []


def _busy(engine: Engine) -> Any:
    """Commit, merge and collect, over and over."""
    for number in range(60):
        yield from engine.put("t", "", f"1{number:05d}", None, EMPTY, EMPTY, {}, {})
        if number % 3 == 0:
            yield from engine.compact("t")
            yield from engine.collect(0)


def test_memory_does_not_grow_with_the_thread(tmp_path: Path) -> None:
    """What is asked for at once is bounded, whatever there is."""
    storage = open_storage(tmp_path.as_uri(), fsync=False)
    engine = engine_on(storage)
    for number in range(120):
        value = ("bytes", os.urandom(300_000))
        run(engine.put("t", "", f"{number:06d}", None, EMPTY, EMPTY, {"c": number}, {"c": (number, value)}), storage)
    measured = _Largest(storage)
    report = run(verify_thread(engine.process, engine.process.thread("t")), measured)
    assert report.problems == []
    assert report.bytes > 36_000_000
    assert 0 < measured.largest < 12 << 20


class _Largest:
    """A storage that knows how much it was asked for at once."""

    def __init__(self, inner: Storage):
        self.inner, self.url, self.local, self.appends = inner, inner.url, inner.local, inner.appends
        self.largest = 0

    def execute(self, request: Any) -> Any:
        answer = self.inner.execute(request)
        if isinstance(request, GetRanges):
            self.largest = max(self.largest, sum(map(len, answer)))
        return answer

    async def aexecute(self, request: Any) -> Any:
        return self.execute(request)

    def close(self) -> None:
        self.inner.close()
