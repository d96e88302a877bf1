"""Several processes write one thread id at once: all that they stored is there, and all of it right."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from lsm.drive import run
from lsm.process import refresh
from lsm.steps import Append, Now, PutIf, Sleep, Wait
from lsm.storage import open_storage
from lsm.storage.files import FileStorage
from tests.conftest import Backend
from tests.support.checkpoints import at, chain, listed, put
from tests.support.processes import output, running

pytestmark = pytest.mark.processes

WRITER = """
import time
from pathlib import Path
from langgraph.checkpoint.lsm import LSMSaver
from tests.support.checkpoints import at, checkpoint

saver = LSMSaver.from_conn_string(ARGS["url"], **ARGS["options"])
saver.setup()
Path(ARGS["ready"]).touch()
while not Path(ARGS["go"]).exists():
    time.sleep(0.001)
parent, ids = None, []
for number in range(ARGS["rounds"]):
    made = checkpoint({"count": f"{ARGS['name']} {number}"}, version=f"{ARGS['name']}.{number}")
    config = saver.put(at("shared", parent), made, {"step": number, "writer": ARGS["name"]}, made["channel_versions"])
    saver.put_writes(config, [("count", number)], ARGS["name"])
    parent = made["id"]
    ids.append(parent)
saver.close()
print(json.dumps(ids))
"""


@pytest.mark.parametrize("backend", ["file", "s3"], indirect=True)
@pytest.mark.parametrize("writers", [2])
def test_processes_on_one_thread_lose_nothing_of_each_other(backend: Backend, tmp_path: Path, writers: int) -> None:
    # A put and a put_writes each round: 200 commits of each process.
    rounds = 100
    go = tmp_path / "go"
    with ExitStack() as stack:
        processes = {}
        for number in range(writers):
            name = f"writer-{number}"
            arguments = {"url": backend.url, "options": backend.options, "name": name, "rounds": rounds}
            arguments |= {"ready": str(tmp_path / name), "go": str(go)}
            processes[name] = stack.enter_context(running(WRITER, arguments))
        while not all((tmp_path / name).exists() for name in processes):
            assert all(process.poll() is None for process in processes.values()), "a writer ended early"
            time.sleep(0.01)
        go.touch()
        written = {name: json.loads(output(process, seconds=110)) for name, process in processes.items()}

    with backend.open() as saver:
        found = {kept.checkpoint["id"]: kept for kept in saver.list(at("shared"))}
        assert len(found) == writers * rounds
        assert saver.get_tuple(at("shared")).checkpoint["id"] == max(found)
        for name, ids in written.items():
            assert len(ids) == rounds
            for number, checkpoint_id in enumerate(ids):
                kept = found[checkpoint_id]
                assert kept.checkpoint["channel_values"] == {"count": f"{name} {number}"}
                assert kept.metadata == {"step": number, "writer": name}
                assert kept.pending_writes == [(name, "count", number)]
                parent = kept.parent_config["configurable"]["checkpoint_id"] if kept.parent_config else None
                assert parent == (ids[number - 1] if number else None)


class Slow(FileStorage):
    """The storage of a process that is so slow that another one always writes before it, unless it is made to wait."""

    overtake: Callable[[], object] | None = None
    overtaken = 0

    def execute(self, request: Any) -> Any:
        ours = isinstance(request, Append | PutIf) and request.key.startswith("manifests/")
        if ours and self.overtake is not None and request.lock is None:
            self.overtaken += 1
            self.overtake()
        return super().execute(request)


@pytest.mark.parametrize(
    ("write", "commits"),
    [
        pytest.param(lambda saver, first: put(saver, first, {"count": 1}), 1, id="put"),
        pytest.param(lambda saver, first: saver.put_writes(first, [("count", 1)], "slow"), 1, id="put_writes"),
        pytest.param(lambda saver, first: saver.prune(["shared"]), 2, id="prune"),  # a flush, and the swap
    ],
)
def test_a_process_that_is_always_overtaken_gets_its_turn(
    tmp_path: Path, write: Callable[[Any, Any], object], commits: int
) -> None:
    storage = Slow(tmp_path / "store")
    with (
        LSMSaver.from_storage(storage, compaction="off") as slow,
        LSMSaver.from_conn_string((tmp_path / "store").as_uri(), compaction="off") as fast,
    ):
        first = chain(slow, "shared", [{"count": -1}, {"count": 0}])[-1]
        storage.overtake = lambda: put(fast, at("shared"), {"other": storage.overtaken})
        write(slow, first)
        assert storage.overtaken == commits
        storage.overtake = None
        assert listed(slow, at("shared")) == listed(fast, at("shared"))


class Pauses:
    """Runs steps by hand: sleeps are noted, and something may be done during each."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.slept: list[float] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def run(self, steps: Any) -> Any:
        return run(self._noted(steps), self.storage)

    def _noted(self, steps: Any) -> Any:
        request = next(steps)
        try:
            while True:
                try:
                    if isinstance(request, Sleep):
                        self.slept.append(request.seconds)
                        answer = self.meanwhile()
                    else:
                        answer = yield request
                except BaseException as error:  # noqa: BLE001 (the steps decide)
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as stop:
            return stop.value


