"""Trouble around a store: errors say what is wrong, nothing that was stored is lost, and the saver goes on when the
cause is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lsm.drive
from langgraph.checkpoint.lsm import LSMSaver
from lsm.errors import CommitTimeout, LSMError, Refused, StorageError, Unavailable
from lsm.verify import verify_store
from tests.conftest import S3, Backend
from tests.support.checkpoints import at, ids, listed, put
from tests.support.graphs import Run, delta, finish, line
from tests.support.moto import store_options
from tests.support.processes import run
from tests.support.proxy import Answer, Rule, S3Proxy

pytestmark = pytest.mark.processes

BIG = 200_000


def fill_until(saver: LSMSaver, error: type[Exception], thread_id: str = "thread", most: int = 500) -> Any:
    """Store a chain until that fails. What was stored, as {id: number}, and the error."""
    stored: dict[str, int] = {}
    parent = at(thread_id)
    for number in range(most):
        try:
            parent = put(saver, parent, {"number": number, "bytes": os.urandom(BIG)}, step=number)
        except error as problem:
            return stored, problem
        stored[ids([parent])[0]] = number
    raise AssertionError("nothing failed")


def assert_whole(saver: LSMSaver, stored: dict[str, int], thread_id: str = "thread") -> None:
    """All that was stored is there, and nothing else; to this saver and to a verification."""
    found = {each.checkpoint["id"]: each.checkpoint["channel_values"] for each in saver.list(at(thread_id))}
    assert {id_: values["number"] for id_, values in found.items()} == stored
    assert saver._runtime.run(verify_store(saver._engine.process)).problems == {}


def go_on(saver: LSMSaver, stored: dict[str, int], thread_id: str = "thread") -> None:
    """The thread goes on, on the same saver, and is whole."""
    parent = at(thread_id, max(stored)) if stored else at(thread_id)
    for number in range(len(stored), len(stored) + 3):
        parent = put(saver, parent, {"number": number, "bytes": os.urandom(BIG)}, step=number)
        saver.put_writes(parent, [("number", number)], "task")
        stored[ids([parent])[0]] = number
    saver.compact(thread_id)
    assert_whole(saver, stored, thread_id)


# A full disk.


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 8 MB that is mounted while the block runs."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(11 << 19))  # as much room as a rewrite will need in the end
        with LSMSaver.from_conn_string((disk / "store").as_uri(), compaction="off") as saver:
            stored, problem = fill_until(saver, LSMError)
            assert isinstance(problem, Refused)
            assert "disk is full" in str(problem)
            assert len(stored) > 5
            assert_whole(saver, stored)
            with pytest.raises(Refused, match="disk is full"):
                saver.put_writes(at("thread", max(stored)), [("bytes", os.urandom(BIG))], "task")
            with pytest.raises(Refused, match="disk is full"):
                saver.copy_thread("thread", "copy")
            assert_whole(saver, stored)
            ballast.unlink()
            saver.get_tuple(at("thread"))  # a run begins with a read
            go_on(saver, stored)


def test_room_is_made_by_deleting_threads(tmp_path: Path) -> None:
    """A thread can be deleted on a disk without a byte left."""
    with (
        small_disk(tmp_path / "disk") as disk,
        LSMSaver.from_conn_string((disk / "store").as_uri(), compaction="off") as saver,
    ):
        for number in range(24):
            put(saver, at("old"), {"number": number, "bytes": os.urandom(BIG)})
        stored, _ = fill_until(saver, Refused)
        saver.delete_thread("old")
        assert listed(saver, at("old")) == []
        saver.get_tuple(at("thread"))
        go_on(saver, stored)


LIMITED_SIZE = """
import resource, signal
from langgraph.checkpoint.lsm import LSMSaver
from lsm.errors import LSMError, Refused
from tests.test_trouble import assert_whole, fill_until, go_on

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with LSMSaver.from_conn_string(ARGS["url"], compaction="off") as saver:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    stored, problem = fill_until(saver, LSMError)
    assert isinstance(problem, Refused), problem
    assert "larger than" in str(problem), problem
    assert stored == {}
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    saver.get_tuple({"configurable": {"thread_id": "thread"}})
    go_on(saver, stored)
    print(len(stored))
