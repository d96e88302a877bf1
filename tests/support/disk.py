"""A disk that forgets what was not synced, under real files.

Rules of this module:

- Files are real; their system calls go through here. What the disk has for sure is kept beside: the data of an inode as
  of its last sync that succeeded, and the entries of a folder as of its last.
- A sync that fails drops what it was to write, as Linux does: a later sync of the same file does not bring it back.
- `crash` makes the folder that is left where nothing else has survived.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Inode = tuple[int, int]
"""The number of a file or folder, and how many had it before: numbers are given out again."""


class Killed(BaseException):
    """The process has gone: nobody catches this."""


class Disk:
    """What a disk has of all files below a folder.

    Args:
        patch: Puts it in the place of system calls, for one test.
        base: The folder; it and what is in it count as synced.

    Attributes:
        syncs: How many syncs were asked for.
        strike: Called at each sync with its number; what it raises is what becomes of the sync.
        truncates: Whether files can be cut off.
    """

    def __init__(self, patch: pytest.MonkeyPatch, base: Path) -> None:
        self.base = base
        self.syncs = 0
        self.strike: Callable[[int], None] = lambda number: None
        self.truncates = True
        self._lives: dict[int, int] = {}
        self._data: dict[Inode, bytes] = {}
        self._dropped: dict[Inode, set[int]] = {}
        self._entries: dict[Inode, dict[str, Inode]] = {self._inode(os.stat(base)): {}}
        self._real: dict[str, Any] = {
            name: getattr(os, name) for name in ("open", "mkdir", "fsync", "fdatasync", "pwrite", "ftruncate")
        }
        for name in self._real:
            patch.setattr(os, name, getattr(self, f"_{name}"))

    def crash(self, target: Path) -> None:
        """Make a folder of what the disk has."""
        self._restore(self._inode(os.stat(self.base)), target)

    def _inode(self, state: os.stat_result) -> Inode:
        return state.st_ino, self._lives.get(state.st_ino, 0)

    def _born(self, state: os.stat_result) -> Inode:
        self._lives[state.st_ino] = self._lives.get(state.st_ino, 0) + 1
        return self._inode(state)

    def _restore(self, inode: Inode, target: Path) -> None:
        target.mkdir()
        for name, entry in self._entries[inode].items():
            if entry in self._entries:
                self._restore(entry, target / name)
            else:
                (target / name).write_bytes(self._data.get(entry, b""))

    # The system calls.

    def _open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        descriptor: int = self._real["open"](path, flags, *args, **options)
        if flags & os.O_EXCL:
            self._data[self._born(os.fstat(descriptor))] = b""
        return descriptor

    def _mkdir(self, path: Any, *args: Any, **options: Any) -> None:
        self._real["mkdir"](path, *args, **options)
        self._entries[self._born(os.stat(path, dir_fd=options.get("dir_fd")))] = {}

    def _fsync(self, descriptor: int) -> None:
        self._struck()
        self._real["fsync"](descriptor)
        names = os.listdir(descriptor)
        found = {name: self._inode(os.lstat(name, dir_fd=descriptor)) for name in names}
        self._entries[self._inode(os.fstat(descriptor))] = found

    def _fdatasync(self, descriptor: int) -> None:
        inode = self._inode(os.fstat(descriptor))
        now = Path(f"/proc/self/fd/{descriptor}").read_bytes()  # it may be open for writing only, and have no name
        dropped = self._dropped.setdefault(inode, set())
        try:
            self._struck()
        except OSError:
            before = self._data.get(inode, b"")
            dropped |= {at for at in range(len(now)) if now[at : at + 1] != before[at : at + 1]}
            raise
        self._data[inode] = bytes(0 if at in dropped else byte for at, byte in enumerate(now)) if dropped else now

    def _struck(self) -> None:
        self.syncs += 1
        self.strike(self.syncs)

    def _pwrite(self, descriptor: int, body: Any, offset: int) -> int:
        written: int = self._real["pwrite"](descriptor, body, offset)
        inode = self._inode(os.fstat(descriptor))
        self._dropped.get(inode, set()).difference_update(range(offset, offset + written))
        return written

    def _ftruncate(self, descriptor: int, length: int) -> None:
        if not self.truncates:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._real["ftruncate"](descriptor, length)
