"""Sweeps: what they do to a store, what they cost, and that one thread's trouble is no other's."""

from __future__ import annotations

import os
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lsm.drive
from langgraph.checkpoint.lsm import LSMSaver, Retention
from lsm.drive import Runtime, run
from lsm.engine import Engine
from lsm.format.manifest import Header, pack_header
from lsm.format.names import manifest_key, segments_prefix, sweep_key
from lsm.steps import Create, Delete, Get, List, PutIf
from lsm.storage import Storage, open_storage
from lsm.sweep import Options, Outcome, Summary, Sweep, sweep, tend
from tests.conftest import Backend
from tests.support.checkpoints import at, chain, listed
from tests.support.counting import CountingStorage

LONG = "x" * 200  # its manifest's key does not tell the thread


def engine_on(storage: Storage, retention: Retention | None = None) -> Engine:
    return Engine(storage.url, storage.appends, os.urandom, retention=retention)


def swept(storage: Storage, retention: Retention | None = None, **options: Any) -> Summary:
    """The summary of a sweep by a process that knows nothing yet."""
    runtime = Runtime(storage)
    try:
        return runtime.submit(sweep(engine_on(storage, retention), Options(**options))).result()
    finally:
        runtime.close()


def filled(backend: Backend, thread_ids: list[str], count: int = 30) -> Storage:
    """A store whose threads have segments that are to be merged."""
    with backend.open(compaction="off", compression="none") as saver:
        for thread_id in thread_ids:
            for batch in range(count):
                chain(saver, thread_id, [{"value": f"{thread_id} {batch}"}])
                saver.flush(thread_id)
    return open_storage(backend.url, **backend.options)


def objects(storage: Storage) -> dict[str, bytes]:
    found = {}
    for prefix in ("manifests/", "segments/", "sweep/"):
        for entry in storage.execute(List(prefix)).entries:
            found[entry.key] = storage.execute(Get(entry.key)).body
    return found


def test_what_is_in_shape_is_not_read_again(backend: Backend) -> None:
    storage = CountingStorage(filled(backend, ["a", "b", LONG], 9))
    first = swept(storage)
    assert (first.threads, first.looked_at, first.compacted, first.failures) == (3, 3, 3, {})
    assert swept(storage).looked_at == 0  # what was merged away is not ripe before the grace is over
    assert swept(storage, grace=0).freed_objects == first.merged
    storage.reset()
    last = swept(storage, grace=0)
    assert (last.threads, last.unchanged, last.looked_at) == (3, 3, 0)
    assert storage.kinds == {"List": 1, "Get": 1}
    assert storage.requests[0].key == sweep_key(0, 1)


def test_only_what_changed_is_looked_at(backend: Backend) -> None:
    storage = CountingStorage(filled(backend, ["a", "b", "c"], 1))
    swept(storage)
    with backend.open() as saver:
        chain(saver, "b", [{"value": "new"}])
    storage.reset()
    found = swept(storage)
    assert (found.unchanged, found.looked_at) == (2, 1)
    assert {request.key for request in storage.requests if request.of_manifest} == {"manifests/", manifest_key("b")}


def test_twenty_thousand_idle_threads_are_swept_by_listing_them() -> None:
    storage = CountingStorage(open_storage("memory://"))
    for number in range(20_000):
        thread_id = f"thread-{number}"
        body = pack_header(Header(thread_id, b"12345678"), "none")
        storage.execute(Create(manifest_key(thread_id), body))
    first = Sweep(Options())
    for key in run(first.plan(), storage):
        first.settle(Outcome(key, tag=storage.execute(Get(key)).tag))
    run(first.close(), storage)
    storage.reset()
    found = run(sweep(engine_on(storage), Options()), storage)
    assert (found.threads, found.unchanged, found.looked_at) == (20_000, 20_000, 0)
    assert storage.kinds == {"List": 20, "Get": 1}  # the one read is of what the first sweep remembered
    assert storage.received < 20_000 * 12 + 100


@pytest.mark.slow
def test_twenty_thousand_idle_threads_of_files(tmp_path: Path) -> None:
    storage = CountingStorage(open_storage(tmp_path.as_uri(), fsync=False))
    engine = engine_on(storage)
    empty = ("msgpack", b"{}")
    for number in range(20_000):
        run(engine.put(f"thread-{number}", "", "1", None, empty, empty, {"c": 1}, {"c": (1, empty)}), storage)
    assert swept(storage).looked_at == 20_000
    storage.reset()
    assert swept(storage).unchanged == 20_000
    assert storage.kinds == {"List": 20, "Get": 1}


