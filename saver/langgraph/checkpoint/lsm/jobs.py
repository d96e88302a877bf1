"""Whole stores at a time, from Python: what a scheduled job does.

Rules of this module:

- It opens stores, and decides where the work on each thread runs: here, on an executor, or on a Dask cluster. What is
  done to a thread is the engine's (`lsm.sweep`).
- A task is one thread. It is idempotent, so that it may be retried, and carries no more than an address.
- Whoever is asked to stop (`lsm.stop`) begins no other thread, leaves those under way at their next request, and says
  what it has done. An interrupt asks for it, too, so that nothing goes on behind the back of who was interrupted.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import lru_cache
from types import TracebackType
from typing import Any, Self, TypeVar

from lsm.collect import check_grace
from lsm.drive import Runtime
from lsm.engine import Engine
from lsm.errors import NotFound
from lsm.format.envelope import Compression
from lsm.format.names import ROOT_KEY
from lsm.retention import Retention
from lsm.root import refuse_nested
from lsm.steps import Get, Steps
from lsm.stop import Flag, Stop
from lsm.storage import open_storage
from lsm.sweep import Options, Outcome, Summary, Sweep, failed, sweep, tend

T = TypeVar("T")

_CACHE = 64 << 20
_WIDTH = 4
_TASKS = 256
_RETRIES = 3
_NOTICE = 0.2
"""Seconds until a request to stop is noticed by who waits for tasks."""

Progress = Callable[[Outcome, int], None]
"""Told what was done for each thread, and how many threads there are to do in all."""


class Store:
    """A store, opened for work on whole threads. A context manager.

    Args:
        url: The address, as `LSMSaver.from_conn_string` takes it.
        store_options: As there.
        retention: What expires.
        compression: How new blocks are compressed.
        stop: Asks what it runs to end early.

    Raises:
        ValueError: If the address or the options make no sense.
    """

    def __init__(
        self,
        url: str,
        store_options: Mapping[str, Any] | None = None,
        retention: Retention | None = None,
        compression: Compression = "zstd",
        stop: Stop | None = None,
    ):
        self.stop = stop or Stop()
        self.storage = open_storage(url, store_options=store_options)
        self.runtime = Runtime(self.storage)
        self.engine = Engine(
            self.storage.url,
            self.storage.appends,
            os.urandom,
            conditional_deletes=self.storage.conditional_deletes,
            compression=compression,
            cache_bytes=_CACHE,
            retention=retention,
        )

    def run(self, steps: Steps[T]) -> T:
        """Run steps until they are asked to stop; their requests side by side, where the store is remote.

        Raises:
            lsm.stop.Stopped: If they were asked.
        """
        return self.finish(self.stop.unless_asked(steps))

    def finish(self, steps: Steps[T]) -> T:
        """Run steps to their end, whatever they make of being asked to stop. An interrupt asks for that."""
        try:
            return self.runtime.run(steps) if self.storage.local else self.runtime.submit(steps).result()
        except KeyboardInterrupt:
            self.stop.ask()
            raise

    def expect(self) -> None:
        """See that there is a store.

        Raises:
            lsm.errors.NotFound: If nothing was ever written there.
            lsm.errors.NestedStoreError: If it lies in the folders of another.
        """
        self.finish(refuse_nested(self.storage.url))
        if self.finish(_get(ROOT_KEY)) is None:
            raise NotFound(
                f"{self.storage.url}: there is no store here: {ROOT_KEY} is missing, which the first write makes. "
                "Check the address.",
                ROOT_KEY,
            )

    def close(self) -> None:
        """Let go of connections."""
        self.runtime.close()
        self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _get(key: str) -> Steps[Any]:
    return (yield Get(key))


def compact_store(
    url: str,
    *,
    store_options: Mapping[str, Any] | None = None,
    retention: Retention | None = None,
    compression: Compression = "zstd",
    threads: str | None = None,
    shard: tuple[int, int] = (0, 1),
    grace: timedelta = timedelta(hours=1),
    offline: bool = False,
    max_time: timedelta | None = None,
    dry_run: bool = False,
    concurrency: int | None = None,
    executor: Executor | Any = None,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> Summary:
    """Bring all threads of a store into shape: merge segments, remove what has expired, then what is garbage.

    Threads that have not changed since they were last found in shape are passed by without a request of their own.
    Writers, readers and other compactions of the same store may go on meanwhile.

    Args:
        url: The store, as `LSMSaver.from_conn_string` takes it.
        store_options: As there.
        retention: What expires; nothing, if left out.
        compression: How what is rewritten is compressed.
        threads: Only threads whose id matches this pattern, as in `"user-*"`.
        shard: Of how many jobs that share the store this is which one, as (number from 0, count).
        grace: How old garbage must be.
        offline: That nobody uses the store meanwhile. A grace below ten minutes needs it.
        max_time: Begin no thread after so long; the next call goes on with those that are left.
        dry_run: Change nothing, and say what would be done.
        concurrency: How many threads at once; 4 (with an executor: 256 tasks) if left out.
        executor: Where to do it: any `concurrent.futures.Executor`, or a Dask `Client`; here, if left out. Processes
            that work on an object store must be spawned, not forked.
        progress: Told what was done for each thread, and how many there are to do in all.
        stop: Asks for an early end, from any thread or signal handler: `stop.ask()`. No other thread is begun; those
            under way are left at their next request, other than in the processes of an executor, which finish them.

    Returns:
        What was done, with the threads that failed by name: these do not stop the others.

    Raises:
        ValueError: If an argument makes no sense.
        lsm.errors.NotFound: If there is no store.
        lsm.errors.StorageError: If it cannot be listed.

    Example:
        >>> from langgraph.checkpoint.base import empty_checkpoint
        >>> from langgraph.checkpoint.lsm import LSMSaver
        >>> saver = LSMSaver.from_conn_string("memory://jobs")
        >>> at = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}
        >>> _ = saver.put(at, empty_checkpoint(), {"source": "input", "step": -1}, {})
        >>> compact_store("memory://jobs").looked_at, compact_store("memory://jobs").looked_at
        (1, 0)
    """
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency!r}")
    options = Options(
        shard, threads, grace.total_seconds(), dry_run, max_time.total_seconds() if max_time is not None else None
    )
    if not dry_run:
        check_grace(grace.total_seconds(), offline)
    if executor is not None and not isinstance(executor, ThreadPoolExecutor) and url.startswith("memory:"):
        raise ValueError(f"{url!r} is in the memory of this process, where no other process can work on it")
    with Store(url, store_options, retention, compression, stop) as store:
        store.expect()
        if executor is None:
            return store.finish(sweep(store.engine, options, concurrency or _WIDTH, progress, store.stop))
        task = pickle.dumps((url, dict(store_options or {}) or None, retention, compression))
        width = concurrency or _TASKS
        if isinstance(executor, Executor):
            here = store.stop if isinstance(executor, ThreadPoolExecutor) else None
            return _distribute(store, options, executor, (task, here), width, progress, _cancel)
        job = os.urandom(8)
        # Its own futures would not be those of the library.
        tasks = executor.get_executor(pure=False, retries=_RETRIES)
        return _distribute(store, options, tasks, (task, job), width, progress, lambda _: _tell(executor, job))


def _distribute(
    store: Store,
    options: Options,
    executor: Executor,
    task: tuple[bytes, Stop | bytes | None],
    width: int,
    progress: Progress | None,
    end: Callable[[Iterable[Future[Outcome]]], None],
) -> Summary:
    """Sweep a store with tasks on an executor, of which it has `width` at a time. `end` is given those under way when
    it is asked to stop."""
    stop = store.stop
    one = Sweep(options, store.engine.retention, stop)
    keys = store.finish(one.plan())
    under_way: dict[Future[Outcome], str] = {}
    ended = False

    def settle(outcome: Outcome) -> None:
        one.settle(outcome)
        if progress is not None and not outcome.stopped:
            progress(outcome, len(keys))

    def settle_some() -> None:
        nonlocal ended
        if stop.asked and not ended:
            ended = True
            end(under_way)
        done = {future for future in under_way if future.cancelled()}
        for future in done or wait(under_way, _NOTICE, FIRST_COMPLETED).done:
            key = under_way.pop(future)
            if future.cancelled():
                settle(Outcome(key, stopped=True))
            elif (error := future.exception()) is not None:
                settle(failed(key, error))
            else:
                settle(future.result())

    try:
        for key in keys:
            while len(under_way) >= width:
                settle_some()
            if store.finish(one.may_begin()):
                try:
                    under_way[executor.submit(_tend_at, *task, key, options)] = key
                except RuntimeError as error:  # its processes have died
                    settle(failed(key, error))
        while under_way:
            settle_some()
    except BaseException:
        stop.ask()
        end(under_way)
        raise
    return store.finish(one.close())


def _cancel(futures: Iterable[Future[Outcome]]) -> None:
    for future in futures:
        future.cancel()


def _tell(client: Any, job: bytes) -> None:
    """Tell all workers of a Dask cluster that a job is to end. To cancel its tasks would leave them running."""
    client.run(_end_job, job, on_error="ignore")


def heed(flag: Flag) -> None:
    """Have the tasks of this process end when a flag is set: what a pool's processes begin with."""
    global _told  # noqa: PLW0603 (the tasks of a process have nothing else in common)
    _told = Stop(flag)


_told = Stop()
_ended_jobs: set[bytes] = set()


class _JobsFlag:
    """Whether a job was told to end on this worker."""

    def __init__(self, job: bytes):
        self._job = job

    @property
    def value(self) -> bool:
        return self._job in _ended_jobs

    @value.setter
    def value(self, _: Any) -> None:
        _ended_jobs.add(self._job)


def _tend_at(task: bytes, stop: Stop | bytes | None, key: str, options: Options) -> Outcome:
    """One task, wherever it runs."""
    if isinstance(stop, bytes):
        stop = Stop(_JobsFlag(stop))
    store = _opened(task)
    return store.finish((stop or _told).unless_asked(tend(store.engine, key, options)))


def _end_job(job: bytes) -> None:
    _ended_jobs.add(job)


@lru_cache(maxsize=4)
def _opened(task: bytes) -> Store:
    """The store of some tasks, once for each process that works on them."""
    return Store(*pickle.loads(task))
