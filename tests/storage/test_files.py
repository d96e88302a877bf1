"""What is particular to files: locks, syncs, births, torn ends, temporary files and folders."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from lsm.errors import Conflict, Locked, Refused, Unavailable
from lsm.steps import (
    Append,
    Appended,
    Create,
    Delete,
    DeleteIf,
    FinishUpload,
    Found,
    Get,
    GetRanges,
    Holder,
    List,
    Lock,
    OpenUpload,
    PutIf,
    Unlock,
    UploadPart,
)
from lsm.storage.files import FileStorage, FileTag


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def storage(root: Path) -> FileStorage:
    return FileStorage(root)


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kind of sync was asked of the system."""
    counted: Counter[str] = Counter()

    def counting(name: str) -> None:
        real = getattr(os, name)

        def call(descriptor: int) -> None:
            counted[name] += 1
            real(descriptor)

        monkeypatch.setattr(os, name, call)

    counting("fsync")
    counting("fdatasync")
    return counted


@contextlib.contextmanager
def limit(kind: int, soft: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_an_append_is_in_place_and_reads_as_appended(storage: FileStorage, root: Path) -> None:
    first = storage.execute(Create("a", b"one,"))
    inode = (root / "a").stat().st_ino
    second = storage.execute(Append("a", [b"this is not looked at"], b"two,", first))
    third = storage.execute(Append("a", [], b"three", second))
    assert (root / "a").stat().st_ino == inode
    assert storage.execute(Get("a", unless=first, start=4)) == Appended(b"two,three", third)
    assert storage.execute(Get("a", unless=second, start=8)) == Appended(b"three", third)
    assert storage.execute(Get("a", unless=second, start=3)) == Found(b"one,two,three", third)


def test_a_file_that_got_the_inode_of_a_removed_one_is_another_file(storage: FileStorage, root: Path) -> None:
    seen: dict[int, FileTag] = {}
    tag = storage.execute(Create("a", b"x"))
    for size in range(2, 60):  # most file systems give the number out again at once
        seen[tag.inode] = tag
        tag = storage.execute(PutIf("a", b"y" * size, tag))
        if tag.inode in seen:
            break
    else:
        pytest.skip("this file system does not reuse inode numbers")
    old = seen[tag.inode]
    assert storage.execute(Get("a", unless=old, start=old.length)) == Found(b"y" * tag.length, tag)


def test_an_append_to_a_file_of_the_same_inode_and_length_conflicts(storage: FileStorage, root: Path) -> None:
    tag = storage.execute(Create("a", b"one"))
    (root / "a").write_bytes(b"two")  # in place: same inode, same length
    with pytest.raises(Conflict):
        storage.execute(Append("a", [b"one"], b"!", tag))
    with pytest.raises(Conflict):
        storage.execute(PutIf("a", b"!", tag))
    with pytest.raises(Conflict):
        storage.execute(DeleteIf("a", tag))
    assert (root / "a").read_bytes() == b"two"


def test_an_append_that_did_not_fit_is_undone(storage: FileStorage, root: Path) -> None:
    tag = storage.execute(Create("a", b"x" * 1000))
    tag = storage.execute(Append("a", [], b"", tag))
    with limit(resource.RLIMIT_FSIZE, 1500), pytest.raises(Refused, match="ulimit -f"):
        storage.execute(Append("a", [], b"y" * 1000, tag))
    assert (root / "a").read_bytes() == b"x" * 1000
    # Somebody may have read the part that fitted, and the next append might make the same length of it.
    now = storage.execute(Get("a")).tag
    assert now.birth != tag.birth
    storage.execute(Append("a", [], b"z", now))


def test_a_whole_file_that_did_not_fit_leaves_nothing(storage: FileStorage, root: Path) -> None:
    tag = storage.execute(Create("a", b"x" * 1000))
    upload = storage.execute(OpenUpload("c"))
    with limit(resource.RLIMIT_FSIZE, 1500):
        for request in (Create("b", b"y" * 2000), PutIf("a", b"y" * 2000, tag), UploadPart(upload, b"y" * 2000)):
            with pytest.raises(Refused, match="ulimit -f"):
                storage.execute(request)
    assert storage.execute(Get("a")) == Found(b"x" * 1000, tag)
    assert storage.execute(Get("b")) is None
    assert len(os.listdir(root / "tmp")) == 1  # the upload's, which may still be aborted


def test_out_of_file_descriptors(storage: FileStorage) -> None:
    storage.execute(Create("a", b"x"))
    lowest_free = os.open("/", os.O_RDONLY)
    os.close(lowest_free)
    with limit(resource.RLIMIT_NOFILE, lowest_free), pytest.raises(Unavailable, match="ulimit -n"):
        storage.execute(Get("a"))


def test_syncs(storage: FileStorage, syncs: Counter[str]) -> None:
    storage.execute(Create("m/00/first", b"x"))
    syncs.clear()
    tag = storage.execute(Create("m/00/a", b"x"))
    assert syncs == {"fdatasync": 1, "fsync": 1}  # the file, and the folder
    syncs.clear()
    tag = storage.execute(Append("m/00/a", [b"x"], b"y", tag))
    assert syncs == {"fdatasync": 1}
    syncs.clear()
    storage.execute(PutIf("m/00/a", b"z", tag))
    assert syncs == {"fdatasync": 1, "fsync": 1}
    syncs.clear()
    storage.execute(Delete(["m/00/a", "m/00/first"]))
    assert syncs == {"fsync": 1}
    syncs.clear()
    storage.execute(Create("m/01/b", b"x"))
    assert syncs == {"fdatasync": 1, "fsync": 2}  # m/ has a new folder, too
    syncs.clear()
    upload = storage.execute(OpenUpload("m/01/c"))
    storage.execute(UploadPart(upload, b"x"))
    storage.execute(FinishUpload(upload))
    assert syncs == {"fdatasync": 1, "fsync": 1}


def test_no_syncs_when_not_wanted(root: Path, syncs: Counter[str]) -> None:
    storage = FileStorage(root, fsync=False)
    tag = storage.execute(Create("m/00/a", b"x"))
    tag = storage.execute(Append("m/00/a", [b"x"], b"y", tag))
    tag = storage.execute(PutIf("m/00/a", b"z", tag))
    storage.execute(DeleteIf("m/00/a", tag))
    assert not syncs


def test_nothing_is_visible_before_it_is_synced(
    storage: FileStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    storage.execute(Create("m/other", b"x"))
    monkeypatch.setattr(os, "fdatasync", fail)
    for request in (Create("m/a", b"x"), PutIf("m/a", b"x", None)):
        with pytest.raises(Unavailable):
            storage.execute(request)
    assert os.listdir(root / "m") == ["other"]
    assert os.listdir(root / "tmp") == []


@pytest.mark.parametrize("key", ["../a", "a/../../b", "/etc/passwd", "a//b", "", "a/", ".hidden", "a/.b", "a\0b"])
def test_keys_that_are_paths(storage: FileStorage, key: str) -> None:
    for request in (Get(key), Create(key, b"x"), Delete([key]), OpenUpload(key)):
        with pytest.raises(ValueError, match="is not a key"):
            storage.execute(request)


def test_a_symbolic_link_is_not_followed(storage: FileStorage, root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (root / "m").mkdir(parents=True)
    (root / "m" / "link").symlink_to(secret)
    tag = FileTag(secret.stat().st_ino, 6, secret.stat().st_mtime_ns)
    for request in (
        Get("m/link"),
        GetRanges("m/link", [(0, 1)]),
        Append("m/link", [], b"x", tag),
        PutIf("m/link", b"x", tag),
        DeleteIf("m/link", tag),
    ):
        with pytest.raises(Refused, match="symbolic link"):
            storage.execute(request)
    with pytest.raises(Conflict):
        storage.execute(Create("m/link", b"x"))
    assert storage.execute(List("m/")).entries == []
    assert secret.read_bytes() == b"secret"


def test_a_file_where_a_folder_should_be(storage: FileStorage, root: Path) -> None:
    root.mkdir()
    (root / "m").write_bytes(b"")
    with pytest.raises(Refused, match="empty folder"):
        storage.execute(Create("m/a", b"x"))


def test_what_a_crash_leaves_is_listed_apart(storage: FileStorage, root: Path) -> None:
    storage.execute(Create("m/a", b"x"))
    (root / "tmp" / "left-over").write_bytes(b"half")
    (root / "m" / ".nfs0001").write_bytes(b"")
    assert [entry.key for entry in storage.execute(List("")).entries] == ["m/a"]
    assert [entry.key for entry in storage.execute(List("tmp/")).entries] == ["tmp/left-over"]
    storage.execute(Delete(["tmp/left-over"]))
    assert storage.execute(List("tmp/")).entries == []


def test_folders_go_with_their_last_object(storage: FileStorage, root: Path) -> None:
    for key in ("s/00/name/1", "s/00/name/2", "s/01/name/1"):
        storage.execute(Create(key, b"x"))
    storage.execute(Delete(["s/00/name/1"]))
    assert (root / "s/00/name").is_dir()
    storage.execute(Delete(["s/00/name/2", "s/01/name/1"]))
    assert list((root / "s").iterdir()) == []


def test_folders_that_come_and_go(storage: FileStorage) -> None:
    """One creates where the other removes the last object, and its folder with it."""

    def churn(name: str) -> None:
        for _ in range(150):
            storage.execute(Create(f"s/00/t/{name}", b"x"))
            storage.execute(Delete([f"s/00/t/{name}"]))

    failures = in_threads(churn, "a", "b", "c")
    assert failures == []
    assert storage.execute(List("s/")).entries == []


def test_appends_and_replacements_of_many_writers_are_all_there(storage: FileStorage) -> None:
    storage.execute(Create("a", b""))

    def write(name: str) -> None:
        for number in range(60):
            line = f"{name}{number};".encode()
            while True:
                found = storage.execute(Get("a"))
                with contextlib.suppress(Conflict, Locked):
                    if number % 5:
                        storage.execute(Append("a", [found.body], line, found.tag))
                    else:
                        storage.execute(PutIf("a", found.body + line, found.tag))
                    break

    assert in_threads(write, "a", "b", "c") == []
    lines = storage.execute(Get("a")).body.split(b";")[:-1]
    for name in "abc":
        assert [line for line in lines if line.decode().startswith(name)] == [f"{name}{n}".encode() for n in range(60)]
    assert len(lines) == 180


def _others(storage: FileStorage, request: object) -> tuple[threading.Thread, list[object]]:
    """A request on a thread of its own, and its outcome, once it has one."""
    outcome: list[object] = []

    def ask() -> None:
        try:
            outcome.append(storage.execute(request))
        except (Conflict, Locked) as error:
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread, outcome


def test_whoever_holds_a_lock_writes_first(storage: FileStorage) -> None:
    first = storage.execute(Create("a", b"one,"))
    lock = storage.execute(Lock("a"))
    for request in (Append("a", (), b"other", first), PutIf("a", b"other", first), DeleteIf("a", first), Lock("a")):
        with pytest.raises(Locked, match="a is locked"):
            storage.execute(request)
    second = storage.execute(Append("a", (), b"two,", first, lock))
    third = storage.execute(PutIf("a", b"three", second, lock))
    with pytest.raises(Conflict):
        storage.execute(Append("a", (), b"four", third, lock))  # of the file that was replaced
    storage.execute(Unlock(lock))
    assert storage.execute(Get("a")) == Found(b"three", third)


def test_a_lock_that_is_dropped_is_let_go(storage: FileStorage) -> None:
    tag = storage.execute(Create("a", b""))
    lock = storage.execute(Lock("a"))
    thread, outcome = _others(storage, Append("a", (), b"x", tag))
    thread.join(20)
    assert isinstance(outcome[0], Locked)
    del lock
    assert isinstance(storage.execute(Append("a", (), b"x", tag)), FileTag)


def test_who_holds_a_lock_is_told(storage: FileStorage, root: Path) -> None:
    storage.execute(Create("a", b""))
    assert storage.execute(Holder("a")) is None
    lock = storage.execute(Lock("a"))
    assert storage.execute(Holder("a")).startswith(f"process {os.getpid()} (")
    storage.execute(Unlock(lock))
    assert storage.execute(Holder("a")) is None


def test_what_is_not_there_is_not_locked(storage: FileStorage) -> None:
    assert storage.execute(Lock("a")) is None


def test_a_forked_child_does_not_unlock_what_its_parent_holds(storage: FileStorage, root: Path) -> None:
    storage.execute(Create("a", b""))
    lock = storage.execute(Lock("a"))
    if not (child := os.fork()):
        storage.execute(Unlock(lock))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with (root / "a").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    storage.execute(Unlock(lock))


def test_a_forked_child_does_not_keep_the_lock(storage: FileStorage, root: Path) -> None:
    storage.execute(Create("a", b"x"))
    with storage._locked("a"):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with open(root / "a", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def in_threads(call: object, *arguments: str) -> list[BaseException]:
    """Call with each argument on a thread of its own, and return what was raised."""
    failures: list[BaseException] = []

    def one(argument: str) -> None:
        try:
            call(argument)  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=one, args=(argument,)) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures
