"""Backup and restore as the how-to shows them: its commands are run on a store that a process writes and compacts.

What the commands are is said once, in `docs/how-to/backup.md`; they are found there by the comment before each block.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint

from langgraph.checkpoint.lsm import LSMSaver, Retention
from langgraph.checkpoint.lsm.jobs import compact_store
from lsm.format.names import manifest_key
from tests.support.checkpoints import at
from tests.support.processes import running
from tests.test_docs import BLOCK, ROOT

PAGE = ROOT / "docs" / "how-to" / "backup.md"
BLOCKS = {
    found["mark"].removeprefix("sh: "): found["source"]
    for found in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))
    if (found["mark"] or "").startswith("sh: ")
}

BACKUPS = {
    "links": ["link", "copy", "unlink", "verify"],
    "archive": ["link", "tar", "unlink"],
    "rsync": ["rsync", "verify"],
}
RESTORES = {
    "links": ["stage", "restore", "remove-newer", "unstage"],
    "archive": ["stage-tar", "restore", "remove-newer", "unstage"],
    "rsync": ["rsync-restore"],
}
WAYS = [
    "links",
    "archive",
    pytest.param("rsync", marks=pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")),
]

THREADS = ["user-1", "user-2", "user-3"]

# A process that does what it is told, one line at a time, and answers each with a line of JSON.
PROCESS = """
import random, threading
from langgraph.checkpoint.lsm import LSMSaver
from tests.test_backup import put, state

saver = LSMSaver.from_conn_string(ARGS["url"], fsync=False)
dice = random.Random(9)
latest, errors, stopped = {}, [], threading.Event()

def write():
    step = 0
    try:
        while not stopped.is_set():
            for thread_id in ARGS["threads"]:
                put(saver, thread_id, step, dice.randbytes(20_000))
                latest[thread_id] = step
            step += 1
    except BaseException as error:
        errors.append(error)

writer = threading.Thread(target=write)
for line in sys.stdin:
    answer = None
    match line.split():
        case ["write"]:
            writer.start()
        case ["latest"]:
            answer = dict(latest)
        case ["stop"]:
            stopped.set()
            writer.join()
            answer = dict(latest)
        case ["put", thread_id, step]:
            put(saver, thread_id, int(step), b"")
        case ["delete", thread_id]:
            saver.delete_thread(thread_id)
        case ["state"]:
            answer = state(saver)
    if errors:
        raise errors[0]
    print(json.dumps(answer), flush=True)
saver.close()
"""


def put(saver: LSMSaver, thread_id: str, step: int, large: bytes) -> None:
    new = empty_checkpoint()
    new["channel_values"] = {"step": step, "large": large}
    new["channel_versions"] = {"step": step + 1, "large": step + 1}
    saver.put(at(thread_id), new, {"source": "loop", "step": step}, new["channel_versions"])


def state(saver: LSMSaver) -> dict[str, list[Any]]:
    """Every checkpoint of every thread: its id, its step, what it holds. Latest first."""
    found: dict[str, list[Any]] = {}
    for each in saver.list(None):
        values = each.checkpoint["channel_values"]
        row = [each.checkpoint["id"], values["step"], hashlib.sha256(values["large"]).hexdigest()]
        found.setdefault(each.config["configurable"]["thread_id"], []).append(row)
    for thread_id, rows in found.items():
        latest = saver.get_tuple(at(thread_id))
        assert latest is not None
        assert latest.checkpoint["id"] == rows[0][0]
    return found


def state_of(folder: Path) -> dict[str, list[Any]]:
    """The same, as a process finds it that has just begun to read."""
    with LSMSaver.from_conn_string(folder.as_uri(), compaction="off") as saver:
        return state(saver)


class Teller:
    """The process under test, and how to tell it something."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def __call__(self, *words: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            _, errors = self._process.communicate(timeout=60)
            raise AssertionError(f"the process ended:\n{errors}")
        return json.loads(answer)

    def write_for(self, steps: int) -> dict[str, int]:
        """Let the writer go on for so many steps of every thread, and return how far it is."""
        until = min(self("latest").values(), default=0) + steps
        while len(found := self("latest")) < len(THREADS) or min(found.values()) < until:
            time.sleep(0.01)
        return found


class Shell:
    """The how-to's commands, on a store and a backup."""

    def __init__(self, folder: Path):
        self.store = folder / "the store"
        self.backup = folder / "the backup"
        self._commands = folder / "bin"
        self._commands.mkdir()
        command = self._commands / "langgraph-lsm"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m langgraph.checkpoint.lsm.cli "$@"\n')
        command.chmod(0o755)

    def __call__(self, *names: str, **variables: Path) -> None:
        for name in names:
            found = subprocess.run(
                ["/bin/sh", "-eu", "-c", BLOCKS[name]],
                env={
                    **os.environ,
                    "PATH": f"{self._commands}:{os.environ['PATH']}",
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "STORE": str(self.store),
                    "BACKUP": str(self.backup),
                    **{name: str(path) for name, path in variables.items()},
                },
                capture_output=True,
                text=True,
                check=False,
            )
            assert found.returncode == 0, f"{name}: {found.stdout}{found.stderr}"


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.fixture
def tell(shell: Shell) -> Iterator[Teller]:
    arguments = {"url": shell.store.as_uri(), "threads": THREADS}
    with running(PROCESS, arguments, talk=True) as process:
        yield Teller(process)


