"""Commands that are interrupted, as by Ctrl-C: real processes, real signals.

The command's process is held at one of its requests, so that an interrupt always finds it there: it says "held", and
goes on when it is told.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from tests.support.checkpoints import chain
from tests.support.processes import running
from tests.test_cli import as_json
from tests.test_jobs import THREADS, counts, fill

pytestmark = pytest.mark.processes

_HELD = """
import asyncio, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from lsm.storage.files import FileStorage
from lsm.storage.objects import ObjectStorage
execute, aexecute = FileStorage.execute, ObjectStorage.aexecute
met = []

def is_held(request):
    met.append(request)
    return len([each for each in met if type(each).__name__ == ARGS["kind"]]) == ARGS["number"] and (
        type(request).__name__ == ARGS["kind"])

def hold():
    try:
        os.write(2, b"held\\n")
        sys.stdin.readline()
    finally:
        met.clear()

def held(self, request):
    if is_held(request):
        hold()
    return execute(self, request)

async def aheld(self, request):
    if is_held(request):
        await asyncio.to_thread(hold)
    return await aexecute(self, request)

FileStorage.execute, ObjectStorage.aexecute = held, aheld
"""

_COMMAND = """
from langgraph.checkpoint.lsm.commands import app
app(ARGS["words"], prog_name="langgraph-lsm")
"""

_IN_TERMINAL = """
import os, signal
from concurrent.futures import wait
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from langgraph.checkpoint.lsm import jobs

def begins(*args):
    os.write(2, b"begun\\n")
    return wait(*args)

jobs.wait = begins
"""

_CALL = """
import atexit
from langgraph.checkpoint.lsm.jobs import compact_store
from lsm.drive import _drain_all
from lsm.stop import Stop
ask = Stop.ask

def asks(self):
    ask(self)
    os.write(2, b"asked\\n")

Stop.ask = asks
try:
    compact_store(ARGS["url"], store_options=ARGS["store_options"])
except KeyboardInterrupt:
    atexit.register(lambda: (_drain_all(), print(len([1 for each in met if type(each).__name__ == "Create"]), "begun")))
"""


@contextmanager
def held(script: str, kind: str, number: int, **arguments: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is held at its so-many-th request of a kind."""
    with running(_HELD + script, {"kind": kind, "number": number, **arguments}, talk=True) as process:
        read_until(process, "held")
        yield process


def read_until(process: subprocess.Popen[str], word: str) -> str:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith(word):
            return line
    raise AssertionError(f"it ended without {word!r}: {said}")


