"""Trying again ends in success, or by a deadline in an error that says what happened; and nobody else waits with it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import GeneratorType
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint

from langgraph.checkpoint.lsm import LSMSaver
from lsm.engine import Engine
from lsm.errors import CommitTimeout, Conflict, LSMError, Throttled, Unavailable
from lsm.format.bloom import term_hash
from lsm.format.names import manifest_key, segment_key
from lsm.limits import OBJECTS
from lsm.retention import Retention
from lsm.steps import All, Append, Create, Delete, DeleteIf, Monotonic, Now, PutIf, Sleep
from lsm.storage.memory import MemoryStorage
from tests.support.checkpoints import at, put
from tests.support.processes import running

# A process that holds a file's lock, and does not move.

HOLD = """
import fcntl
file = open(ARGS["path"], "rb")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def open_saver(root: Path, deadline: float) -> LSMSaver:
    return LSMSaver.from_conn_string(root.as_uri(), compaction="off", commit_deadline=deadline)


@pytest.fixture
def stopped(root: Path) -> Iterator[int]:
    """The number of a process that was stopped while it held the lock of thread "stuck"."""
    with open_saver(root, 60) as saver:
        put(saver, at("stuck"), {"c": 1})
        put(saver, at("free"), {"c": 1})
    with running(HOLD, {"path": str(root / manifest_key("stuck"))}, talk=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "held"
        process.send_signal(signal.SIGSTOP)
        try:
            yield process.pid
        finally:
            process.send_signal(signal.SIGCONT)


def test_a_writer_does_not_wait_for_a_stopped_process_for_ever(root: Path, stopped: int) -> None:
    with open_saver(root, 0.3) as saver:
        for write in (
            lambda: put(saver, at("stuck"), {"c": 2}),
            lambda: saver.put_writes(at("stuck", checkpoint_id="1"), [("c", 1)], "task"),
            lambda: saver.delete_thread("stuck"),
            lambda: saver.prune(["stuck"]),
        ):
            with pytest.raises(LSMError, match=rf"process {stopped} \(.*which is stopped"):
                write()
        put(saver, at("free"), {"c": 2})


async def test_writers_of_other_threads_do_not_wait_with_those_of_a_locked_one(root: Path, stopped: int) -> None:
    async def write(saver: LSMSaver, thread: str, number: int) -> None:
        new = empty_checkpoint()
        await saver.aput(at(thread), {**new, "id": f"{number:04d}"}, {}, {})

    async with open_saver(root, 4.0) as saver:
        stuck = [asyncio.create_task(write(saver, "stuck", number)) for number in range(40)]
        await asyncio.sleep(0.1)
        for number in range(20):
            await write(saver, "free", number)
        assert not any(task.done() for task in stuck)
        outcomes = await asyncio.gather(*stuck, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {CommitTimeout}


async def test_an_event_loop_goes_on_while_a_lock_is_tried(root: Path, stopped: int) -> None:
    async with open_saver(root, 1.0) as saver:
        deletion = asyncio.create_task(saver.adelete_thread("stuck"))
        ticks = 0
        while not deletion.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(LSMError, match="stuck"):
            await deletion
        assert ticks > 10


def test_a_collection_passes_by_a_locked_thread_and_says_so(
    root: Path, stopped: int, caplog: pytest.LogCaptureFixture
) -> None:
    orphans = {thread: root / segment_key(thread, f"{0:026}") for thread in ("stuck", "free")}
    for orphan in orphans.values():
        orphan.parent.mkdir(parents=True)
        orphan.write_bytes(b"left by a crash")
    with open_saver(root, 60) as saver:
        found = saver._runtime.run(saver._engine.collect(0.0))
    assert (found.objects, found.waiting_objects) == (1, 1)
    assert {thread: orphan.exists() for thread, orphan in orphans.items()} == {"stuck": True, "free": False}
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert f"{manifest_key('stuck')} is locked by process {stopped} (" in told[0]


# Every operation of the engine, on a clock of the test's own.

DEADLINE = 60.0
WRITES = (PutIf, Append, Create, Delete, DeleteIf)


class Trouble:
    """Runs steps on a storage that fails writes, and on a clock that only sleeping moves."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.fail: Callable[[Any], Exception | None] = lambda request: None
        self.now = 1000.0
        self.requests = 0

    def run(self, steps: Any) -> Any:
        answer: Any = None
        error: BaseException | None = None
        try:
            while True:
                request = steps.send(answer) if error is None else steps.throw(error)
                answer, error = None, None
                try:
                    answer = self._answer(request)
                except Exception as raised:  # noqa: BLE001 (the steps decide)
                    error = raised
        except StopIteration as stop:
            return stop.value

    def _answer(self, request: Any) -> Any:
        if isinstance(request, GeneratorType):
            return self.run(request)
        if isinstance(request, All):
            return [self._settled(each) for each in request.of]
        if isinstance(request, Sleep):
            self.now += request.seconds
            return None
        if isinstance(request, Monotonic):
            return self.now
        if isinstance(request, Now):
            return 1_700_000_000 + self.now
        self.requests += 1
        self.now += 0.001
        assert self.requests < 100_000, "it does not end"
        if isinstance(request, WRITES) and (failure := self.fail(request)):
            raise failure
        return self.storage.execute(request)

    def _settled(self, request: Any) -> Any:
        try:
            return self._answer(request)
        except Exception as error:  # noqa: BLE001 (an outcome)
            return error


VALUE = ("v", b"value")
OPERATIONS: dict[str, Callable[[Engine], Any]] = {
    "put": lambda engine: engine.put("t", "", "9", "5", VALUE, VALUE, {"c": "9"}, {"c": ("9", VALUE)}),
    "put large": lambda engine: engine.put(
        "t", "", "9", "5", VALUE, VALUE, {"c": "9"}, {"c": ("9", ("v", bytes(99999)))}
    ),
    "put to a new thread": lambda engine: engine.put("n", "", "1", None, VALUE, VALUE, {}, {}),
    "put_writes": lambda engine: engine.put_writes("t", "", "5", "task", "", [(0, "c", VALUE)]),
    "flush": lambda engine: engine.flush("t"),
    "compact": lambda engine: engine.compact("t"),
    "prune": lambda engine: engine.prune(["t"]),
    "delete_runs": lambda engine: engine.delete_runs([term_hash(b"run")], lambda metadata: True),
    "expire": lambda engine: engine.expire("t"),
    "copy": lambda engine: engine.copy("t", "copy"),
    "delete": lambda engine: engine.delete("t"),
}


def prepared() -> tuple[Trouble, Engine]:
    trouble = Trouble()
    engine = Engine(
        "memory://",
        False,
        Random(7).randbytes,
        limits=replace(OBJECTS, commit_deadline=DEADLINE),
        retention=Retention(max_checkpoints=2),
    )
    for number in range(1, 6):
        terms = [term_hash(b"run")] if number == 3 else []
        trouble.run(engine.put("t", "", str(number), str(number - 1), VALUE, VALUE, {"c": "1"}, {}, terms=terms))
        if number in (2, 4):
            trouble.run(engine.flush("t"))
    return trouble, engine


@pytest.mark.parametrize("failure", [Conflict, Unavailable, Throttled])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_fails_for_ever_ends_in_an_error_by_its_deadline(operation: str, failure: type[Exception]) -> None:
    trouble, engine = prepared()
    trouble.fail = lambda request: failure("trouble")
    began = trouble.now
    with pytest.raises(LSMError, match="trouble"):
        trouble.run(OPERATIONS[operation](engine))
    # A rewrite is tried some times, whatever that takes; each of its swaps has the deadline.
    assert trouble.now - began < DEADLINE * 40


@pytest.mark.parametrize("failure", [Conflict, Unavailable, Throttled])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_fails_for_a_while_succeeds(operation: str, failure: type[Exception]) -> None:
    trouble, engine = prepared()
    left = 25

    def fail(request: Any) -> Exception | None:
        nonlocal left
        left -= 1
        return failure("trouble") if left >= 0 else None

    trouble.fail = fail
    trouble.run(OPERATIONS[operation](engine))
    trouble.fail = lambda request: None
    fresh = Engine("memory://", False, Random(8).randbytes, limits=OBJECTS)
    stored = [found.id for _, found in trouble.run(fresh.list(["t"]).next(100))]
    expected = {
        "put": ["9", "5", "4", "3", "2", "1"],
        "put large": ["9", "5", "4", "3", "2", "1"],
        "prune": ["5"],
        "delete_runs": ["5", "4", "2", "1"],
        "expire": ["5", "4"],
        "delete": [],
    }.get(operation, ["5", "4", "3", "2", "1"])
    assert stored == expected
    if operation == "copy":
        assert [found.id for _, found in trouble.run(fresh.list(["copy"]).next(100))] == expected
