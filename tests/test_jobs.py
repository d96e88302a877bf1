"""Whole stores at a time, from Python: on executors, on a cluster, and with what fails named."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from langgraph.checkpoint.lsm import LSMSaver, Retention
from langgraph.checkpoint.lsm.jobs import compact_store
from lsm.errors import NotFound
from lsm.format.names import segments_prefix
from lsm.sweep import Outcome
from tests.conftest import Backend
from tests.support.checkpoints import at, chain, listed

THREADS = [f"thread-{number}" for number in range(6)]


def fill(url: str, **options: Any) -> None:
    """Six threads, each with nine segments."""
    with LSMSaver.from_conn_string(url, compaction="off", compression="none", **options) as saver:
        for thread_id in THREADS:
            for _ in range(9):
                chain(saver, thread_id, [{"value": thread_id}])
                saver.flush(thread_id)


def counts(url: str, **options: Any) -> list[int]:
    with LSMSaver.from_conn_string(url, compaction="off", **options) as saver:
        return [len(listed(saver, at(thread_id))) for thread_id in THREADS]


def test_a_store_is_compacted(backend: Backend) -> None:
    fill(backend.url, **backend.options)
    seen: list[tuple[str | None, int]] = []

    def progress(outcome: Outcome, total: int) -> None:
        seen.append((outcome.thread_id, total))

    found = compact_store(backend.url, **backend.options, concurrency=2, progress=progress)
    assert (found.threads, found.compacted, found.merged, found.failures) == (6, 6, 54, {})
    assert sorted(seen) == [(thread_id, 6) for thread_id in THREADS]
    assert counts(backend.url, **backend.options) == [9] * 6
    assert compact_store(backend.url, **backend.options).unchanged == 6


def test_in_threads(backend: Backend) -> None:
    fill(backend.url, **backend.options)
    with ThreadPoolExecutor(3) as executor:
        found = compact_store(backend.url, **backend.options, executor=executor, concurrency=2)
    assert (found.compacted, found.failures) == (6, {})
    assert compact_store(backend.url, **backend.options).unchanged == 6


@pytest.fixture
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        yield pool


def test_in_processes(tmp_path: Path, processes: ProcessPoolExecutor) -> None:
    fill(tmp_path.as_uri(), fsync=False)
    retention = Retention(max_checkpoints=4)
    found = compact_store(tmp_path.as_uri(), executor=processes, retention=retention)
    assert (found.looked_at, found.expired, found.failures) == (6, 30, {})
    assert compact_store(tmp_path.as_uri(), executor=processes, retention=retention).looked_at == 0
    assert counts(tmp_path.as_uri()) == [4] * 6


@pytest.mark.slow
def test_in_processes_on_an_object_store(s3: Any, processes: ProcessPoolExecutor) -> None:
    url, options = s3.url(), {"store_options": s3.store_options}
    fill(url, **options)
    assert compact_store(url, **options, executor=processes).compacted == 6
    assert counts(url, **options) == [9] * 6


@pytest.mark.slow
def test_on_a_dask_cluster(tmp_path: Path) -> None:
    from distributed import Client, LocalCluster

    fill(tmp_path.as_uri(), fsync=False)
    damage(tmp_path, THREADS[2])
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        found = compact_store(tmp_path.as_uri(), executor=client)
        assert (found.looked_at, found.compacted) == (6, 5)
        assert list(found.failures) == [THREADS[2]]
        assert compact_store(tmp_path.as_uri(), executor=client).unchanged == 5


def damage(folder: Path, thread_id: str) -> None:
    path = sorted((folder / segments_prefix(thread_id)).iterdir())[3]
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


@pytest.mark.parametrize("executor", [None, ThreadPoolExecutor], ids=["here", "executor"])
def test_what_fails_is_named_and_all_else_is_done(tmp_path: Path, executor: Any) -> None:
    fill(tmp_path.as_uri(), fsync=False)
    damage(tmp_path, THREADS[4])
    pool = executor(2) if executor else None
    found = compact_store(tmp_path.as_uri(), executor=pool)
    if pool:
        pool.shutdown()
    assert (found.looked_at, found.compacted) == (6, 5)
    assert list(found.failures) == [THREADS[4]]
    assert segments_prefix(THREADS[4]) in found.failures[THREADS[4]]


class _Dying(Executor):
    """An executor whose processes die with their second task."""

    def __init__(self) -> None:
        self.tasks = 0

    def submit(self, call: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.tasks += 1
        if self.tasks > 2:
            raise RuntimeError("the pool is broken")
        future: Future[Any] = Future()
        if self.tasks == 2:
            future.set_exception(RuntimeError("a process died"))
        else:
            future.set_result(call(*args, **kwargs))
        return future


def test_an_executor_that_breaks_leaves_the_others_named(tmp_path: Path) -> None:
    fill(tmp_path.as_uri(), fsync=False)
    found = compact_store(tmp_path.as_uri(), executor=_Dying())
    assert (found.looked_at, found.compacted, len(found.failures)) == (6, 1, 5)
    assert sorted(set(found.failures.values())) == [
        "RuntimeError: a process died",
        "RuntimeError: the pool is broken",
    ]


def test_shards_and_times_are_for_executors_too(tmp_path: Path) -> None:
    fill(tmp_path.as_uri(), fsync=False)
    with ThreadPoolExecutor(1) as executor:
        halves = [compact_store(tmp_path.as_uri(), executor=executor, shard=(number, 2)) for number in range(2)]
        assert sum(half.compacted for half in halves) == 6
        late = compact_store(tmp_path.as_uri(), executor=executor, max_time=timedelta(microseconds=1))
    assert (late.looked_at, late.left) == (0, 6)


def test_memory_of_this_process_is_not_for_others(processes: ProcessPoolExecutor) -> None:
    fill("memory://jobs-here")
    with pytest.raises(ValueError, match="memory of this process"):
        compact_store("memory://jobs-here", executor=processes)
    with ThreadPoolExecutor(1) as executor:
        assert compact_store("memory://jobs-here", executor=executor).compacted == 6


def test_a_store_that_is_not_there_is_not_swept(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no store here"):
        compact_store((tmp_path / "typo").as_uri())
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"shard": (3, 3)}, {"grace": timedelta(-1)}], ids=str)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, wrong: Any) -> None:
    fill(tmp_path.as_uri(), fsync=False)
    with pytest.raises(ValueError, match=r"must|shard"):
        compact_store(tmp_path.as_uri(), **wrong)
