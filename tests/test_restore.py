"""A thread that goes back to what it was, under processes that know what came after: a backup was restored."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint

from langgraph.checkpoint.lsm import LSMSaver
from lsm.format.names import manifest_key
from tests.support.checkpoints import at


def open_saver(root: Path) -> LSMSaver:
    return LSMSaver.from_conn_string(root.as_uri(), compaction="off", fsync=False, compression="none")


def put(saver: LSMSaver, id_: str, parent: str | None = None, value: Any = None, **channels: Any) -> None:
    config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
    if parent is not None:
        config["configurable"]["checkpoint_id"] = parent
    values = {"c": value if value is not None else f"value of {id_}", **channels}
    versions: dict[str, Any] = {"c": id_, **dict.fromkeys(channels, id_)}
    checkpoint: Any = {
        **empty_checkpoint(),
        "ts": "now",
        "id": id_,
        "channel_values": values,
        "channel_versions": versions,
    }
    saver.put(config, checkpoint, {}, versions)


def ids(saver: LSMSaver) -> list[str]:
    return [found.checkpoint["id"] for found in saver.list(at("t"))]


def latest(saver: LSMSaver) -> Any:
    found = saver.get_tuple(at("t"))
    assert found is not None
    return found.checkpoint["id"], found.checkpoint["channel_values"]["c"]


def restore(backup: Path, root: Path) -> None:
    """As `cp -a backup/. root/` does: files that are there are written over in place, times and all."""
    for path in sorted(path for path in backup.rglob("*") if path.is_file()):
        target = root / path.relative_to(backup)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
        shutil.copystat(path, target)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    return tmp_path / "backup"


def back_up(root: Path, backup: Path) -> None:
    shutil.copytree(root, backup)


def test_a_live_process_sees_the_restored_state_at_its_next_call(root: Path, backup: Path) -> None:
    with open_saver(root) as saver:
        put(saver, "1")
        back_up(root, backup)
        put(saver, "2", "1")
        assert ids(saver) == ["2", "1"]
        inode = (root / manifest_key("t")).stat().st_ino
        restore(backup, root)
        assert (root / manifest_key("t")).stat().st_ino == inode
        assert latest(saver) == ("1", "value of 1")
        view = saver._engine.process.thread("t").view
        assert view is not None
        assert view.count == 1  # and this is what it goes on from
        assert ids(saver) == ["1"]
        put(saver, "3", "1")
        assert ids(saver) == ["3", "1"]
        with open_saver(root) as fresh:
            assert ids(fresh) == ["3", "1"]


def test_a_live_process_that_only_writes_goes_on_from_the_restored_state(root: Path, backup: Path) -> None:
    with open_saver(root) as saver:
        put(saver, "1")
        back_up(root, backup)
        put(saver, "2", "1")
        restore(backup, root)
        put(saver, "3", "1")
        for reader in (saver, open_saver(root)):
            assert ids(reader) == ["3", "1"]


def test_a_state_of_the_same_length_is_another_one(root: Path, backup: Path) -> None:
    """Inode, length and time of modification are as they were; only who looks at the time of change can tell."""
    with open_saver(root) as saver, open_saver(root) as other:
        put(saver, "1")
        back_up(root, backup)
        path = root / manifest_key("t")
        put(saver, "2", "1", "aaaa")
        known = path.stat()
        assert latest(saver) == ("2", "aaaa")
        restore(backup, root)
        put(other, "2", "1", "bbbb")
        assert (path.stat().st_ino, path.stat().st_size) == (known.st_ino, known.st_size)
        os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))
        assert latest(saver) == ("2", "bbbb")
        put(saver, "3", "2")
        assert ids(open_saver(root)) == ["3", "2", "1"]
        assert saver.get_tuple(at("t", checkpoint_id="2")).checkpoint["channel_values"]["c"] == "bbbb"  # type: ignore[union-attr]


@pytest.mark.parametrize("more", range(1, 12))
def test_a_state_that_is_a_few_bytes_longer_is_another_one(root: Path, backup: Path, more: int) -> None:
    """What is seen of it, behind what is known, is the end of a frame. It looks like an append that was torn."""
    with open_saver(root) as saver, open_saver(root) as other:
        put(saver, "1")
        back_up(root, backup)
        put(saver, "2", "1", "a" * 40)
        size = (root / manifest_key("t")).stat().st_size
        restore(backup, root)
        put(other, "2", "1", "b" * (40 + more))
        assert (root / manifest_key("t")).stat().st_size == size + more
        assert latest(saver) == ("2", "b" * (40 + more))
        put(saver, "3", "2")
        assert ids(open_saver(root)) == ["3", "2", "1"]


def test_a_manifest_that_has_grown_from_a_restored_one_is_read_whole(root: Path, backup: Path) -> None:
    """Where frames happen to begin at the byte up to which it was read, they still follow another frame."""
    with open_saver(root) as saver, open_saver(root) as other:
        put(saver, "1")
        back_up(root, backup)
        put(saver, "2", "1", "aaaa")
        assert latest(saver) == ("2", "aaaa")
        birth = (root / manifest_key("t")).stat().st_mtime_ns
        restore(backup, root)
        put(other, "2", "1", "bbbb")
        put(other, "3", "2", "cccc")
        assert (root / manifest_key("t")).stat().st_mtime_ns == birth
        assert latest(saver) == ("3", "cccc")
        assert [found.checkpoint["channel_values"]["c"] for found in saver.list(at("t"))] == [
            "cccc",
            "bbbb",
            "value of 1",
        ]


def test_a_flush_of_what_was_before_a_restore_does_not_come_back(root: Path, backup: Path) -> None:
    """A segment that waits to take the place of frames takes no others' place."""
    with open_saver(root) as saver, open_saver(root) as other:
        put(saver, "1")
        back_up(root, backup)
        parent = "1"
        number = 2
        while saver._engine.process.thread("t").flush is None:
            put(saver, f"{number:04d}", parent, "a" * 20_000)
            parent, number = f"{number:04d}", number + 1
        restore(backup, root)
        for name in range(number):
            put(other, f"other {name:04d}", "1")
        expected = ids(other)
        put(saver, "zzzz", "1")
        assert ids(open_saver(root)) == ["zzzz", *expected]