"""


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    assert run(LIMITED_SIZE, {"url": tmp_path.as_uri()}) == "3\n"


# Permissions.

UNPRIVILEGED = """
import os
from pathlib import Path
from langgraph.checkpoint.lsm import LSMSaver
from lsm.errors import LSMError, Refused
from tests.support.checkpoints import at, ids, put
from tests.test_trouble import assert_whole, fill_until, go_on

folder = Path(ARGS["folder"])

def allow(yes):
    for each in (folder, *folder.rglob("*")):
        if each.is_dir():
            each.chmod(0o755 if yes else 0o555)
        else:
            each.chmod(0o644 if yes else 0o444)

if not os.getuid():
    os.chown(folder, 12345, 12345)
    os.setgid(12345)
    os.setuid(12345)
with LSMSaver.from_conn_string(folder.as_uri()) as saver:
    allow(False)
    stored, problem = fill_until(saver, LSMError)
    assert isinstance(problem, Refused) and "permission" in str(problem), problem
    assert str(folder) in str(problem), problem
    assert stored == {}
    allow(True)
    saver.get_tuple(at("thread"))
    go_on(saver, stored)

    # Lost half way; reading is still allowed.
    allow(False)
    try:
        put(saver, at("thread", max(stored)), {"number": 9})
    except Refused as error:
        assert "permission" in str(error), error
    else:
        raise AssertionError("a directory that is read-only was written to")
    assert_whole(saver, stored)
    with LSMSaver.from_conn_string(folder.as_uri()) as reader:
        assert_whole(reader, stored)
    allow(True)
    saver.get_tuple(at("thread"))
    go_on(saver, stored)

    # Not even reading.
    folder.chmod(0)
    try:
        saver.get_tuple(at("thread"))
    except Refused as error:
        assert "permission" in str(error), error
    else:
        raise AssertionError("a directory that is not readable was read")
    folder.chmod(0o755)
    go_on(saver, stored)
print(len(stored))
"""


def test_permissions_that_are_missing_and_lost() -> None:
    # Not below pytest's own folders: those are closed to others whenever another pytest begins.
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o711)  # for a user that is not us
        folder = Path(made, "store")
        folder.mkdir()
        assert run(UNPRIVILEGED, {"folder": str(folder)}) == "9\n"


# Too many open files.

FEW_FILES = """
import os, resource
from dataclasses import replace
from langgraph.checkpoint.lsm import LSMSaver
from lsm.errors import LSMError
from tests.support.checkpoints import at, ids, put
from tests.test_trouble import assert_whole, go_on

with LSMSaver.from_conn_string(ARGS["url"], compaction="off") as saver:
    saver._engine.process.limits = replace(saver._engine.process.limits, commit_deadline=2.0)
    stored = {}
    go_on(saver, stored)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    told = []
    for attempt in (
        lambda: put(saver, at("thread", max(stored)), {"number": 9}),
        lambda: list(saver.list(None)),
        lambda: saver.compact("thread"),
        lambda: saver.delete_thread("thread"),
    ):
        try:
            attempt()
        except LSMError as error:
            assert "too many files open" in str(error), error
            told.append(type(error).__name__)
        else:
            told.append("done")
    for each in held:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    saver.get_tuple(at("thread"))
    go_on(saver, stored)
    print(told)
