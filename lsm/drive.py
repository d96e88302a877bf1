"""Who runs the steps: the drivers for sync and for async callers, and what runs behind their backs.

Rules of this module:

- Threads, event loops and the clock are here, and nowhere else in the engine.
- A driver sends each answer into the generator and throws each failure into it, cancellation and
  `KeyboardInterrupt` included, so that its `except` and `finally` run; and it closes the generator in the end.
- Requests to a local storage are executed where the driver is, one after the other: no thread, no suspension.
  Requests to a remote one run side by side, where an `All` says so.
- The items of an `All` never wait for each other.
- Detached steps take a thread only while they do something: one that waits for a future, or sleeps, gives it back.
- All threads are daemons. What must not be lost when the interpreter exits is waited for, for so long; and so are the
  threads of a remote storage's library that may still be in Python.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from queue import SimpleQueue
from types import GeneratorType
from typing import Any, Generic, TypeVar, cast

from lsm.steps import All, Monotonic, Now, Sleep, Steps, Wait
from lsm.storage import Storage

T = TypeVar("T")

SIDE_BY_SIDE = 16
"""Requests that the sync callers of a process have under way at once, beside one on each caller's own thread."""

DETACHED = 32
"""Threads on which one runtime runs detached steps against a local storage."""

MOMENT = 0.001
"""Seconds for which detached steps that sleep keep their thread."""

EXIT_SECONDS = 30.0
"""How long an exiting interpreter, and `Runtime.close`, wait for detached steps."""

EXIT_PAUSE = 0.1
"""Seconds between the last answer to an async request and the exit of the interpreter. obstore's own threads wake event
loops by calling Python, and up to 3.13 an exiting interpreter ends such a thread in the middle, which Rust takes for
a failure and aborts the process (https://github.com/PyO3/pyo3-async-runtimes/issues/40)."""

# Guards who has which threads. Held across a fork, so that it is free in the child.
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def run(steps: Steps[T], storage: Storage) -> T:
    """Run steps for a sync caller, on its own thread; items of an `All` on a remote storage on others beside.

    Returns:
        What the steps return.

    Raises:
        BaseException: What the steps raise.

    Example:
        >>> from lsm.steps import Create, Get
        >>> from lsm.storage import open_storage
        >>> def copy(source, target):
        ...     found = yield Get(source)
        ...     yield Create(target, found.body)
        ...     return len(found.body)
        >>> storage = open_storage("memory://")
        >>> tag = storage.execute(Create("a", b"hello"))
        >>> run(copy("a", "b"), storage)
        5
    """
    try:
        try:
            request = next(steps)
            while True:
                try:
                    answer = _answer(request, storage)
                except BaseException as error:  # noqa: BLE001 (the steps decide, and raise it again)
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as stop:
            return cast(T, stop.value)
    finally:
        steps.close()


async def arun(steps: Steps[T], storage: Storage) -> T:
    """Run steps for an async caller, on its event loop. On a local storage, steps that only read and write do not
    suspend. Takes, returns and raises what `run` does."""
    try:
        try:
            request = next(steps)
            while True:
                try:
                    answer = await _aanswer(request, storage)
                except BaseException as error:  # noqa: BLE001 (as above; cancellation, too, is for the steps to see)
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as stop:
            return cast(T, stop.value)
    finally:
        steps.close()


