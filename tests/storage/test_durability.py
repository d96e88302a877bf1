"""What an acknowledgement rests on: a disk that has nothing but what was synced still has it, whatever sync fails, and
whenever a process dies."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint

from langgraph.checkpoint.lsm import LSMSaver
from lsm.errors import CommitTimeout, LSMError
from lsm.format.names import manifest_key
from tests.support.disk import Disk, Killed

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads files through /proc")


def open_saver(base: Path) -> LSMSaver:
    return LSMSaver.from_conn_string((base / "data" / "store").as_uri(), compaction="off")


class Scene:
    """A disk, and clients on a store that lies on it. One sync is struck.

    Attributes:
        there: The checkpoints of each thread that were acknowledged.
        gone: The threads whose removal was.
    """

    def __init__(self, patch: pytest.MonkeyPatch, base: Path, at: int, error: Callable[[], BaseException]) -> None:
        self.disk = Disk(patch, base)
        self.there: dict[str, set[str]] = {}
        self.gone: set[str] = set()
        self.struck = False
        self._crashed: list[tuple[Path, dict[str, set[str]], set[str]]] = []
        self.disk.strike = partial(self._strike, at, error)

    def _strike(self, at: int, error: Callable[[], BaseException], number: int) -> None:
        if number == at:
            self.struck = True
            raise error()

    def acknowledged(self) -> None:
        """A call has returned. The first after the strike is when the power goes; another time it goes at the end."""
        if self.struck and not self._crashed:
            self.crash()

    def crash(self) -> None:
        """Keep what the disk has, and what was acknowledged."""
        target = self.disk.base.parent / f"crashed-{len(self._crashed)}"
        self.disk.crash(target)
        self._crashed.append((target, deepcopy(self.there), set(self.gone)))

    def judge(self) -> None:
        """All that was acknowledged is there, after each crash and without any."""
        for root, there, gone in [*self._crashed, (self.disk.base, self.there, self.gone)]:
            check(root, there, gone)
            shutil.rmtree(root)
        self.disk.base.mkdir()


class Client:
    """One process's calls."""

    def __init__(self, scene: Scene, name: str) -> None:
        self.saver = open_saver(scene.disk.base)
        self.scene = scene
        self.name = name
        self.parents: dict[str, str] = {}
        self.count = 0

    def put(self, thread: str, value: Any) -> None:
        self.count += 1
        id_ = f"{self.name}{self.count:04d}"
        config: Any = {"configurable": {"thread_id": thread, "checkpoint_ns": ""}}
        if thread in self.parents:
            config["configurable"]["checkpoint_id"] = self.parents[thread]
        channels = {"channel_values": {"c": value}, "channel_versions": {"c": id_}}
        checkpoint: Any = {**empty_checkpoint(), "id": id_, **channels}
        self.saver.put(config, checkpoint, {}, {"c": id_})
        self.parents[thread] = id_
        self.scene.there.setdefault(thread, set()).add(id_)
        self.scene.acknowledged()

    def work(self) -> None:
        """Appends, a flush, a segment of a large value, a rewrite, a copy, a deletion."""
        other, copy = f"{self.name}-other", f"{self.name}-copy"
        self.put("a", "small")
        self.put("a", "more")
        self.saver.flush("a")
        self.scene.acknowledged()
        self.put("a", bytes(range(256)) * 100)
        self.saver.compact("a")
        self.scene.acknowledged()
        self.put(other, 1)
        self.saver.copy_thread(other, copy)
        self.scene.there[copy] = set(self.scene.there[other])
        self.scene.acknowledged()
        del self.scene.there[other]  # from now on, nobody knows
        self.saver.delete_thread(other)
        self.scene.gone.add(other)
        self.scene.acknowledged()
        self.put("a", "last")

    def tolerantly(self) -> None:
        """As far as it goes; what is not acknowledged does not count."""
        with suppress(LSMError, Killed):
            self.work()


def check(root: Path, there: dict[str, set[str]], gone: set[str]) -> None:
    """All that was acknowledged is there."""
    with open_saver(root) as saver:
        for thread, ids in there.items():
            found = {each.checkpoint["id"] for each in saver.list({"configurable": {"thread_id": thread}})}
            assert ids <= found, f"{thread}: {sorted(ids - found)} are lost"
        for thread in gone:
            assert saver.get_tuple({"configurable": {"thread_id": thread}}) is None, f"{thread} is back"


def io_error() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder that the disk has; what is above the store is made by the store."""
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def every_sync(run: Callable[[int], bool]) -> None:
    """Run something once for each sync that it makes, which answers whether that sync was reached."""
    at = 1
    while run(at):
        at += 1
    assert at > 20, "the calls must make a good number of syncs, or nothing was tried"


@pytest.mark.parametrize("truncates", [True, False], ids=["cut off", "not cut off"])
def test_a_sync_that_fails_is_never_followed_by_an_acknowledgement(
    base: Path, monkeypatch: pytest.MonkeyPatch, truncates: bool
) -> None:
    def run(at: int) -> bool:
        with monkeypatch.context() as patch:
            scene = Scene(patch, base, at, io_error)
            scene.disk.truncates = truncates
            Client(scene, "one").tolerantly()
            if scene.struck:
                Client(scene, "two").put("a", "by another process")  # builds on what it finds
                scene.crash()
        scene.judge()
        return scene.struck

    every_sync(run)


def test_a_process_that_dies_before_a_sync_leaves_nothing_that_another_builds_on_unsynced(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(at: int) -> bool:
        with monkeypatch.context() as patch:
            scene = Scene(patch, base, at, Killed)
            Client(scene, "one").tolerantly()
            if scene.struck:
                Client(scene, "two").work()
                scene.crash()
        scene.judge()
        return scene.struck

    every_sync(run)


def test_the_harness_finds_a_missing_sync(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        scene = Scene(patch, base, 0, io_error)
        client = Client(scene, "one")
        client.put("a", "small")
        patch.setattr(client.saver._storage, "_sync", lambda descriptor: None)
        client.put("a", "more")
        scene.crash()
    with pytest.raises(AssertionError, match="are lost"):
        scene.judge()


@pytest.mark.parametrize("truncates", [True, False], ids=["cut off", "not cut off"])
def test_a_file_whose_sync_failed_is_written_anew_by_whoever_writes_next(
    base: Path, monkeypatch: pytest.MonkeyPatch, truncates: bool
) -> None:
    """Be it another process: it finds no mark at the end."""
    with monkeypatch.context() as patch:
        scene = Scene(patch, base, 0, io_error)
        one, other = Client(scene, "one"), Client(scene, "two")
        one.put("a", "small")
        path = base / "data" / "store" / manifest_key("a")
        inode = path.stat().st_ino
        scene.disk.truncates = truncates
        patch.setattr(one.saver._engine.process, "limits", replace(one.saver._engine.process.limits, commit_deadline=0))
        scene.disk.strike = partial(scene._strike, scene.disk.syncs + 1, io_error)
        with pytest.raises(CommitTimeout):
            one.put("a", "more")
        assert path.stat().st_ino == inode
        other.put("a", "on top")
        assert path.stat().st_ino != inode