def interrupted(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Interrupt, and let it go on. Answers what it said on both outputs from then on."""
    process.send_signal(signal.SIGINT)
    said = read_until(process, "stopping: ")
    assert "again to end at once" in said
    output, errors = process.communicate("\n", timeout=20)
    assert "Traceback" not in errors
    assert process.returncode == 130, (output, errors)
    return output, errors


@dataclass(frozen=True)
class Place:
    """A store of six threads that are to be compacted, as it is given to a command."""

    url: str
    store_options: dict[str, Any] | None

    @property
    def words(self) -> list[str]:
        given = [f"--store-option={key}={value}" for key, value in (self.store_options or {}).items() if key[0] == "a"]
        return [self.url, *given, *(["--store-option=client_options.allow_http=true"] if given else [])]

    def does(self, command: str, *words: str) -> dict[str, Any]:
        """A command, to its end."""
        return as_json(command, *self.words, *words)


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "file":
        fill(tmp_path.as_uri(), fsync=False)
        return Place(tmp_path.as_uri(), None)
    s3 = request.getfixturevalue("s3")
    found = Place(s3.url(), {key: value for key, value in s3.store_options.items() if value is not False})
    fill(found.url, store_options=s3.store_options)
    return found


def test_compact_says_what_it_has_done_and_the_next_run_does_the_rest(place: Place) -> None:
    with held(_COMMAND, "Create", 3, words=["compact", *place.words, "--concurrency", "1", "--json"]) as process:
        output, _ = interrupted(process)
    found = json.loads(output)
    assert (found["stopped"], found["compacted"], found["looked_at"], found["left"]) == (True, 2, 2, 4)
    assert found["failures"] == {}
    assert place.does("verify")["problems"] == {}
    again = place.does("compact")
    assert (again["stopped"], again["unchanged"], again["compacted"], again["left"]) == (False, 2, 4, 0)
    assert counts(place.url, store_options=place.store_options) == [9] * 6


def test_expire_says_what_it_has_done(place: Place) -> None:
    words = ["expire", *place.words, "--max-checkpoints", "2", "--concurrency", "1"]
    with held(_COMMAND, "Create", 3, words=words) as process:
        output, _ = interrupted(process)
    assert output.startswith("stopped before the end; until then:\n6 threads, of which 0 were in shape and 2 looked at")
    assert "14 checkpoints expired" in output
    assert "4 threads left for the next run" in output
    assert place.does("verify")["problems"] == {}
    assert place.does("expire", "--max-checkpoints", "2")["expired"] == 28


def test_gc_says_what_it_has_removed(place: Place) -> None:
    place.does("compact")
    words = ["gc", *place.words, "--grace", "0s", "--offline", "--json"]
    with held(_COMMAND, "Delete", 3, words=words) as process:
        output, _ = interrupted(process)
    found = json.loads(output)
    assert (found["stopped"], found["freed_objects"], found["failures"]) == (True, 27, {})
    assert place.does("verify")["problems"] == {}
    again = place.does("gc", "--grace", "0s", "--offline")
    assert (again["stopped"], again["freed_objects"]) == (False, 27)


def test_verify_says_what_it_has_checked(place: Place) -> None:
    with held(_COMMAND, "GetRanges", 120, words=["verify", *place.words, "--concurrency", "1", "--json"]) as process:
        output, _ = interrupted(process)
    found = json.loads(output)
    assert (found["stopped"], found["threads"], found["problems"]) == (True, 2, {})
    again = place.does("verify")
    assert (again["stopped"], again["threads"], again["problems"]) == (False, 6, {})


def test_prune_says_which_threads_are_left(place: Place) -> None:
    with held(_COMMAND, "Create", 3, words=["prune", *place.words, *THREADS, "--json"]) as process:
        output, errors = interrupted(process)
    assert json.loads(output)["stopped"] is True
    assert f"stopped: 2 threads are done, and left are {', '.join(map(repr, THREADS[2:]))}" in errors
    assert place.does("verify")["problems"] == {}
    kept = counts(place.url, store_options=place.store_options)
    assert kept[:2] == [1, 1]
    assert set(kept[3:]) == {9}
    place.does("prune", *THREADS)
    assert counts(place.url, store_options=place.store_options) == [1] * 6


@pytest.mark.parametrize("command", ["compact", "verify", "stats"])
def test_a_second_interrupt_ends_it_at_once(place: Place, command: str) -> None:
    with held(_COMMAND, "GetRanges" if command != "stats" else "Get", 3, words=[command, *place.words]) as process:
        process.send_signal(signal.SIGINT)
        read_until(process, "stopping: ")
        process.send_signal(signal.SIGINT)  # and what it is held at goes on holding it
        assert process.wait(20) == 130
        assert process.stdout is not None
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
        assert process.stdout.read() == ""
    assert place.does("verify")["problems"] == {}
    assert place.does("compact")["left"] == 0


def test_stats_has_nothing_to_say_when_it_is_stopped(place: Place) -> None:
    with held(_COMMAND, "List", 1, words=["stats", *place.words]) as process:
        output, errors = interrupted(process)
    assert (output, errors) == ("", "stopped\n")


def test_a_call_from_python_that_is_interrupted_leaves_nothing_running(place: Place) -> None:
    """Not even where the work is done behind the caller's back; the process ends when that has."""
    call = {"url": place.url, "store_options": place.store_options}
    with held(_CALL, "Create", 2, **call) as process:
        process.send_signal(signal.SIGINT)
        read_until(process, "asked")
        output, errors = process.communicate("\n", timeout=20)
        assert (process.returncode, output) == (0, "0 begun\n"), errors
        assert "Traceback" not in errors
    assert place.does("verify")["problems"] == {}
    assert place.does("compact")["left"] == 0


def fill_many(folder: Path) -> None:
    """More threads than a command gets through until it is interrupted."""
    with LSMSaver.from_conn_string(folder.as_uri(), compaction="off", compression="none", fsync=False) as saver:
        for number in range(120):
            for _ in range(9):
                chain(saver, f"thread-{number}", [{"value": number}])
                saver.flush(f"thread-{number}")


@pytest.mark.slow
@pytest.mark.parametrize("where", [["--concurrency", "2"], ["--dask", "local", "--concurrency", "2"]], ids=" ".join)
@pytest.mark.parametrize("begun", [False, True], ids=["at the start", "at work"])
def test_processes_of_a_command_end_with_it(tmp_path: Path, where: list[str], begun: bool) -> None:
    """A terminal interrupts all of its processes, and only the first of them has something to say."""
    fill_many(tmp_path)
    objects = set(tmp_path.glob("segments/*/*/*"))
    assert len(objects) == 1080
    words = ["compact", tmp_path.as_uri(), *where, "--json"]
    with running(_IN_TERMINAL + _COMMAND, {"words": words}, group=True) as process:
        if begun:
            while len(set(tmp_path.glob("segments/*/*/*")) - objects) < 10:
                assert process.poll() is None
                time.sleep(0.01)
        else:
            read_until(process, "begun")
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    found = json.loads(output)
    assert found["stopped"]
    assert found["left"] > 0
    assert found["failures"] == {}
    assert as_json("verify", tmp_path.as_uri())["problems"] == {}
    assert as_json("compact", tmp_path.as_uri())["left"] == 0


@pytest.mark.slow
def test_a_second_interrupt_ends_the_processes_of_a_command_too(tmp_path: Path) -> None:
    fill_many(tmp_path)
    words = ["compact", tmp_path.as_uri(), "--concurrency", "2"]
    with running(_IN_TERMINAL + _COMMAND, {"words": words}, group=True) as process:
        read_until(process, "begun")
        os.killpg(process.pid, signal.SIGINT)
        read_until(process, "stopping: ")
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=20)  # whoever is left would hold the other end of these
    assert (process.returncode, output) == (130, "")
    assert "Traceback" not in errors
    assert as_json("verify", tmp_path.as_uri())["problems"] == {}
    assert as_json("compact", tmp_path.as_uri())["left"] == 0