"""


def test_too_many_open_files(tmp_path: Path) -> None:
    assert "done" not in run(FEW_FILES, {"url": tmp_path.as_uri()}, seconds=110)


# A clock that is set back.


@pytest.mark.parametrize("backend", ["memory", "file"], indirect=True)
def test_a_clock_that_is_set_back_by_an_hour(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        monotonic = staticmethod(time.monotonic)
        sleep = staticmethod(time.sleep)
        ahead = 3600.0

        def time(self) -> float:
            return time.time() + self.ahead

    clock = Clock()
    monkeypatch.setattr(lsm.drive, "time", clock)
    stored: dict[str, int] = {}
    with backend.open() as saver, backend.open() as other:
        go_on(saver, stored)
        graph = delta(saver, 4)
        finish(Run(graph, "graph", "sync", asynchronous=False).invoke(line("before")))
        clock.ahead = 0.0
        go_on(other, stored)
        go_on(saver, stored)
        state = finish(Run(graph, "graph", "sync", asynchronous=False).invoke(line("after")))
        assert state["log"] == state["plain"]
        saver.prune(["graph"])
        saver._runtime.run(saver._engine.collect(3600.0))
        assert_whole(other, stored)
        assert finish(Run(graph, "graph", "sync", asynchronous=False).state()).values == state
        clock.ahead = 7201.0
        saver._runtime.run(saver._engine.collect(3600.0))
        assert saver._runtime.run(verify_store(saver._engine.process)).garbage.objects == 0
        go_on(other, stored)


# An object store in trouble.

IMPATIENT = {
    "client_options": {"allow_http": True, "timeout": "500ms", "connect_timeout": "500ms"},
    "retry_config": {"max_retries": 1, "retry_timeout": timedelta(seconds=1)},
}


@contextmanager
def hanging() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        taken: list[socket.socket] = []

        def take() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=take)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(30)
            for each in taken:
                each.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda saver: saver.get_tuple(at("thread")),
        lambda saver: saver.setup(),
        lambda saver: list(saver.list(None)),
        lambda saver: saver.delete_thread("thread"),
    ],
    ids=["get_tuple", "setup", "list", "delete_thread"],
)
def test_an_object_store_that_never_answers(s3: S3, call: Callable[[LSMSaver], Any]) -> None:
    with hanging() as endpoint:
        options = {**store_options(endpoint), **IMPATIENT}
        with (
            LSMSaver.from_conn_string("s3://bucket/prefix", store_options=options, commit_deadline=1.0) as saver,
            pytest.raises((Unavailable, CommitTimeout), match="bucket"),
        ):
            call(saver)


def test_an_object_store_that_hangs_for_a_while(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: dict[str, int] = {}
    with S3Proxy(s3.server.endpoint) as proxy:
        options = {**store_options(proxy.endpoint), **IMPATIENT}
        with LSMSaver.from_conn_string(s3.url(), store_options=options) as saver:
            go_on(saver, stored)
            process = saver._engine.process
            monkeypatch.setattr(process, "limits", replace(process.limits, commit_deadline=2.0))
            proxy.delay = 3600.0
            with pytest.raises(LSMError, match="thread"):
                put(saver, at("thread", max(stored)), {"number": 9})
            with pytest.raises(Unavailable):
                saver.get_tuple(at("thread"))
            proxy.delay = 0.0
            assert saver.get_tuple(at("thread")) is not None
            assert_whole(saver, stored)
            go_on(saver, stored)


EXPIRED = Answer(403, "ExpiredToken", "The provided token has expired.")


def test_credentials_that_expire_half_way(s3: S3) -> None:
    stored: dict[str, int] = {}
    with S3Proxy(s3.server.endpoint) as proxy:
        url, options = s3.url(), store_options(proxy.endpoint)
        with LSMSaver.from_conn_string(url, store_options=options) as saver:
            go_on(saver, stored)
            proxy.rules.append(Rule(EXPIRED))
            for attempt in (
                lambda: put(saver, at("thread", max(stored)), {"number": 9}),
                lambda: saver.put_writes(at("thread", max(stored)), [("number", os.urandom(BIG))], "task"),
                lambda: saver.get_tuple(at("thread")),
                lambda: list(saver.list(None)),
                lambda: saver.compact("thread"),
                lambda: saver.delete_thread("thread"),
            ):
                with pytest.raises(StorageError, match=r"(?i)expired|credentials"):
                    attempt()
            proxy.rules.clear()
            saver.get_tuple(at("thread"))
            assert_whole(saver, stored)
            go_on(saver, stored)


def test_credentials_that_expire_within_a_run(s3: S3) -> None:
    """In the middle of a graph's run: what its finished steps stored stays, and the run is resumed."""
    with S3Proxy(s3.server.endpoint) as proxy:
        options = store_options(proxy.endpoint)
        with LSMSaver.from_conn_string(s3.url(), store_options=options) as saver:
            graph = delta(saver, 4)
            run = Run(graph, "thread", "sync", asynchronous=False)
            finish(run.invoke(line("before")))
            proxy.rules.append(Rule(EXPIRED, when=_after(proxy, len(proxy.requests) + 4)))
            with pytest.raises(StorageError, match=r"(?i)expired|credentials"):
                finish(run.invoke(line("during")))
            proxy.rules.clear()
            state = finish(run.invoke(None))
            assert state["log"] == state["plain"]
            assert "during" in state["log"]
            assert len(state["log"]) == 8


def _after(proxy: S3Proxy, count: int) -> Callable[[Any], bool]:
    return lambda request: len(proxy.requests) >= count