@pytest.fixture
def contended() -> tuple[LSMSaver, Pauses]:
    """A saver on a store without locks, one of whose commits was just overtaken."""
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    slow, fast = (LSMSaver.from_storage(storage, compaction="off") for _ in range(2))
    put(slow, at("shared"), {"count": 0})
    pauses = Pauses(storage)
    pauses.run(steps_of(slow, "first"))
    assert pauses.slept == []  # alone, nobody waits
    put(fast, at("shared"), {"count": 1})
    pauses.run(steps_of(slow, "second"))
    assert pauses.slept == []  # what was overtaken is tried again at once
    return slow, pauses


def steps_of(saver: LSMSaver, task_id: str) -> Any:
    steps = saver._put_writes(at("shared", "1"), [("count", task_id)], task_id, "")
    assert steps is not None
    return steps


def tasks(saver: LSMSaver) -> list[str]:
    """The tasks whose writes are stored, in order of commit."""
    thread = saver._engine.process.thread("shared")
    view = run(refresh(saver._engine.process, thread), saver._storage)
    assert view is not None
    return [writes.task_id for writes in view.writes("", "1")]


def test_whoever_was_overtaken_lately_gives_way_before_the_next_commit(contended: tuple[LSMSaver, Pauses]) -> None:
    saver, pauses = contended
    late: list[Any] = []

    def come_late() -> None:
        """Another caller of the process queues up during the pause."""
        steps = steps_of(saver, "late")
        request = next(steps)
        while not isinstance(request, Wait):
            request = steps.send(time.time() if isinstance(request, Now) else None)
        late.append((request.future, steps))

    before = run(refresh(saver._engine.process, saver._engine.process.thread("shared")), saver._storage).seq
    pauses.meanwhile = come_late
    pauses.run(steps_of(saver, "third"))
    assert len(pauses.slept) == 1
    assert late[0][0].done()
    assert tasks(saver) == ["first", "second", "third", "late"]
    assert saver._engine.process.thread("shared").view.seq == before + 1  # one commit for both


def test_who_is_interrupted_while_it_gives_way_has_stored_nothing(contended: tuple[LSMSaver, Pauses]) -> None:
    saver, pauses = contended

    def interrupt() -> None:
        raise KeyboardInterrupt

    pauses.meanwhile = interrupt
    with pytest.raises(KeyboardInterrupt):
        pauses.run(steps_of(saver, "interrupted"))
    pauses.meanwhile = lambda: None
    pauses.run(steps_of(saver, "third"))
    assert tasks(saver) == ["first", "second", "third"]