def saved_state(shell: Shell, way: str) -> dict[str, list[Any]]:
    if way != "archive":
        return state_of(shell.backup)
    opened = shell.backup.with_name("opened")
    shell("stage-tar", STORE=opened)
    return state_of(opened.with_name("opened.restored"))


@pytest.mark.parametrize("way", WAYS)
def test_backup_and_restore_beside_a_process_that_lives_on(shell: Shell, tell: Teller, way: str) -> None:
    tell("write")
    before = tell.write_for(80)
    assert any((shell.store / "segments").rglob("*"))
    shell(*BACKUPS[way])
    tell.write_for(3)
    after = tell("stop")

    # All that was acknowledged before the backup began is in it, and nothing has a hole.
    saved = saved_state(shell, way)
    assert sorted(saved) == THREADS
    for thread_id, rows in saved.items():
        steps = [step for _, step, _ in rows]
        assert before[thread_id] <= steps[0] <= after[thread_id]
        assert steps == list(range(steps[0], -1, -1))

    tell("put", "user-1", 1000)
    tell("delete", "user-2")
    tell("put", "newer", 0)
    assert sorted(tell("state")) == ["newer", "user-1", "user-3"]

    shell(*RESTORES[way])
    assert tell("state") == saved
    assert state_of(shell.store) == saved

    tell("put", "user-1", 2000)
    assert tell("state") == state_of(shell.store)
    assert [step for _, step, _ in state_of(shell.store)["user-1"]][:2] == [2000, saved["user-1"][0][1]]
    shell("verify", BACKUP=shell.store)


def test_what_was_compacted_meanwhile_is_restored(shell: Shell, tell: Teller) -> None:
    """The segments that the backup names were replaced, and some collected, by the time it is restored."""
    tell("write")
    tell.write_for(20)
    shell(*BACKUPS["links"])
    tell.write_for(150)
    tell("stop")
    for thread_id in THREADS:
        tell("put", thread_id, 1000)
    assert compact_store(
        shell.store.as_uri(), retention=Retention(max_checkpoints=2), grace=timedelta(0), offline=True
    ).freed_objects
    saved = saved_state(shell, "links")
    shell(*RESTORES["links"])
    assert tell("state") == saved
    assert state_of(shell.store) == saved
    shell("verify", BACKUP=shell.store)


@pytest.mark.parametrize("way", WAYS)
def test_a_restore_beside_a_writer_leaves_a_whole_store(shell: Shell, tell: Teller, way: str) -> None:
    tell("write")
    tell.write_for(20)
    shell(*BACKUPS[way])
    tell.write_for(40)
    shell(*RESTORES[way])
    after = tell.write_for(40)
    tell("stop")
    found = tell("state")
    assert found == state_of(shell.store)
    for thread_id in THREADS:
        assert found[thread_id][0][1] >= after[thread_id]
    shell("verify", BACKUP=shell.store)


def test_a_store_that_is_gone_is_put_back(shell: Shell, tell: Teller) -> None:
    tell("write")
    tell.write_for(20)
    shell(*BACKUPS["links"])
    tell("stop")
    saved = saved_state(shell, "links")
    shell.store.chmod(0o750)
    shell("link", "copy", BACKUP=shell.backup.with_name("another"))
    shutil.rmtree(shell.store)
    assert tell("state") == {}
    shell("stage", "restore-all", BACKUP=shell.backup.with_name("another"))
    assert {thread_id: rows[-len(saved[thread_id]) :] for thread_id, rows in tell("state").items()} == saved
    assert stat.S_IMODE(shell.store.stat().st_mode) == 0o750


def test_files_that_are_copied_over_those_of_a_quiet_store_are_seen(shell: Shell, tell: Teller) -> None:
    """Not what the how-to says, but what people do: inode and modification time stay."""
    manifest = shell.store / manifest_key("user-1")
    tell("put", "user-1", 1)
    shutil.copytree(shell.store, shell.backup)
    tell("put", "user-1", 2)
    with LSMSaver.from_conn_string(shell.store.as_uri(), compaction="off") as reader:
        lost, before = state(reader), manifest.stat().st_ino
        subprocess.run(["cp", "-a", f"{shell.backup}/.", str(shell.store)], check=True)
        assert tell("state") == state_of(shell.backup)
        tell("put", "user-1", 3)
        assert manifest.stat().st_ino == before
        assert [step for _, step, _ in lost["user-1"]] == [2, 1]
        assert [step for _, step, _ in state(reader)["user-1"]] == [3, 1]
        assert state(reader) == tell("state") == state_of(shell.store)


def test_linked_copies_do_not_change_with_the_store(shell: Shell, tell: Teller) -> None:
    tell("write")
    tell.write_for(20)
    tell("stop")
    shell("link")
    linked = shell.store.with_name(shell.store.name + ".snapshot")
    before = {path: path.read_bytes() for path in linked.rglob("*") if path.is_file()}
    assert len(before) > len(THREADS)
    for step in range(1000, 1020):
        for thread_id in THREADS:
            tell("put", thread_id, step)
    tell("delete", THREADS[0])
    assert {path: path.read_bytes() for path in linked.rglob("*") if path.is_file()} == before


def test_every_command_of_the_how_to_is_run() -> None:
    run = {name for ways in (BACKUPS, RESTORES) for names in ways.values() for name in names}
    assert run | {"restore-all"} == set(BLOCKS)
