"""Objects as files below one folder, written with plain `os` calls.

Rules of this module:

- An object becomes visible whole: it is written and synced as a temporary file in `tmp/`, then linked (create) or
  renamed (replace) into place. Only `Append` changes a file in place, and a crash may then leave a torn end; whoever
  understands the bytes recognises it and replaces the file.
- Whoever changes or removes a file that exists holds `flock` on it, and checks after locking that the path still
  leads to the file that is locked. Readers take no lock. Nobody waits for a lock longer than a moment: whoever holds
  it may be stopped.
- With `fsync`, a write is answered only once the disk has the data and every folder entry that leads to it, by syncs
  that succeeded *after* these were written, and that this process made: what another process has made (it may have been
  killed before its sync) is synced by whoever builds on it, once. Folder entries that failed to be synced are synced
  again. Data that failed to be synced is not: the system may have dropped it. The file is cut off before its last mark
  (see `Append.mark`), so that whoever writes next writes it anew.
- A file with more than one name (a copy made of hard links) is never appended to: it is replaced.
- `tmp/` holds nothing but temporary files. What a crash leaves there is listed under the prefix `tmp/` only, for the
  collector, and may be removed with `Delete`. Names that start with a dot are nobody's.
- What is new belongs to the owner and group of the root folder, and may be read and written by whom that folder's
  mode lets in; what replaces a file belongs to whom that one did, under its mode. The process's umask counts only
  where the root itself is made. So a job of root's leaves what the application can use.
- Linux and macOS, on a local file system: one with hard links, `flock` and timestamps finer than a second.

**Tags.** A tag is (inode, length, birth, changed). Inode and length alone would not do: a file system gives the number
of a removed file to the next one, so that after two replacements the same number may stand for other bytes; and a torn
end that was cut off and written anew may come out at the same length. `birth` tells these apart: it is the time, in
nanoseconds, at which this inode got its first content under this key, and it is kept as the file's *modification
time*, which `Append` therefore puts back after it has written. `changed` is the inode's time of change (ctime), which
nobody can set: it tells a file that somebody else has written over in place, modification time and all (`cp -a` of a
backup). What is equal in inode and birth and has grown was most likely only appended to: that is what `Appended` says.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat as modes
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from lsm.errors import Conflict, Locked, NotFound, Refused, StorageError, Unavailable
from lsm.steps import (
    AbortUpload,
    Append,
    Appended,
    Create,
    Delete,
    DeleteIf,
    Enclosing,
    Ensure,
    Entry,
    FinishUpload,
    Found,
    Get,
    GetRanges,
    Holder,
    List,
    Lock,
    OpenUpload,
    Page,
    PutIf,
    Settled,
    Settlement,
    Tag,
    Unchanged,
    Unlock,
    UploadPart,
    check_size,
)

PAGE = 1000
"""Entries on one page of a listing."""

TEMPORARY = "tmp"
"""The folder of temporary files, below the root."""

_MOST_PLACES = 1 << 14
"""Files and folders of which it is remembered that their places are durable; one that is forgotten costs a sync."""

_KEY = re.compile(r"[^./\0][^/\0]*(/[^./\0][^/\0]*)*")

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHANGE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_REMEDIES = {
    errno.ENOSPC: "The disk is full: make room.",
    errno.EDQUOT: "The disk quota is used up: make room.",
    errno.EFBIG: "The file would be larger than this process or the file system allows (ulimit -f).",
    errno.EROFS: "The file system is read-only: mount it writable, or use another folder.",
    errno.EACCES: "Give this user the permission to read and write the folder and everything in it.",
    errno.EPERM: "Give this user the permission to write there, on a file system that has hard links. Root also needs "
    "the capability to give files to the owner of the folder (CAP_CHOWN), or runs the job as that user.",
    errno.EOPNOTSUPP: "The file system lacks hard links or flock: use another one.",
    errno.ENOLCK: "The file system has no locks to give: use a local one, or fix its lock service.",
    errno.ELOOP: "There is a symbolic link where a file should be, which is never followed: remove it.",
    errno.ENOTDIR: "There is a file where a folder should be: use an empty folder, or one that this project wrote.",
    errno.EISDIR: "There is a folder where a file should be: use an empty folder, or one that this project wrote.",
    errno.ENAMETOOLONG: "The path is too long for the file system: use a folder with a shorter path.",
}
_MOMENT = 0.002
_POLL = 0.0001
"""How long a request waits for a lock, and between two tries, in seconds. A commit holds one for about as long as the
disk takes for a sync."""

_FLOCK = struct.Struct("hhqqi4x")  # `struct flock` of Linux on 64 bits
_CLAIMS = sys.platform == "linux" and _FLOCK.size == 32 and hasattr(fcntl, "F_OFD_SETLK")

_OUT_OF_FILES = "This process or system has too many files open: raise the limit (ulimit -n), or close some."


class FileTag(NamedTuple):
    """What identifies one state of a file (see above)."""

    inode: int
    length: int
    birth: int
    changed: int = 0


class _Upload:
    """An upload under way: its key, and the temporary file. `io` closes the file of an upload that was dropped."""

    __slots__ = ("file", "key", "path")

    def __init__(self, key: str, path: str, descriptor: int) -> None:
        self.key = key
        self.path = path
        self.file = open(descriptor, "wb", buffering=0)  # noqa: SIM115 (closed by FinishUpload or AbortUpload)


class _Lock:
    """A file that is open and locked, and its state at that time. It is unlocked when dropped."""

    __slots__ = ("_process", "descriptor", "state")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._process = os.getpid()
        self.state = os.fstat(descriptor)

    def release(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0:
            return
        try:
            # Not left to close(): a process forked meanwhile has a copy of the descriptor, and with it the lock. But
            # nor may that copy unlock what its parent holds.
            if self._process == os.getpid():
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    __del__ = release


class FileStorage:
    """Objects below `folder`, which is made on the first write."""

    local = True
    appends = True
    conditional_deletes = True

    def __init__(self, folder: str | os.PathLike[str], *, fsync: bool = True) -> None:
        self._root = os.path.abspath(folder)
        self._fsync = fsync
        self._placed: dict[str, tuple[int, int]] = {}
        self._folders: dict[str, tuple[int, int]] = {}
        self.url = PurePosixPath(self._root).as_uri()

    def execute(self, request: Any) -> Any:
        try:
            return _ANSWERS[type(request)](self, request)
        except OSError as error:
            raise self._explain(error, getattr(request, "key", None)) from error

    async def aexecute(self, request: Any) -> Any:
        return self.execute(request)

    def close(self) -> None:
        """Nothing to let go of: no file stays open between requests."""

    # Reading

    def _get(self, request: Get) -> Found | Appended | Unchanged | None:
        path, known = self._path(request.key), request.unless
        try:
            if known is not None and _tag(os.lstat(path)) == known:
                return "unchanged"
            descriptor = os.open(path, _READ)
        except FileNotFoundError:
            return None
        try:
            tag = _tag(os.fstat(descriptor))
            check_size(request, tag.length)
            if isinstance(known, FileTag) and known.length == request.start and _grew(known, tag):
                return Appended(_read(descriptor, request.start, tag.length), tag)
            return Found(_read(descriptor, 0, tag.length), tag)
        finally:
            os.close(descriptor)

    def _get_ranges(self, request: GetRanges) -> list[bytes]:
        try:
            descriptor = os.open(self._path(request.key), _READ)
        except FileNotFoundError:
            raise NotFound(f"{self.url}: there is no object {request.key}", request.key) from None
        try:
            length = os.fstat(descriptor).st_size  # a damaged length must not make us ask for terabytes
            return [_read(descriptor, start, min(end, length)) for start, end in request.ranges]
        finally:
            os.close(descriptor)

    def _list(self, request: List) -> Page:
        entries = list(islice(self._walk(request.prefix, request.after or ""), PAGE + 1))
        return Page(entries[:PAGE], len(entries) > PAGE)

    def _walk(self, prefix: str, after: str) -> Iterator[Entry]:
        """The files below `prefix`, which is empty or ends in `/`, in order of their keys."""
        try:
            with os.scandir(self._path(prefix[:-1]) if prefix else self._root) as scan:
                # A folder sorts as its keys do, so with its slash: `a-b` comes before `a/b`.
                found = sorted((item.name + "/" if item.is_dir(follow_symlinks=False) else item.name) for item in scan)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in found:
            key = prefix + name
            if name.startswith(".") or key == f"{TEMPORARY}/":
                continue
            if name.endswith("/"):
                if key > after or after.startswith(key):
                    yield from self._walk(key, after)
            elif key > after:
                try:
                    stat = os.lstat(os.path.join(self._root, key))
                except FileNotFoundError:
                    continue
                if modes.S_ISREG(stat.st_mode):
                    yield Entry(key, stat.st_size, _tag(stat), stat.st_ctime)

    def _enclosing(self, request: Enclosing) -> str | None:
        path = PurePosixPath(os.path.realpath(self._root))
        for inner, outer in zip((path, *path.parents), path.parents, strict=False):
            if inner.name in request.folders and os.path.exists(outer / request.mark):
                return outer.as_uri()
        return None

    # Whole files

    def _create(self, request: Create) -> Tag:
        with self._temporary(request.body) as (temporary, descriptor):
            try:
                self._place(os.link, temporary, request.key)
            except FileExistsError:
                # Whoever is told that it exists may find that it is its own, and build on it.
                self._ensure_place(request.key)
                raise self._conflict(request.key) from None
            os.unlink(temporary)
            return self._note_placed(request.key, os.fstat(descriptor))

    def _put_if(self, request: PutIf) -> Tag:
        if request.tag is None:
            return self._create(Create(request.key, request.body))
        with (
            self._temporary(request.body, request.key) as new,
            self._locked(request.key, request.tag, request.lock),
        ):
            return self._replace(request.key, *new)

    def _replace(self, key: str, temporary: str, descriptor: int) -> Tag:
        """Put a temporary file in the place of a file that is locked."""
        self._place(os.rename, temporary, key)
        return self._note_placed(key, os.fstat(descriptor))

    def _append(self, request: Append) -> Tag:
        with self._locked(request.key, request.tag, request.lock) as (descriptor, state):
            if state.st_nlink > 1 or os.geteuid() not in (0, state.st_uid):  # only its owner can put the birth back
                old = _read(descriptor, 0, state.st_size)
                with self._temporary(old + request.new, request.key) as new:
                    return self._replace(request.key, *new)
            if self._fsync and self._placed.get(request.key) != _identity(state):
                self._ensure_place(request.key, state)
            self._append_to(descriptor, state, request.new, request.mark)
            return _tag(os.fstat(descriptor))

    def _append_to(self, descriptor: int, state: os.stat_result, new: bytes, mark: int) -> None:
        at, size, suspect = len(new) - mark if self._fsync else len(new), state.st_size, False
        if self._fsync:  # else it is visible and confirmed at once
            _claim(descriptor, size, fcntl.F_WRLCK)
        try:
            _write(descriptor, memoryview(new)[:at], size)
            suspect = True
            self._sync(descriptor)
            suspect = False
            if at < len(new):
                _write(descriptor, memoryview(new)[at:], size + at)
            os.utime(descriptor, ns=(state.st_atime_ns, state.st_mtime_ns))
        except BaseException:
            # Cut off what was written, also where somebody was interrupted. A reader may have seen it, and the next
            # append may come out at the same length: hence a new birth. Where this fails, too, the mark is missing.
            with suppress(OSError):
                os.ftruncate(descriptor, size - (mark if suspect else 0))
                _stamp(descriptor)
            raise
        finally:
            if self._fsync:
                _claim(descriptor, size, fcntl.F_UNLCK)

    def _delete(self, request: Delete) -> None:
        by_folder: dict[str, list[str]] = {}
        for key in request.keys:
            by_folder.setdefault(os.path.dirname(self._path(key)), []).append(key)
        for folder, keys in by_folder.items():
            with suppress(FileNotFoundError), self._durably(folder):
                for key in keys:
                    with suppress(FileNotFoundError, Conflict), self._locked(key):
                        os.unlink(self._path(key))
            self._remove_empty(folder)

    def _delete_if(self, request: DeleteIf) -> None:
        folder, path = os.path.dirname(self._path(request.key)), self._path(request.key)
        try:
            with self._durably(folder), self._locked(request.key, request.tag):
                os.unlink(path)
        except FileNotFoundError:
            raise self._conflict(request.key) from None
        self._remove_empty(folder)

    # Locks

    def _lock(self, request: Lock) -> _Lock | None:
        path = self._path(request.key)
        while True:
            try:
                descriptor = os.open(path, _CHANGE)
            except FileNotFoundError:
                return None
            try:
                _flock(descriptor)
            except BaseException as error:
                replaced = not _leads_to(path, os.fstat(descriptor))
                os.close(descriptor)
                if not isinstance(error, BlockingIOError):
                    raise
                if replaced:
                    continue
                raise Locked(f"{self.url}: {request.key} is locked by another writer.", request.key) from None
            lock = _Lock(descriptor)
            if _leads_to(path, lock.state):
                return lock
            lock.release()  # replaced or removed while we waited: the lock that counts is another file's

    def _unlock(self, request: Unlock) -> None:
        request.lock.release()

    def _holder(self, request: Holder) -> str | None:
        """As Linux tells in `/proc/locks` (proc_locks(5)). A process of another PID namespace has no number here."""
        try:
            state = os.stat(self._path(request.key))
            with open("/proc/locks", encoding="ascii") as locks:
                held = [line.split() for line in locks if "FLOCK" in line and f":{state.st_ino} " in line]
            pid = next((fields[4] for fields in held if fields[1] == "FLOCK" and int(fields[4]) > 0), None)
            if pid is None:
                return None
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            return None
        stopped = ", which is stopped" if rest.split()[0] in ("T", "t") else ""
        return f"process {pid} ({name}){stopped}"

    def _settled(self, request: Settled) -> Settlement:
        path = self._path(request.key)
        try:
            descriptor = os.open(path, _READ)
        except FileNotFoundError:
            return "changed"
        try:
            appending = _is_claimed(descriptor, request.start)
            state = os.fstat(descriptor)
            if _tag(state) != request.tag or not _leads_to(path, state):
                return "changed"
            return "appending" if appending else "settled"
        finally:
            os.close(descriptor)

    # What is durable

    def _ensure(self, request: Ensure) -> None:
        path = self._path(request.key)
        try:
            state = os.lstat(path)
        except FileNotFoundError:
            state = None
        if (None if state is None else _tag(state)) != request.tag:
            raise self._conflict(request.key)
        if state is not None:
            self._ensure_place(request.key, state)
            return
        folder = os.path.dirname(path)
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        with self._durably(folder):
            pass

    def _ensure_place(self, key: str, state: os.stat_result | None = None) -> None:
        """Have the disk know the entry of a file, be it another process's, and of the folders that lead to it."""
        if not self._fsync or (state is not None and self._placed.get(key) == _identity(state)):
            return
        with self._durably(os.path.dirname(self._path(key))):
            pass
        if state is not None:
            self._note_placed(key, state)

    def _note_placed(self, key: str, state: os.stat_result) -> Tag:
        """Remember that a file's place is durable."""
        _remember(self._placed, key, _identity(state))
        return _tag(state)

    @contextmanager
    def _durably(self, folder: str) -> Iterator[int]:
        """An open folder in which something is changed meanwhile; then the disk knows its entries, and where it is."""
        with self._watched(folder) as (descriptor, known):
            yield descriptor
            if self._fsync:
                os.fsync(descriptor)
                parent = os.path.dirname(folder)
                if not known and parent != folder:
                    # Above the root, there may be folders that are not ours to read.
                    with (
                        suppress(*(() if parent.startswith(self._root) else (PermissionError,))),
                        self._durably(parent),
                    ):
                        pass
                self._note_folder(folder, descriptor)

    @contextmanager
    def _watched(self, folder: str) -> Iterator[tuple[int, bool]]:
        """An open folder, and whether the disk is known to know where it is. Who changes it goes on knowing that."""
        with _open_folder(folder) as descriptor:
            known = self._folders.get(folder) == _version(os.fstat(descriptor))
            yield descriptor, known
            if known:
                self._note_folder(folder, descriptor)

    def _note_folder(self, folder: str, descriptor: int) -> None:
        """Remember that the disk knows where a folder is, in the state that it is in."""
        _remember(self._folders, folder, _version(os.fstat(descriptor)))

    # Uploads

    def _open_upload(self, request: OpenUpload) -> _Upload:
        self._path(request.key)
        return _Upload(request.key, *self._open_temporary())

    def _upload_part(self, request: UploadPart) -> None:
        view = memoryview(request.body)
        while view:
            view = view[request.handle.file.write(view) :]

    def _finish_upload(self, request: FinishUpload) -> None:
        upload: _Upload = request.handle
        try:
            _stamp(upload.file.fileno())
            self._sync(upload.file.fileno())
            upload.file.close()
            self._place(os.rename, upload.path, upload.key)
        except BaseException:
            self._abort_upload(AbortUpload(upload))
            raise

    def _abort_upload(self, request: AbortUpload) -> None:
        with suppress(OSError):
            request.handle.file.close()
        _remove(request.handle.path)

    # The parts that these are made of

    def _path(self, key: str) -> str:
        # Keys come from the project's own names; this is the last line, should one ever carry a path.
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not a key: its parts may neither be empty nor start with a dot")
        return f"{self._root}/{key}"

    @contextmanager
    def _locked(
        self, key: str, tag: Tag | None = None, lock: _Lock | None = None
    ) -> Iterator[tuple[int, os.stat_result]]:
        """The file of `key`, open and locked, and its state; `Conflict` if there is none, or its tag is not `tag`.
        `lock` is one that the caller has, and keeps."""
        held = lock or self._lock(Lock(key))
        if held is None:
            raise self._conflict(key)
        try:
            state = held.state if lock is None else os.fstat(held.descriptor)
            if (tag is not None and _tag(state) != tag) or (lock is not None and not _leads_to(self._path(key), state)):
                raise self._conflict(key)
            yield held.descriptor, state
        finally:
            if lock is None:
                held.release()

    @contextmanager
    def _temporary(self, body: bytes, replaced: str | None = None) -> Iterator[tuple[str, int]]:
        """A new file, whole, synced and open, to be put into its place meanwhile: that of the key `replaced`, if given.
        It is locked, so that nobody's commit is appended to it before its place is durable, too."""
        path, descriptor = self._open_temporary(replaced)
        try:
            _flock(descriptor)
            lock = _Lock(descriptor)
            try:
                _write(descriptor, body, 0)
                _stamp(descriptor)
                self._sync(descriptor)
                yield path, descriptor
            finally:
                lock.release()
        finally:
            _remove(path)

    def _open_temporary(self, replaced: str | None = None) -> tuple[str, int]:
        """A new file in `tmp/`, with the owner and mode of the file of key `replaced`, if there is one; else with those
        of a new file."""
        path = f"{self._root}/{TEMPORARY}/{secrets.token_hex(16)}"
        try:
            descriptor = os.open(path, _NEW, 0o600)
        except FileNotFoundError:
            self._make_folder(os.path.dirname(path))
            descriptor = os.open(path, _NEW, 0o600)
        try:
            model = None
            if replaced is not None:
                with suppress(FileNotFoundError):
                    model = os.lstat(self._path(replaced))
            if model is None:
                model = os.stat(self._root)
                _give(descriptor, model, model.st_mode & 0o666 | 0o600)
            else:
                _give(descriptor, model, model.st_mode & 0o777)
        except BaseException:
            os.close(descriptor)
            _remove(path)
            raise
        return path, descriptor

    def _place(self, how: Callable[..., None], temporary: str, key: str) -> None:
        """Link or rename a temporary file to its key, and have the disk know that."""
        folder, name = os.path.split(self._path(key))
        for _ in range(10):
            try:
                with self._durably(folder) as descriptor:
                    how(temporary, name, dst_dir_fd=descriptor)
                return
            except FileNotFoundError:
                if not os.path.exists(temporary):
                    raise
                self._make_folder(folder)  # and again: somebody may just be removing empty folders
        raise Unavailable(f"{self.url}: the folder of {key} is removed as fast as it is made", key)

    def _make_folder(self, path: str) -> None:
        """Make the folder and those above it. It may be removed again at once: see `_place`."""
        parent = os.path.dirname(path)
        with suppress(FileExistsError):
            try:
                with self._durably(parent) as descriptor:
                    self._mkdir(path, descriptor)
            except FileNotFoundError:
                self._make_folder(parent)
                with suppress(FileNotFoundError), self._durably(parent) as descriptor:
                    self._mkdir(path, descriptor)
            with suppress(FileNotFoundError), _open_folder(path) as descriptor:
                self._note_folder(path, descriptor)

    def _mkdir(self, path: str, parent: int) -> None:
        """Make one folder in an open one: the root and those above it under the umask, those below it like the root."""
        name = os.path.basename(path)
        if not path.startswith(f"{self._root}/"):
            os.mkdir(name, dir_fd=parent)
            return
        model = os.stat(self._root)
        mode = modes.S_IMODE(model.st_mode) | 0o700
        os.mkdir(name, mode, dir_fd=parent)
        # No symbolic link is followed: a job of root's must not be led to give away another folder.
        folder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
        try:
            _give(folder, model, mode)
        except BaseException:
            os.rmdir(name, dir_fd=parent)
            raise
        finally:
            os.close(folder)

    def _remove_empty(self, folder: str) -> None:
        """Remove the folder and those above it, below the first level, as far as they are empty."""
        while os.path.dirname(os.path.dirname(folder)).startswith(self._root):
            parent, name = os.path.split(folder)
            try:
                with self._watched(parent) as (descriptor, _):
                    os.rmdir(name, dir_fd=descriptor)
            except OSError:
                return
            folder = parent

    def _sync(self, descriptor: int) -> None:
        if not self._fsync:
            return
        if sys.platform == "darwin":
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # fsync alone leaves it in the drive's cache there
        else:
            os.fdatasync(descriptor)

    def _conflict(self, key: str) -> Conflict:
        return Conflict(f"{self.url}: {key} is not in the state that the write expects", key)

    def _explain(self, error: OSError, key: str | None) -> StorageError:
        what = f"{self.url}: {key or 'request'}: {error.strerror or error}."
        if error.errno in _REMEDIES:
            return Refused(f"{what} {_REMEDIES[error.errno]}", key)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return Unavailable(f"{what} {_OUT_OF_FILES}", key)
        return Unavailable(what, key)


