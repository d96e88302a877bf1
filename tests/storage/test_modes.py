"""Whose files are, and who may read and write them: the application's, whoever runs a job over its store.

Users here are processes of their own that gave up being root, with ids that no account has. Where the tests do not
run as root, those that need several users are skipped.
"""

from __future__ import annotations

import os
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from langgraph.checkpoint.lsm import LSMSaver, Retention
from langgraph.checkpoint.lsm.commands import app
from langgraph.checkpoint.lsm.jobs import compact_store
from lsm.errors import Refused
from lsm.format.names import manifest_key
from lsm.steps import Create, FinishUpload, Get, OpenUpload, PutIf, UploadPart
from lsm.storage.files import FileStorage
from tests.support.checkpoints import at, chain, listed

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")

OWNER, OTHER, GROUP = 41234, 41235, 42345


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that every user may enter."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o711)
        yield Path(made)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def as_user(user: int, group: int, call: Callable[[], object]) -> None:
    """Run `call` in a process of this user, whose only group is `group`."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(user)
            call()
            code = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the other user's process failed: see stderr"


def everything(root: Path) -> dict[str, os.stat_result]:
    """All that lies in the store, and the root as `.`."""
    return {path.relative_to(root).as_posix(): path.stat() for path in (root, *root.rglob("*"))}


def modes(root: Path) -> dict[str, set[int]]:
    """Which modes folders and files of the store have."""
    found: dict[str, set[int]] = {"folders": set(), "files": set()}
    for each in everything(root).values():
        found["folders" if stat.S_ISDIR(each.st_mode) else "files"].add(stat.S_IMODE(each.st_mode))
    return found


def owners(root: Path) -> set[tuple[int, int]]:
    return {(each.st_uid, each.st_gid) for each in everything(root).values()}


def fill(root: Path, thread_id: str = "thread") -> None:
    """Nine segments, to be merged, and a tail."""
    with LSMSaver.from_conn_string(root.as_uri(), compaction="off", fsync=False) as saver:
        for number in range(9):
            chain(saver, thread_id, [{"value": number}])
            saver.flush(thread_id)
        chain(saver, thread_id, [{"value": 9}])


def go_on(root: Path, thread_id: str = "thread") -> None:
    """All that an application does: read, commit, replace the manifest and the segments, sweep."""
    with LSMSaver.from_conn_string(root.as_uri(), compaction="off", fsync=False) as saver:
        found = saver.get_tuple(at(thread_id))
        assert found is not None
        before = len(listed(saver, at(thread_id)))
        for number in range(9):
            chain(saver, thread_id, [{"value": number}])
            saver.flush(thread_id)
        chain(saver, thread_id, [{"value": 9}])
        chain(saver, "another", [{"value": 9}])
        assert len(listed(saver, at(thread_id))) == before + 10
    done = compact_store(
        root.as_uri(), retention=Retention(max_age=timedelta(days=3)), grace=timedelta(0), offline=True
    )
    assert (done.compacted > 0, done.failures) == (True, {})


JOBS = {
    "compact": ["compact", "URL"],
    "expire": ["expire", "URL", "--max-checkpoints", "3"],
    "prune": ["prune", "URL", "thread"],
    "gc": ["gc", "URL"],
    "repair": ["verify", "URL", "--repair"],
}


def run_job(root: Path, *words: str) -> None:
    found = CliRunner().invoke(app, [root.as_uri() if word == "URL" else word for word in words])
    assert found.exit_code == 0, found.output


@as_root
@pytest.mark.parametrize("job", JOBS)
def test_what_a_job_of_root_leaves_is_the_application_s(folder: Path, job: str) -> None:
    root = folder / "store"
    os.chown(folder, OWNER, GROUP)
    as_user(OWNER, GROUP, lambda: fill(root))
    manifest = root / manifest_key("thread")
    with manifest.open("ab") as file:
        file.write(bytes(20))  # a torn end, for the repair
    before = everything(root)
    with umask(0o077):
        run_job(root, *JOBS[job])
    assert job == "gc" or everything(root) != before
    assert owners(root) == {(OWNER, GROUP)}
    as_user(OWNER, GROUP, lambda: go_on(root))


@as_root
def test_what_root_puts_is_the_owner_s(folder: Path) -> None:
    root = folder / "store"
    root.mkdir()
    os.chown(root, OWNER, GROUP)
    fill(root)
    assert owners(root) == {(OWNER, GROUP)}
    as_user(OWNER, GROUP, lambda: go_on(root))


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
@pytest.mark.parametrize(("mode", "files"), [(0o700, 0o600), (0o750, 0o640), (0o755, 0o644), (0o2770, 0o660)])
def test_a_root_that_exists_says_the_modes_whatever_the_umask(folder: Path, mode: int, files: int, mask: int) -> None:
    root = folder / "store"
    root.mkdir()
    root.chmod(mode)
    with umask(mask):
        fill(root)
        go_on(root)
    assert modes(root) == {"folders": {mode}, "files": {files}}


@pytest.mark.parametrize(("mask", "mode", "files"), [(0o077, 0o700, 0o600), (0o027, 0o750, 0o640)])
def test_a_root_that_is_made_follows_the_umask_and_all_else_follows_the_root(
    folder: Path, mask: int, mode: int, files: int
) -> None:
    root = folder / "new" / "store"
    with umask(mask):
        fill(root)
    with umask(0):
        go_on(root)
    assert modes(root) == {"folders": {mode}, "files": {files}}
    assert stat.S_IMODE((folder / "new").stat().st_mode) == mode


def test_a_file_keeps_its_mode_when_it_is_replaced(folder: Path) -> None:
    root = folder / "store"
    fill(root)
    compact_store(root.as_uri())
    replaced = [root / manifest_key("thread"), *(root / "sweep").rglob("*")]
    assert len(replaced) == 2
    for path in replaced:
        path.chmod(0o600)
    before = [path.stat().st_ino for path in replaced]
    go_on(root)
    assert all(path.stat().st_ino != inode for path, inode in zip(replaced, before, strict=True))
    assert [stat.S_IMODE(path.stat().st_mode) for path in replaced] == [0o600, 0o600]


def test_a_file_keeps_its_mode_when_an_append_replaces_it(folder: Path) -> None:
    root = folder / "store"
    fill(root)
    manifest = root / manifest_key("thread")
    manifest.chmod(0o600)
    os.link(manifest, folder / "copy")
    with LSMSaver.from_conn_string(root.as_uri(), compaction="off", fsync=False) as saver:
        chain(saver, "thread", [{"value": 10}])
    assert manifest.stat().st_ino != (folder / "copy").stat().st_ino
    assert stat.S_IMODE(manifest.stat().st_mode) == 0o600


@as_root
def test_a_file_keeps_its_owner_when_it_is_replaced(folder: Path) -> None:
    root = folder / "store"
    storage = FileStorage(root)
    storage.execute(Create("a", b"one"))
    os.chown(root / "a", OTHER, GROUP)
    (root / "a").chmod(0o4640)  # and never a bit that lets others act as the owner
    storage.execute(PutIf("a", b"two", storage.execute(Get("a")).tag))
    found = (root / "a").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (OTHER, GROUP, 0o640)


def test_a_read_only_root_makes_nothing_that_its_owner_cannot_write(folder: Path) -> None:
    root = folder / "store"
    storage = FileStorage(root)
    storage.execute(Create("m/a", b""))
    root.chmod(0o500)
    upload = storage.execute(OpenUpload("m/00/b"))
    storage.execute(UploadPart(upload, b"x"))
    storage.execute(FinishUpload(upload))
    assert stat.S_IMODE((root / "m/00/b").stat().st_mode) == 0o600
    assert stat.S_IMODE((root / "m/00").stat().st_mode) == 0o700


@as_root
def test_two_users_of_a_group_write_one_thread(folder: Path) -> None:
    root = folder / "store"
    root.mkdir()
    os.chown(root, OWNER, GROUP)
    root.chmod(0o2770)
    as_user(OWNER, GROUP, lambda: fill(root))
    as_user(OTHER, GROUP, lambda: go_on(root))
    as_user(OWNER, GROUP, lambda: go_on(root))
    assert {each.st_gid for each in everything(root).values()} == {GROUP}
    assert {each.st_uid for each in everything(root).values()} == {OWNER, OTHER}
    assert modes(root) == {"folders": {0o2770}, "files": {0o660}}


@as_root
def test_a_group_that_cannot_be_given_is_not_replaced_by_one_that_may_read_more(folder: Path) -> None:
    root = folder / "store"
    root.mkdir()
    root.chmod(0o770)
    os.chown(root, OWNER, GROUP)
    as_user(OWNER, GROUP + 1, lambda: fill(root))
    assert {(each.st_uid, each.st_gid) for name, each in everything(root).items() if name != "."} == {
        (OWNER, GROUP + 1)
    }
    assert modes(root) == {"folders": {0o770, 0o700}, "files": {0o600}}


@as_root
@pytest.mark.parametrize("existing", [[], ["tmp"]], ids=["a folder", "a file"])
def test_root_that_may_not_give_files_away_leaves_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, existing: list[str]
) -> None:
    def forbidden(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    for name in ["", *existing]:
        (folder / "store" / name).mkdir()
    os.chown(folder / "store", OWNER, GROUP)
    monkeypatch.setattr(os, "fchown", forbidden)
    with pytest.raises(Refused, match="CAP_CHOWN"):
        FileStorage(folder / "store").execute(Create("a", b""))
    assert [path.name for path in (folder / "store").rglob("*")] == existing