def test_what_was_remembered_before_a_restore_does_not_lead_a_child_astray(root: Path, backup: Path) -> None:
    """A child inherits where values lie, by numbers of segments: after a restore, others have these numbers."""
    with open_saver(root) as saver, open_saver(root) as other:
        put(saver, "1")
        saver.flush("t")
        back_up(root, backup)
        put(saver, "2", "1", kept="a" * 200)
        put(saver, "3", "2")
        saver.flush("t")
        for n in range(4, 7):
            put(saver, str(n), "3")
        saver.flush("t")
        assert saver.get_tuple(at("t", checkpoint_id="2")) is not None  # it is remembered now
        restore(backup, root)
        put(other, "2", "1", "longer " * 20, kept="b" * 150)
        put(other, "3", "2")
        other.flush("t")
        for n in range(4, 7):
            put(other, str(n), "3")
        other.flush("t")
        config = at("t", checkpoint_id="2")
        new: Any = {**empty_checkpoint(), "id": "9", "channel_values": {}, "channel_versions": {"kept": "2"}}
        saver.put(config, new, {}, {})
        for reader in (saver, open_saver(root)):
            assert latest_kept(reader) == "b" * 150


def test_values_that_were_cached_before_a_restore_are_not_taken_for_others(root: Path, backup: Path) -> None:
    """They have the same channel, version and number of commit, and a flush moves the others' meanwhile."""
    with open_saver(root) as saver, open_saver(root) as other:
        put(saver, "1")
        back_up(root, backup)
        put(saver, "2", "1", "a" * 9000)
        restore(backup, root)
        put(other, "2", "1", "b" * 9000)
        other.flush("t")
        assert latest(saver) == ("2", "b" * 9000)


def latest_kept(saver: LSMSaver) -> Any:
    found = saver.get_tuple(at("t"))
    assert found is not None
    return found.checkpoint["channel_values"]["kept"]


def test_linked_copies_stay_as_they_are(root: Path, backup: Path) -> None:
    with open_saver(root) as saver:
        put(saver, "1")
        shutil.copytree(root, backup, copy_function=os.link)
        put(saver, "2", "1")
        put(saver, "3", "2")
        assert ids(saver) == ["3", "2", "1"]
    with open_saver(backup) as copy:
        assert ids(copy) == ["1"]