def test_a_dry_run_says_what_a_sweep_does_and_changes_nothing(backend: Backend) -> None:
    storage = filled(backend, ["a", "b"], 12)
    retention = Retention(max_checkpoints=3)
    before = objects(storage)
    planned = swept(storage, retention, dry_run=True)
    assert objects(storage) == before
    assert (planned.compacted, planned.expired, planned.failures) == (2, 18, {})
    assert planned.rewritten_bytes > 0
    done = swept(storage, retention)
    assert done.expired == planned.expired
    assert swept(storage, retention, grace=0, dry_run=True).freed_objects == 24


def test_retention_is_applied(backend: Backend) -> None:
    storage = filled(backend, ["a", "b"], 6)
    found = swept(storage, Retention(max_checkpoints=2))
    assert (found.expired, found.failures) == (8, {})
    with backend.open(compaction="off") as saver:
        assert [len(listed(saver, at(thread_id))) for thread_id in ("a", "b")] == [2, 2]
    assert swept(storage, Retention(max_checkpoints=1)).expired == 2  # other settings: looked at again


class Clock:
    """The `time` of `lsm.drive`, set ahead."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
    ahead = timedelta()

    def time(self) -> float:
        return time.time() + self.ahead.total_seconds()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lsm.drive, "time", clock)
    return clock


def test_threads_that_rest_are_looked_at_when_something_expires_and_then_never_again(clock: Clock) -> None:
    backend = Backend("memory", "memory://sweep-rests")
    storage = filled(backend, ["a"], 4)
    retention = Retention(max_age=timedelta(days=8))
    looks = Counter[int]()
    for day in range(20):
        clock.ahead = timedelta(days=day)
        found = swept(storage, retention)
        looks[day] += found.looked_at
        assert found.expired == (3 if day == 8 else 0)
    assert sum(looks[day] for day in range(8)) <= 8
    assert sum(looks[day] for day in range(10, 20)) == 0


def test_idle_threads_are_removed_when_it_is_time(clock: Clock, backend: Backend) -> None:
    storage = filled(backend, ["a", "b"], 2)
    retention = Retention(idle=timedelta(days=3))
    assert swept(storage, retention).removed == 0
    clock.ahead = timedelta(days=2)
    assert swept(storage, retention).looked_at == 0
    with backend.open(compaction="off") as saver:
        chain(saver, "b", [{"value": "new"}])
    clock.ahead = timedelta(days=3, minutes=1)
    found = swept(storage, retention)
    assert (found.removed, found.failures) == (1, {})
    assert storage.execute(Get(manifest_key("a"))) is None
    assert not storage.execute(List(segments_prefix("a"))).entries
    with backend.open(compaction="off") as saver:
        assert len(listed(saver, at("b"))) == 3


def test_garbage_is_removed_when_it_is_ripe(clock: Clock) -> None:
    storage = filled(Backend("memory", "memory://sweep-ripe"), ["a"], 9)
    assert swept(storage).freed_objects == 0
    clock.ahead = timedelta(minutes=30)
    swept(storage)
    assert swept(storage).looked_at == 0
    clock.ahead = timedelta(minutes=61)
    assert swept(storage).freed_objects == 9
    assert swept(storage).looked_at == 0


@pytest.mark.parametrize("body", [b"", b"nonsense", b"\0" * 4096], ids=["empty", "short", "zeros"])
def test_a_damaged_memory_costs_reads_only(body: bytes) -> None:
    storage = open_storage("memory://")
    for number in range(3):
        header = Header(f"thread-{number}", b"12345678")
        storage.execute(Create(manifest_key(header.thread_id), pack_header(header, "none")))
    assert swept(storage).looked_at == 3
    assert swept(storage).looked_at == 0
    tag = storage.execute(Get(sweep_key(0, 1))).tag
    storage.execute(PutIf(sweep_key(0, 1), body, tag))
    assert swept(storage).looked_at == 3
    assert swept(storage).looked_at == 0


def test_shards_share_a_store() -> None:
    storage = filled(Backend("memory", "memory://sweep-shards"), [f"thread-{number}" for number in range(40)], 1)
    found = [swept(storage, shard=(number, 3)) for number in range(3)]
    assert sum(each.threads for each in found) == 40
    assert all(each.threads for each in found)
    assert all(swept(storage, shard=(number, 3)).looked_at == 0 for number in range(3))


def test_a_pattern_chooses_threads_and_the_others_stay_known(backend: Backend) -> None:
    storage = filled(backend, ["user-1", "user-2", "other", LONG], 1)
    assert swept(storage, threads="user-*").threads == 2
    assert swept(storage, threads="x*").threads == 1
    found = swept(storage)
    assert (found.threads, found.unchanged) == (4, 3)


def test_what_time_does_not_suffice_for_is_left_to_the_next(clock: Clock) -> None:
    storage = filled(Backend("memory", "memory://sweep-time"), ["a", "b", "c"], 9)
    ends = storage.execute(List("segments/")).entries

    def slow(outcome: Outcome, total: int) -> None:
        assert total == 3
        clock.ahead += timedelta(seconds=40)

    found = run(sweep(engine_on(storage), Options(most=60), 1, slow), storage)
    assert (found.looked_at, found.left) == (2, 1)
    assert len(storage.execute(List("segments/")).entries) == len(ends) + 2
    assert swept(storage).compacted == 1


def test_a_damaged_thread_fails_alone_and_nothing_of_it_is_removed(backend: Backend) -> None:
    storage = filled(backend, ["a", "b", "c"], 9)
    before = [entry.key for entry in storage.execute(List(segments_prefix("b"))).entries]
    victim = before[4]
    body = bytearray(storage.execute(Get(victim)).body)
    body[len(body) // 2] ^= 1
    storage.execute(Delete([victim]))
    storage.execute(Create(victim, bytes(body)))
    found = swept(storage, grace=0)
    assert (found.looked_at, found.compacted) == (3, 2)
    assert list(found.failures) == ["b"]
    assert victim in found.failures["b"]
    assert [entry.key for entry in storage.execute(List(segments_prefix("b"))).entries] == before
    assert list(swept(storage, grace=0).failures) == ["b"]  # it is not taken for one in shape


def test_a_manifest_that_is_none_fails_alone() -> None:
    storage = filled(Backend("memory", "memory://sweep-none"), ["a"], 1)
    storage.execute(Create(f"manifests/00/=={'0' * 64}", b"nonsense"))
    found = swept(storage)
    assert (found.threads, found.failures.keys()) == (2, {f"manifests/00/=={'0' * 64}"})


def test_two_sweeps_at_once_leave_the_store_whole(backend: Backend) -> None:
    storage = filled(backend, ["a", "b", "c", "d"], 9)
    runtime = Runtime(storage)
    both = [runtime.submit(sweep(engine_on(storage), Options())) for _ in range(2)]
    assert [each.result().failures for each in both] == [{}, {}]
    runtime.close()
    with backend.open() as saver:
        assert [len(listed(saver, at(thread_id))) for thread_id in "abcd"] == [9] * 4


def test_a_task_may_be_done_again(backend: Backend) -> None:
    storage = filled(backend, ["a"], 9)
    first = run(tend(engine_on(storage), manifest_key("a"), Options()), storage)
    again = run(tend(engine_on(storage), manifest_key("a"), Options()), storage)
    assert (first.merged, again.merged, first.tag) == (9, 0, again.tag)
    gone = run(tend(engine_on(storage), manifest_key("nobody"), Options()), storage)
    assert (gone.merged, gone.failure, gone.tag) == (0, None, None)


@pytest.mark.parametrize("options", [{"shard": (2, 2)}, {"shard": (0, 0)}, {"grace": -1.0}, {"most": 0.0}], ids=str)
def test_options_that_make_no_sense_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=r"shard|grace|time"):
        Options(**options)


def test_large_values_that_older_segments_refer_to_stay(tmp_path: Path) -> None:
    """A merge of the newest segments does not take the values of the others for garbage."""
    with LSMSaver.from_conn_string(tmp_path.as_uri(), fsync=False, compaction="off", compression="none") as saver:
        values = []
        for _ in range(20):
            values.append(os.urandom(300_000))
            chain(saver, "a", [{"value": values[-1]}])
            saver.flush("a")
        storage = open_storage(tmp_path.as_uri())
        for _ in range(40):  # small ones on top, merged without those below
            values.append(os.urandom(3_000))
            chain(saver, "a", [{"value": values[-1]}])
            saver.flush("a")
            swept(storage, grace=0)
    with LSMSaver.from_conn_string(tmp_path.as_uri()) as saver:
        found = [each.checkpoint["channel_values"]["value"] for each in saver.list(at("a"))]
        assert sorted(found) == sorted(values)


def test_segments_that_are_born_large_are_merged_too(tmp_path: Path) -> None:
    with LSMSaver.from_conn_string(tmp_path.as_uri(), fsync=False, compaction="off", compression="none") as saver:
        for _ in range(8):
            chain(saver, "a", [{"value": os.urandom(10_000)} for _ in range(6)])
            saver.flush("a")
    assert swept(open_storage(tmp_path.as_uri())).merged == 8
