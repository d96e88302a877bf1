"""The drivers: answers and failures, side by side, cancellation, detached steps, exits and forks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from lsm.drive import SIDE_BY_SIDE, Runtime, arun, run
from lsm.errors import Conflict
from lsm.steps import All, Create, Get, Now, Sleep, Steps, Wait, results
from lsm.storage import Storage, open_storage
from lsm.storage.memory import MemoryStorage
from tests.support import processes


class Remote(MemoryStorage):
    """A storage that must be asked as a remote one is, and on whose gates requests can be held.

    A request for `gate/...` arrives, and is answered when the test opens the gate.
    """

    local = False

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.arrived = threading.Semaphore(0)
        self.under_way = 0
        self.most_under_way = 0
        self.asked_on: set[str] = set()
        self._lock = threading.Lock()

    def execute(self, request: Any) -> Any:
        self._arrive()
        try:
            deadline = time.monotonic() + 20
            while getattr(request, "key", "").startswith("gate/") and not self.opened.wait(0.01):
                assert time.monotonic() < deadline
            return super().execute(request)
        finally:
            self._leave()

    async def aexecute(self, request: Any) -> Any:
        self._arrive()
        try:
            while getattr(request, "key", "").startswith("gate/") and not self.opened.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            return super().execute(request)
        finally:
            self._leave()

    def await_arrivals(self, number: int) -> None:
        for _ in range(number):
            assert self.arrived.acquire(timeout=20)

    def _arrive(self) -> None:
        with self._lock:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            self.asked_on.add(threading.current_thread().name)
        self.arrived.release()

    def _leave(self) -> None:
        with self._lock:
            self.under_way -= 1


@pytest.fixture(params=["local", "remote"])
def storage(request: pytest.FixtureRequest) -> Storage:
    return open_storage("memory://") if request.param == "local" else Remote()


@pytest.fixture(params=["run", "arun", "detached", "submit"])
def drive(request: pytest.FixtureRequest, storage: Storage) -> Iterator[Callable[[Steps[Any]], Any]]:
    """Each way to run steps on the storage."""
    runtime = Runtime(storage)
    yield {
        "run": runtime.run,
        "arun": lambda steps: asyncio.run(runtime.arun(steps)),
        "detached": lambda steps: asyncio.run(runtime.arun_detached(steps)),
        "submit": lambda steps: runtime.submit(steps).result(20),
    }[request.param]
    runtime.close()


@pytest.fixture
def remote() -> Remote:
    return Remote()


def create(key: str) -> Steps[str]:
    yield Create(key, key.encode())
    return key


def test_answers_are_sent_and_the_result_returned(drive: Any) -> None:
    def steps() -> Steps[Any]:
        tag = yield Create("a", b"x")
        found = yield Get("a")
        before = yield Now()
        nothing = yield Sleep(0.01)
        after = yield Now()
        return found.tag == tag, nothing, 0 < after - before < 20, abs(after - time.time()) < 20

    assert drive(steps()) == (True, None, True, True)


def test_steps_without_requests(drive: Any) -> None:
    def steps() -> Steps[int]:
        return 5
        yield

    assert drive(steps()) == 5


def test_failures_are_thrown_in(drive: Any) -> None:
    def steps() -> Steps[Any]:
        yield Create("a", b"x")
        try:
            yield Create("a", b"y")
        except Conflict as error:
            found = yield Get("a")
            return error.key, found.body

    assert drive(steps()) == ("a", b"x")


def test_failures_that_the_steps_do_not_handle_are_raised(drive: Any) -> None:
    ended = []

    def steps() -> Steps[None]:
        try:
            yield Create("a", b"x")
            yield Create("a", b"y")
        finally:
            ended.append(True)

    with pytest.raises(Conflict):
        drive(steps())
    assert ended == [True]


def test_all_gives_results_and_failures_in_order(drive: Any) -> None:
    def failing() -> Steps[None]:
        yield Get("b")
        raise KeyError("of its own")

    def steps() -> Steps[Any]:
        yield Create("a", b"x")
        return (yield All([Get("b"), Create("a", b"y"), create("c"), All([create("d"), Get("e")]), failing(), Now()]))

    missing, conflict, made, nested, failed, now = drive(steps())
    assert missing is None
    assert isinstance(conflict, Conflict)
    assert (made, nested) == ("c", ["d", None])
    assert isinstance(failed, KeyError)
    assert isinstance(now, float)
    assert drive(iterate(All([]))) == []
    assert drive(iterate(All([create("f")]))) == ["f"]


def iterate(request: Any) -> Steps[Any]:
    return (yield request)


def test_wait_gives_the_result_or_the_exception(drive: Any) -> None:
    def steps(future: Future[int]) -> Steps[Any]:
        return (yield Wait(future))

    late: Future[int] = Future()
    timer = threading.Timer(0.02, late.set_result, [7])
    timer.start()
    assert drive(steps(late)) == 7
    assert drive(steps(late)) == 7
    failed: Future[int] = Future()
    failed.set_exception(KeyError("x"))
    with pytest.raises(KeyError):
        drive(steps(failed))


@pytest.mark.parametrize("kind", ["run", "arun"])
def test_a_remote_all_is_side_by_side(remote: Remote, kind: str) -> None:
    def steps() -> Steps[Any]:
        return results((yield All([Get("gate/a"), iterate(Get("gate/b")), Get("gate/c")])))

    runtime = Runtime(remote)
    call = (lambda: runtime.run(steps())) if kind == "run" else (lambda: asyncio.run(runtime.arun(steps())))
    thread = threading.Thread(target=call)
    thread.start()
    remote.await_arrivals(3)  # before any of them was answered
    remote.opened.set()
    thread.join(20)
    assert remote.under_way == 0


def test_nested_alls_do_not_wait_for_each_others_threads(remote: Remote) -> None:
    def tree(depth: int) -> Steps[int]:
        if not depth:
            yield Get("leaf")
            return 1
        return sum(results((yield All([tree(depth - 1) for _ in range(4)]))))

    totals: list[int] = []
    threads = [threading.Thread(target=lambda: totals.append(run(tree(4), remote))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert totals == [256] * 6
    assert remote.most_under_way <= SIDE_BY_SIDE + 6


@pytest.mark.parametrize("kind", ["run", "arun"])
def test_a_local_all_stays_where_it_is(kind: str) -> None:
    class Local(Remote):
        local = True

    storage = Local()
    steps = iterate(All([Get("a"), create("b"), All([Get("c"), Get("d")])]))
    if kind == "run":
        run(steps, storage)
    else:
        with pytest.raises(StopIteration):
            arun(steps, storage).send(None)  # it ends without having suspended once
    assert storage.asked_on == {threading.current_thread().name}
    assert storage.most_under_way == 1


def test_cancellation_is_thrown_in_and_cleaned_up_after(remote: Remote) -> None:
    seen: list[Any] = []

    def steps() -> Steps[None]:
        try:
            yield All([Get("gate/a"), Get("gate/b")])
        except BaseException as error:
            seen.append(type(error))
            seen.append((yield Create("cleaned", b"")))
            raise
        finally:
            seen.append("finally")

    async def scenario() -> None:
        task = asyncio.create_task(arun(steps(), remote))
        while remote.under_way < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert remote.under_way == 0

    asyncio.run(scenario())
    assert seen == [asyncio.CancelledError, remote.execute(Get("cleaned")).tag, "finally"]


def test_a_cancelled_waiter_leaves_the_future(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    future: Future[int] = Future()

    async def scenario() -> None:
        task = asyncio.create_task(arun(iterate(Wait(future)), storage))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert not future.cancelled()
    future.set_result(1)  # the loop that waited is closed by now
    assert not [record for record in caplog.records if record.name == "concurrent.futures"]


@pytest.mark.parametrize("items", [1, 3])
def test_an_interrupt_is_thrown_in(remote: Remote, items: int) -> None:
    seen: list[Any] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    def steps() -> Steps[None]:
        try:
            yield All([Get(f"gate/{number}") for number in range(items)])
        except BaseException as error:
            seen.append(type(error))
            seen.append((yield Get("still/works")))
            raise

    def interrupt() -> None:
        remote.await_arrivals(items)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(steps(), remote)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    remote.opened.set()
    assert seen == [KeyboardInterrupt, None]


def test_detached_steps_do_not_need_the_callers_loop(storage: Storage) -> None:
    """A sync caller on the loop's own thread waits for an async caller's steps: the loop stands still, they do not."""
    runtime = Runtime(storage)
    committed: Future[str] = Future()

    def commit() -> Steps[None]:
        yield Sleep(0.02)
        committed.set_result((yield from create("a")))

    async def scenario() -> None:
        task = asyncio.create_task(runtime.arun_detached(commit()))
        await asyncio.sleep(0)
        assert runtime.run(iterate(Wait(committed))) == "a"  # blocks the loop
        await task

    asyncio.run(scenario())
    runtime.close()


def test_a_cancelled_caller_leaves_detached_steps_running(storage: Storage) -> None:
    runtime = Runtime(storage)
    go: Future[None] = Future()

    def steps() -> Steps[None]:
        yield Wait(go)
        yield Create("done", b"")

    async def scenario() -> None:
        task = asyncio.create_task(runtime.arun_detached(steps()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    go.set_result(None)
    runtime.close()  # waits
    assert storage.execute(Get("done")) is not None


def test_many_detached_steps_that_wait_for_one(storage: Storage) -> None:
    runtime = Runtime(storage)
    led: Future[int] = Future()

    def lead() -> Steps[None]:
        yield Sleep(0.02)
        led.set_result(1)

    async def scenario() -> list[int]:
        leader = asyncio.create_task(runtime.arun_detached(lead()))
        await asyncio.sleep(0)
        answers = await asyncio.gather(*(runtime.arun_detached(iterate(Wait(led))) for _ in range(200)))
        await leader
        return answers

    assert asyncio.run(scenario()) == [1] * 200
    runtime.close()


def lsm_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "lsm"}


def test_threads_end_with_close_and_with_the_runtime(storage: Storage) -> None:
    before = lsm_threads()
    closed, dropped = Runtime(storage), Runtime(storage)
    assert lsm_threads() == before  # none before they are needed
    for runtime in (closed, dropped):
        runtime.submit(create(f"a{id(runtime)}")).result(20)
    started = lsm_threads() - before
    assert len(started) == 2
    closed.close()
    del runtime, dropped
    for thread in started:
        thread.join(20)
        assert not thread.is_alive()
    assert closed.submit(create("again")).result(20) == "again"
    closed.close()


def test_close_does_not_wait_for_ever(remote: Remote) -> None:
    runtime = Runtime(remote)
    seen: list[Any] = []

    def steps() -> Steps[None]:
        try:
            yield Get("gate/never")
        except BaseException as error:
            seen.append(type(error))
            raise

    future = runtime.submit(steps())
    remote.await_arrivals(1)
    runtime.close(timeout=0.01)
    with pytest.raises(CancelledError):
        future.result(20)
    assert seen == [asyncio.CancelledError]


@pytest.mark.parametrize("waits", ["sleeps", "waits"])
@pytest.mark.parametrize("ended", ["closed", "dropped"])
def test_detached_steps_that_wait_end_although_their_runtime_has(ended: str, waits: str) -> None:
    runtime, go = Runtime(open_storage("memory://")), Future[None]()
    waiting = threading.Event()

    def steps() -> Steps[str]:
        yield Get("begun")
        waiting.set()
        yield Sleep(0.2) if waits == "sleeps" else Wait(go)
        return (yield from create("done"))

    future = runtime.submit(steps())
    assert waiting.wait(20)
    if ended == "closed":
        runtime.close(timeout=0.01)
    else:
        del runtime
        gc.collect()
    for thread in lsm_threads():
        thread.join(0.05)
    go.set_result(None)
    assert future.result(20) == "done"


EXIT = """
import asyncio
from lsm.drive import Runtime
from lsm.steps import All, Create, Sleep
from lsm.storage import open_storage

