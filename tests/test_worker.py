"""The background worker: threads stay in shape while they are written, and nobody notices.

Where a test needs to see or to hinder what the worker does, it does so at the storage: requests on a thread named "lsm"
are the worker's, for callers of a local store run on their own.
"""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lsm.output
from langgraph.checkpoint.lsm import LSMSaver, Retention
from lsm.compact import VALUES_FAN_IN, due
from lsm.drive import _Loop
from lsm.errors import Refused
from lsm.limits import FILES
from lsm.process import refresh
from lsm.steps import Create, GetRanges, UploadPart
from tests.conftest import Backend
from tests.support.checkpoints import at, chain, ids, listed, put
from tests.support.processes import output, run, running

pytestmark = pytest.mark.processes


def bulk(number: int, size: int = 12_000) -> bytes:
    """A value that does not compress, so that a manifest is full after a dozen."""
    return random.Random(number).randbytes(size)


def write(saver: LSMSaver, count: int, parent: Any = None, thread_id: str = "thread") -> list[Any]:
    """A chain of checkpoints, each with a value of its own and a write; one in ten is large."""
    configs: list[Any] = []
    for number in range(count):
        values = {f"bulk-{number % 5}": bulk(number, 50_000 if number % 10 == 9 else 12_000)}
        parent = put(saver, parent or at(thread_id), values, step=number)
        saver.put_writes(parent, [("bulk", number)], "task")
        configs.append(parent)
    return configs


def directory(saver: LSMSaver, thread_id: str = "thread") -> tuple[Any, ...]:
    """The segments in a thread's manifest."""
    view = saver._runtime.run(refresh(saver._engine.process, saver._engine.process.thread(thread_id)))
    return tuple(view.segments()) if view is not None else ()


def waiting(saver: LSMSaver, thread_id: str = "thread") -> tuple[Any, ...]:
    """The segments that should be merged now."""
    view = saver._engine.process.thread(thread_id).view
    assert view is not None
    return due(view, FILES)


def settle(saver: LSMSaver) -> None:
    """Wait until the background has nothing to do."""
    saver._runtime.drain(60)


def threads_of_lsm() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "lsm"}


def hinder(saver: LSMSaver, monkeypatch: pytest.MonkeyPatch, hook: Callable[[Any], None]) -> None:
    """Have a hook called before each request of the worker."""
    execute = saver._storage.execute

    def hindered(request: Any) -> Any:
        if threading.current_thread().name == "lsm":
            hook(request)
        return execute(request)

    monkeypatch.setattr(saver._storage, "execute", hindered)


def test_a_thread_stays_in_shape_while_it_is_written(backend: Backend) -> None:
    count = 30 if backend.name == "s3" else 100
    with backend.open(fsync=False) as saver:
        parent, most = None, 0
        for _ in range(6):
            configs = write(saver, count, parent)
            parent = configs[-1]
            most = max(most, len(directory(saver)))
            settle(saver)
            assert len(directory(saver)) <= 32 + VALUES_FAN_IN
            assert waiting(saver) == ()
        assert most <= saver._engine.process.limits.directory + 32, "callers went on without it"
    with backend.open(fsync=False, compaction="off") as other:
        merged = [info for info in directory(other) if not info.values and info.rows > 2 * count]
        assert merged, "nothing was merged: the test has not written enough"
        assert len(listed(other, at("thread"))) == 6 * count


def test_without_it_segments_pile_up(tmp_path: Path) -> None:
    before = threads_of_lsm()
    with LSMSaver.from_conn_string(tmp_path.as_uri(), compaction="off", fsync=False) as saver:
        write(saver, 500)
        assert len(directory(saver)) > 32 + VALUES_FAN_IN
        assert threads_of_lsm() <= before


@pytest.mark.parametrize("backend", ["memory", "file"], indirect=True)
def test_answers_are_right_meanwhile(backend: Backend) -> None:
    """Readers in this process and with another saver's eyes see every acknowledged checkpoint, whole."""
    acknowledged: list[Any] = []
    failures: list[BaseException] = []
    done = threading.Event()
    with backend.open(fsync=False) as saver, backend.open(fsync=False, compaction="off") as other:

        def read(reader: LSMSaver) -> None:
            try:
                while not done.wait(0.05):  # two that never rest would take the writer's turns with the interpreter
                    known = list(acknowledged)
                    found = list(reader.list(at("thread"), limit=10))
                    steps = [each.metadata["step"] for each in found]
                    assert steps == list(range(steps[0], steps[0] - len(steps), -1)) if steps else not known
                    assert not known or steps[0] >= len(known) - 1, "an acknowledged checkpoint is not listed"
                    for each in (*found, *(reader.get_tuple(config) for config in known[::97])):
                        step = each.metadata["step"]
                        assert each.checkpoint["channel_values"][f"bulk-{step % 5}"] == bulk(step)
            except BaseException as error:  # noqa: BLE001 (the test looks at it)
                failures.append(error)

        readers = [threading.Thread(target=read, args=(each,)) for each in (saver, other)]
        for reader in readers:
            reader.start()
        parent = None
        for number in range(250):
            parent = put(saver, parent or at("thread"), {f"bulk-{number % 5}": bulk(number)}, step=number)
            acknowledged.append(parent)
        done.set()
        for reader in readers:
            reader.join(60)
        assert not failures, failures[0]
        settle(saver)
        assert len(directory(other)) <= 32 + VALUES_FAN_IN
        assert listed(other, at("thread")) == ids(acknowledged)[::-1]