class Runtime:
    """The drivers for one storage, and the threads for steps that belong to no caller.

    A commit of an async caller is run detached: a sync caller on the same event loop's thread may be waiting for it
    (it is in the same group), so that it must not need that loop; and a caller that is cancelled must not take down
    the commit of those who queued with it.

    Threads are started when first needed, in a forked child anew, and end with `close` or with the runtime.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._background: _Background | None = None
        _runtimes.add(self)

    def run(self, steps: Steps[T]) -> T:
        """`lsm.drive.run`, on this storage."""
        return run(steps, self.storage)

    async def arun(self, steps: Steps[T]) -> T:
        """`lsm.drive.arun`, on this storage."""
        return await arun(steps, self.storage)

    async def arun_detached(self, steps: Steps[T]) -> T:
        """Run steps where no caller's event loop can block, cancel or close them, and await their result. They have
        been started when this suspends, and a caller that is cancelled leaves them running."""
        return cast(T, await _ended(self.submit(steps)))

    def submit(self, steps: Steps[T]) -> Future[T]:
        """Run steps in the background, as `arun_detached` does. The future is to be waited for, not to be cancelled."""
        try:
            with _lock:
                future: Future[T] = self._threads().start(self, steps)
        except RuntimeError:  # an exiting interpreter starts no threads: nobody is left to be blocked either
            future = Future()
            _fulfil(future, lambda: self.run(steps))
        return future

    def drain(self, timeout: float = EXIT_SECONDS) -> None:
        """Wait for the detached steps that are under way, at most `timeout` seconds."""
        with _lock:
            background = self._background
            under_way = list(background.under_way) if background and background.process == os.getpid() else []
        wait(under_way, timeout)

    def close(self, timeout: float = EXIT_SECONDS) -> None:
        """Wait for detached steps, at most `timeout` seconds, and stop the threads. Steps that take longer are
        cancelled on a remote storage, and end in their own time on a local one."""
        self.drain(timeout)
        with _lock:
            background, self._background = self._background, None
            if background is not None:
                background.stop()

    def _threads(self) -> _Background:
        if self._background is None or self._background.process != os.getpid():
            self._background = _Threads(DETACHED) if self.storage.local else _Loop()
            # A runtime that nobody closes ends its threads with itself. At exit, `_drain_all` is what counts.
            weakref.finalize(self, self._background.stop).atexit = False
        return self._background


class _Threads:
    """At most `size` daemon threads that run calls, in the process that made them. Callers hold `_lock`.

    Once it is stopped, each call has a thread of its own: steps that waited at that time still have to go on.
    """

    def __init__(self, size: int) -> None:
        self.process = os.getpid()
        self.under_way: set[Future[Any]] = set()
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._size = size
        self._count = 0
        self._stopped = False

    def start(self, runtime: Runtime, steps: Steps[T]) -> Future[T]:
        """Raises `RuntimeError` where there is no thread and none can be started."""
        detached: _Detached[T] = _Detached(self, runtime, steps)
        _track(detached.outcome, self.under_way)
        try:
            self.submit(detached.go_on)
        except RuntimeError:
            self.under_way.discard(detached.outcome)
            raise
        return detached.outcome

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Raises `RuntimeError` where there is no thread and none can be started."""
        future: Future[T] = Future()
        if self._stopped:
            threading.Thread(target=_fulfil, args=(future, call), name="lsm", daemon=True).start()
            return future
        if not self._idle.acquire(blocking=False) and self._count < self._size:
            try:
                threading.Thread(target=_work, args=(self._jobs, self._idle), name="lsm", daemon=True).start()
                self._count += 1
            except RuntimeError:
                if not self._count:
                    raise
        _track(future, self.under_way)
        self._jobs.put((future, call))
        return future

    def stop(self) -> None:
        if self.process == os.getpid():
            self._stopped = True
            for _ in range(self._count):
                self._jobs.put(None)


class _Detached(Generic[T]):
    """Steps that run on a pool's threads, one after the other: while they wait, on none.

    Args:
        threads: The pool.
        runtime: Whose steps they are. It is held on to, so that it does not end its threads meanwhile.
        steps: The steps.

    Attributes:
        outcome: Their result, or what they raised.
    """

    def __init__(self, threads: _Threads, runtime: Runtime, steps: Steps[T]) -> None:
        self.outcome: Future[T] = Future()
        self._threads = threads
        self._runtime = runtime
        self._steps = steps
        self._answer: Any = None
        self._error: BaseException | None = None

    def go_on(self) -> None:
        """Run the steps until they wait, or to their end."""
        answer, error = self._answer, self._error
        while True:
            try:
                request = self._steps.send(answer) if error is None else self._steps.throw(error)
            except StopIteration as stop:
                self.outcome.set_result(stop.value)
                return
            except BaseException as raised:  # noqa: BLE001 (whoever waits for the outcome gets it)
                self.outcome.set_exception(raised)
                return
            if self._suspends(request):
                return
            answer, error = None, None
            try:
                answer = _answer(request, self._runtime.storage)
            except BaseException as raised:  # noqa: BLE001 (the steps decide)
                error = raised

    def _suspends(self, request: Any) -> bool:
        """Whether the steps wait for something, after which they go on by themselves."""
        if type(request) is Wait and not request.future.done():
            request.future.add_done_callback(self._woken)
            return True
        if type(request) is Sleep and request.seconds > MOMENT:
            with suppress(RuntimeError):  # an exiting interpreter starts no threads: it sleeps on this one
                _timer().call(request.seconds, self._slept)
                return True
        return False

    def _woken(self, future: Future[Any]) -> None:
        self._error = future.exception()
        self._answer = None if self._error is not None else future.result()
        self._resume()

    def _slept(self) -> None:
        self._answer, self._error = None, None
        self._resume()

    def _resume(self) -> None:
        try:
            with _lock:
                self._threads.submit(self.go_on)
        except RuntimeError:  # an exiting interpreter starts no threads; and not here: whoever woke it may hold a lock
            with suppress(RuntimeError):
                _timer().call(0.0, self.go_on)


class _Timer:
    """One daemon thread that calls things later, in the process that made it."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="lsm timer", daemon=True).start()

    def call(self, seconds: float, what: Callable[[], None]) -> None:
        """Have something called after so many seconds. It must not take long."""
        with self._changed:
            heappush(self._waiting, (time.monotonic() + seconds, next(self._numbers), what))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting or self._waiting[0][0] > (now := time.monotonic()):
                    self._changed.wait(self._waiting[0][0] - now if self._waiting else None)
                what = heappop(self._waiting)[2]
            what()
            del what  # hold on to nothing while idle


class _Loop:
    """An event loop on a daemon thread of its own, in the process that made it. Callers hold `_lock`."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.under_way: set[Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="lsm", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    def start(self, runtime: Runtime, steps: Steps[T]) -> Future[T]:
        future = asyncio.run_coroutine_threadsafe(runtime.arun(steps), self._loop)
        _track(future, self.under_way)
        return future

    def stop(self) -> None:
        if self.process == os.getpid():
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._loop.stop)