_ANSWERS: dict[type, Callable[[FileStorage, Any], Any]] = {
    Get: FileStorage._get,
    GetRanges: FileStorage._get_ranges,
    Create: FileStorage._create,
    PutIf: FileStorage._put_if,
    Append: FileStorage._append,
    Delete: FileStorage._delete,
    DeleteIf: FileStorage._delete_if,
    Enclosing: FileStorage._enclosing,
    Lock: FileStorage._lock,
    Unlock: FileStorage._unlock,
    Ensure: FileStorage._ensure,
    Settled: FileStorage._settled,
    Holder: FileStorage._holder,
    List: FileStorage._list,
    OpenUpload: FileStorage._open_upload,
    UploadPart: FileStorage._upload_part,
    FinishUpload: FileStorage._finish_upload,
    AbortUpload: FileStorage._abort_upload,
}


def _tag(stat: os.stat_result) -> FileTag:
    return FileTag(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    """Which file this is, however it has grown."""
    return stat.st_ino, stat.st_mtime_ns


def _version(stat: os.stat_result) -> tuple[int, int]:
    """Which folder this is, and in which state."""
    return stat.st_ino, stat.st_ctime_ns


def _claim(descriptor: int, start: int, kind: int) -> None:
    """Tell readers that what comes from a byte on is being appended, or that it is over. It is a lock that nobody waits
    for, on that range: `flock` alone does not tell an append from whoever waits for its turn to write."""
    if _CLAIMS:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, 0, 0))