def test_close_leaves_no_thread(backend: Backend) -> None:
    before = threads_of_lsm()
    with backend.open(fsync=False) as saver:
        write(saver, 120)
        running = saver._runtime._background
        # Threads for requests side by side belong to the process: an object store's other callers go on using them.
        started = [running._thread] if isinstance(running, _Loop) else list(threads_of_lsm() - before)
        assert started
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


def test_close_stops_between_two_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    seen: list[Any] = []

    def hold(request: Any) -> None:
        seen.append(request)
        if isinstance(request, GetRanges):
            begun.set()
            assert go_on.wait(60)

    saver = LSMSaver.from_conn_string(tmp_path.as_uri(), fsync=False)
    hinder(saver, monkeypatch, hold)
    configs = write(saver, 150)
    assert begun.wait(60)
    closing = threading.Thread(target=saver.close)
    closing.start()
    while not saver._worker._stop.asked:  # type: ignore[union-attr]
        closing.join(0.001)
    count = len(seen)
    go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert len(seen) == count, "the rewrite went on after the request that it was at"
    with LSMSaver.from_conn_string(tmp_path.as_uri(), fsync=False) as again:
        assert listed(again, at("thread")) == ids(configs)[::-1]
        write(again, 30, configs[-1])
        settle(again)
        assert len(directory(again)) <= 32


def test_close_aborts_an_upload_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would ever see it again: an object store's listing does not show what was uploaded in part."""
    uploading, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(lsm.output, "_PART", 1000)

    def hold(request: Any) -> None:
        if isinstance(request, UploadPart):
            uploading.set()
            assert go_on.wait(60)

    saver = LSMSaver.from_conn_string(tmp_path.as_uri(), fsync=False)
    hinder(saver, monkeypatch, hold)
    configs = write(saver, 150)
    assert uploading.wait(60)
    assert list((tmp_path / "tmp").iterdir())
    closing = threading.Thread(target=saver.close)
    closing.start()
    while not saver._worker._stop.asked:  # type: ignore[union-attr]
        closing.join(0.001)
    go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert listed(saver, at("thread")) == ids(configs)[::-1]


def test_a_closed_saver_can_still_be_used_but_rewrites_nothing(tmp_path: Path) -> None:
    saver = LSMSaver.from_conn_string(tmp_path.as_uri(), fsync=False)
    saver.close()
    before = threads_of_lsm()
    write(saver, 150)
    assert threads_of_lsm() <= before
    assert len(directory(saver)) > 8
    saver.close()


@pytest.mark.parametrize(
    "error",
    [Refused("credentials have expired"), ValueError("a defect of the engine")],
    ids=["of the storage", "a defect"],
)
def test_what_fails_is_logged_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    broken = True

    def fail(request: Any) -> None:
        if broken and isinstance(request, Create):
            raise error

    with LSMSaver.from_conn_string(tmp_path.as_uri(), fsync=False) as saver:
        hinder(saver, monkeypatch, fail)
        with caplog.at_level(logging.WARNING, "lsm"):
            configs = write(saver, 150)
            settle(saver)
        warnings = [record for record in caplog.records if "housekeeping failed" in record.getMessage()]
        assert warnings
        assert all(record.levelno == logging.WARNING for record in warnings)
        assert "'thread'" in warnings[0].getMessage()
        assert str(error) in warnings[0].getMessage()
        assert len(directory(saver)) > 8
        assert listed(saver, at("thread")) == ids(configs)[::-1]

        broken = False
        caplog.clear()
        configs += write(saver, 30, configs[-1])
        settle(saver)
        assert waiting(saver) == ()
        assert listed(saver, at("thread")) == ids(configs)[::-1]
        assert not [record for record in caplog.records if "housekeeping failed" in record.getMessage()]


def test_one_thread_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: Any) -> None:
        if isinstance(request, Create) and "/sick/" in request.key:
            raise Refused("permission denied", request.key)

    with LSMSaver.from_conn_string(tmp_path.as_uri(), fsync=False) as saver:
        hinder(saver, monkeypatch, fail)
        with caplog.at_level(logging.WARNING, "lsm"):
            for name in ("sick", "well"):
                write(saver, 150, thread_id=name)
            settle(saver)
        assert waiting(saver, "well") == ()
        assert waiting(saver, "sick") != ()
        assert {"'sick'" in record.getMessage() for record in caplog.records} == {True}


def test_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an interpreter that is about to exit: the caller that finds work does it, and goes on."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    with LSMSaver.from_conn_string(tmp_path.as_uri(), fsync=False) as saver:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        configs = write(saver, 150)
        assert waiting(saver) == ()
        assert listed(saver, at("thread")) == ids(configs)[::-1]


def test_it_expires_what_is_worth_it(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    retention = Retention(max_checkpoints=10, max_age=timedelta(days=1))
    with (
        LSMSaver.from_conn_string(url, fsync=False, retention=retention) as saver,
        LSMSaver.from_conn_string(url, compaction="off") as other,
    ):
        configs = write(saver, 300)
        assert listed(saver, at("thread")) == ids(configs)[:-11:-1]
        settle(saver)
        assert listed(saver, at("thread")) == ids(configs)[:-11:-1]
        still_there = listed(other, at("thread"))
        assert still_there == ids(configs)[::-1][: len(still_there)]
        assert 10 <= len(still_there) < 200


# Real processes.

SETUP = """
import atexit, os, threading, time

at_exit = {"count": None}
seen = []

@atexit.register  # registered first, so that it is called last
def tell():
    print(json.dumps({"before": at_exit["count"], "after": len(seen)}), flush=True)

from langgraph.checkpoint.lsm import LSMSaver
from tests.support.checkpoints import at, put
from tests.test_worker import write

saver = LSMSaver.from_conn_string(ARGS["url"], fsync=False)
begun = threading.Event()
execute = saver._storage.execute

def slow(request):
    if threading.current_thread().name == "lsm":
        seen.append(request)
        begun.set()
        time.sleep(0.3)
    return execute(request)

saver._storage.execute = slow
"""


def test_an_interpreter_that_exits_leaves_a_rewrite_where_it_is(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    script = SETUP + 'write(saver, 150)\nassert begun.wait(60)\nat_exit["count"] = len(seen)\n'
    with running(script, {"url": url}) as process:
        printed = output(process)
        assert process.stderr is not None
    told = json.loads(printed)
    assert told["before"] >= 1
    assert told["after"] <= told["before"] + 1, "it ended what it was doing and did nothing more"
    with LSMSaver.from_conn_string(url, compaction="off") as reader:
        assert len(listed(reader, at("thread"))) == 150
        reader.compact("thread")
        assert len(listed(reader, at("thread"))) == 150


FORK = """
import os, signal, threading
from langgraph.checkpoint.lsm import LSMSaver
from tests.support.checkpoints import at, listed
from tests.test_worker import directory, settle, write

saver = LSMSaver.from_conn_string(ARGS["url"], fsync=False)
begun, go_on = threading.Event(), threading.Event()
execute = saver._storage.execute

def held(request):
    if threading.current_thread().name == "lsm" and not begun.is_set():
        begun.set()
        go_on.wait(60)
    return execute(request)

saver._storage.execute = held
write(saver, 150)
begun.wait(60)
child = os.fork()  # while the worker is at it
if not child:
    signal.alarm(100)
    code = 1
    try:
        write(saver, 150, thread_id="child")
        settle(saver)
        assert len(directory(saver, "child")) <= 16, len(directory(saver, "child"))
        saver.close()
        code = 0
    finally:
        os._exit(code)
go_on.set()
_, status = os.waitpid(child, 0)
settle(saver)
counts = [len(listed(saver, at(name))) for name in ("thread", "child")]
print(json.dumps([os.waitstatus_to_exitcode(status), *counts]))
assert len(directory(saver)) <= 16, len(directory(saver))
saver.close()
"""


def test_a_forked_child_has_a_worker_of_its_own(tmp_path: Path) -> None:
    assert json.loads(run(FORK, {"url": tmp_path.as_uri()})) == [0, 150, 150]


CLOSE_IN_CHILD = """
import os, signal
from langgraph.checkpoint.lsm import LSMSaver
from tests.support.checkpoints import at, put

saver = LSMSaver.from_conn_string(ARGS["url"])
put(saver, at("thread"), {"a": 1})
with saver._worker._lock:  # as if another thread had just told the worker something
    child = os.fork()
    if not child:
        signal.alarm(30)
        saver.close()
        os._exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
saver.close()
"""


def test_a_forked_child_can_close_at_any_time(tmp_path: Path) -> None:
    assert run(CLOSE_IN_CHILD, {"url": tmp_path.as_uri()}) == "0\n"


def test_chains_are_as_they_were(backend: Backend) -> None:
    """Parents, values and writes after many rewrites."""
    with backend.open(fsync=False) as saver:
        configs = chain(saver, "thread", [{"number": number, "bulk": bulk(number)} for number in range(120)])
        settle(saver)
        found = list(saver.list(at("thread")))[::-1]
        assert [each.checkpoint["channel_values"]["number"] for each in found] == list(range(120))
        assert [each.parent_config for each in found[1:]] == configs[:-1]