storage = open_storage(ARGS["url"], store_options=ARGS["options"])
runtime = Runtime(storage)

def late():
    yield Sleep(0.3)
    yield All([Create("late", b"x"), Create("later", b"x"), Create("latest", b"x")])

async def give_up():
    task = asyncio.create_task(runtime.arun_detached(late()))
    await asyncio.sleep(0.01)
    task.cancel()

asyncio.run(give_up())
"""


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_an_exit_waits_for_detached_steps(tmp_path: Any, request: pytest.FixtureRequest, kind: str) -> None:
    if kind == "s3":
        s3 = request.getfixturevalue("s3")
        url, options = s3.url(), s3.store_options
    else:
        url, options = (tmp_path / "root").as_uri(), None
    assert processes.run(EXIT, {"url": url, "options": options}) == ""
    assert open_storage(url, store_options=options).execute(Get("latest")) is not None


WOKEN = """
import asyncio, time
from lsm.drive import Runtime
from lsm.steps import Create
from lsm.storage import open_storage

class Slow(asyncio.SelectorEventLoop):
    def _write_to_self(self):  # a thread that wakes this loop is not given the processor again for a while
        super()._write_to_self()
        for _ in range(60):
            time.sleep(0.0005)

def create(key):
    return (yield Create(key, b"x"))

loop = Slow()
loop.run_until_complete(Runtime(open_storage(ARGS["url"], store_options=ARGS["options"])).arun(create("a")))
loop.close()
"""


def test_an_exit_waits_for_the_threads_that_wake_event_loops(s3: Any) -> None:
    processes.run(WOKEN, {"url": s3.url(), "options": s3.store_options})


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_forked_child_starts_its_own_threads(kind: str) -> None:
    storage = open_storage("memory://") if kind == "local" else Remote()
    runtime = Runtime(storage)
    runtime.submit(create("a")).result(20)
    run(iterate(All([Get("a"), Get("b"), Get("c")])), storage)
    running = runtime.submit(iterate(Sleep(0.3)))  # the child must not wait for what only its parent runs
    if not (child := os.fork()):
        signal.alarm(20)
        runtime.drain()
        made = runtime.submit(create("in the child")).result(10)
        found = run(iterate(All([Get("a"), Get("in the child"), Get("c")])), storage)
        runtime.close()
        os._exit(0 if made and found[0] and found[1] and not found[2] else 1)
    assert os.waitpid(child, 0)[1] == 0
    running.result(20)
    assert storage.execute(Get("in the child")) is None
    runtime.close()