def _is_claimed(descriptor: int, start: int) -> bool:
    """Whether somebody is appending there. Where the system has no such locks: whether it is locked at all."""
    if _CLAIMS:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, start, 0, 0))
        kind, _, at, _, _ = _FLOCK.unpack(answer)
        return bool(kind != fcntl.F_UNLCK and at == start)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _flock(descriptor: int) -> None:
    """Lock a file. Raises `BlockingIOError` where another has it for longer than a moment."""
    until = None
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            until = now + _MOMENT if until is None else until
            if now >= until:
                raise
            time.sleep(_POLL)


def _remember(known: dict[str, tuple[int, int]], name: str, what: tuple[int, int]) -> None:
    """Enter something into a table, from which the oldest entry goes where there are too many."""
    known.pop(name, None)
    known[name] = what
    if len(known) > _MOST_PLACES:
        known.pop(next(iter(known)), None)


@contextmanager
def _open_folder(path: str) -> Iterator[int]:
    descriptor = os.open(path, _FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _grew(known: FileTag, now: FileTag) -> bool:
    return known.inode == now.inode and known.birth == now.birth and known.length < now.length


def _stamp(descriptor: int) -> None:
    """Give the file a birth of its own: the kernel's own stamps are only as fine as its tick."""
    now = time.time_ns()
    os.utime(descriptor, ns=(now, now))


def _give(descriptor: int, model: os.stat_result, mode: int) -> None:
    """Give a file or folder that this process has made to the owner and group of `model`, as far as the system lets it,
    and set its mode."""
    made = os.fstat(descriptor)
    if os.geteuid() == 0:
        if (made.st_uid, made.st_gid) != (model.st_uid, model.st_gid):
            os.fchown(descriptor, model.st_uid, model.st_gid)
    elif made.st_gid != model.st_gid:
        try:
            os.fchown(descriptor, -1, model.st_gid)
        except PermissionError:
            # Not a group of this user's. The group that it has instead is let in only as far as everybody is.
            mode &= ~0o070 | (mode & 0o007) << 3
    os.fchmod(descriptor, mode)


def _leads_to(path: str, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.lstat(path), file)
    except FileNotFoundError:
        return False


def _read(descriptor: int, start: int, end: int) -> bytes:
    """The bytes `[start, end)`, fewer where the file ends before."""
    parts = []
    while start < end and (part := os.pread(descriptor, end - start, start)):
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write(descriptor: int, body: bytes | memoryview, offset: int) -> None:
    view = memoryview(body)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