_Background = _Threads | _Loop

_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()
_timers: dict[int, _Timer] = {}  # by process
_beside: dict[int, _Threads] = {}  # by process: what its sync callers have under way side by side
_answered = -EXIT_PAUSE  # when a remote storage last answered an async request, on the monotonic clock


@atexit.register
def _drain_all() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    for runtime in list(_runtimes):
        runtime.drain(max(0.0, deadline - time.monotonic()))
    time.sleep(max(0.0, _answered + EXIT_PAUSE - time.monotonic()))


def _timer() -> _Timer:
    with _lock:
        if (timer := _timers.get(os.getpid())) is None:
            timer = _timers[os.getpid()] = _Timer()
        return timer


def _track(future: Future[Any], under_way: set[Future[Any]]) -> None:
    under_way.add(future)
    future.add_done_callback(under_way.discard)


def _work(jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None], idle: threading.Semaphore) -> None:
    while (job := jobs.get()) is not None:
        if job[0].set_running_or_notify_cancel():
            _fulfil(*job)
        del job  # hold on to nothing while idle
        idle.release()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
    finally:
        loop.close()


def _fulfil(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 (whoever waits for the future gets it)
        future.set_exception(error)
    else:
        future.set_result(result)


async def _ended(future: Future[Any]) -> Any:
    """The result of another thread's future. Unlike `asyncio.wrap_future`, this never cancels it, and the future does
    not mind if the loop of a caller who gave up has been closed."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    def tell_loop(_: Future[Any]) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(tell)

    if not future.done():
        future.add_done_callback(tell_loop)
        await ended
    return future.result()


def _answer(request: Any, storage: Storage) -> Any:
    kind = type(request)
    if kind is All:
        return _all(request.of, storage)
    if kind is GeneratorType:
        return run(request, storage)
    if kind is Wait:
        return request.future.result()
    if kind is Sleep:
        return time.sleep(request.seconds)
    if kind is Monotonic:
        return time.monotonic()
    if kind is Now:
        return time.time()
    return storage.execute(request)


async def _aanswer(request: Any, storage: Storage) -> Any:
    kind = type(request)
    if kind is All:
        return await _aall(request.of, storage)
    if kind is GeneratorType:
        return await arun(request, storage)
    if kind is Wait:
        return await _ended(request.future)
    if kind is Sleep:
        return await asyncio.sleep(request.seconds)
    if kind is Monotonic:
        return time.monotonic()
    if kind is Now:
        return time.time()
    return storage.execute(request) if storage.local else await _aremote(request, storage)


async def _aremote(request: Any, storage: Storage) -> Any:
    global _answered  # noqa: PLW0603 (the whole process exits at once)
    try:
        return await storage.aexecute(request)
    finally:
        _answered = time.monotonic()


def _all(items: Sequence[Any], storage: Storage) -> list[Any]:
    """The outcomes of the items. One is run here and the others on the threads beside; those that none of them has
    begun by then are run here, too. So a thread only ever waits for what another thread is doing, and an `All` in
    steps that run on those threads cannot find them all waiting for each other."""
    if storage.local or len(items) < 2:
        return [_settle(item, storage) for item in items]
    futures: list[Future[Any]] = []
    try:
        with suppress(RuntimeError), _lock:  # an exiting interpreter starts no threads
            futures.extend(_threads_beside().submit(partial(_settle, item, storage)) for item in items[1:])
        outcomes = [_settle(items[0], storage)]
        for item, future in zip(items[1:], futures, strict=False):
            outcomes.append(_settle(item, storage) if future.cancel() else future.result())
        outcomes += [_settle(item, storage) for item in items[len(outcomes) :]]
    except BaseException:  # an interrupt: what has begun ends by itself, what has not will not begin
        for future in futures:
            future.cancel()
        raise
    return outcomes


def _settle(item: Any, storage: Storage) -> Any:
    try:
        return _answer(item, storage)
    except Exception as error:  # noqa: BLE001 (an outcome, for the steps to look at)
        return error


def _threads_beside() -> _Threads:
    if (threads := _beside.get(os.getpid())) is None:
        threads = _beside[os.getpid()] = _Threads(SIDE_BY_SIDE)
    return threads


async def _aall(items: Sequence[Any], storage: Storage) -> list[Any]:
    if storage.local:
        return [await _asettle(item, storage) for item in items]
    return await asyncio.gather(*(_aanswer(item, storage) for item in items), return_exceptions=True)


async def _asettle(item: Any, storage: Storage) -> Any:
    try:
        return await _aanswer(item, storage)
    except Exception as error:  # noqa: BLE001 (as above)
        return error
