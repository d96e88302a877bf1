"""Objects in the memory of this process: for tests, notebooks and short-lived threads.

Rules of this module:

- It behaves as an object store does: conditional writes, whole objects, no appends in place.
- One lock, held for a few steps of plain Python and across `os.fork()`, so that a child finds the objects as they
  were and a lock that is free. From then on the two processes have nothing in common.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lsm.errors import Conflict, NotFound
from lsm.steps import (
    AbortUpload,
    Append,
    Create,
    Delete,
    DeleteIf,
    Enclosing,
    Entry,
    FinishUpload,
    Found,
    Get,
    GetRanges,
    List,
    OpenUpload,
    Page,
    PutIf,
    Tag,
    Unchanged,
    UploadPart,
    check_size,
)

PAGE = 1000
"""Entries on one page of a listing."""

_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


@dataclass(frozen=True, slots=True)
class _Object:
    body: bytes
    tag: int
    modified: float


@dataclass(slots=True)
class _Upload:
    key: str
    parts: list[bytes] = field(default_factory=list)


class MemoryStorage:
    """A dict with conditional writes. Without a name it is private; `MemoryStorage.named` gives all who ask for the
    same name the same one, until the process ends."""

    local = True
    appends = False
    conditional_deletes = True

    _shared: ClassVar[dict[str, MemoryStorage]] = {}

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self._name = name
        self._objects: dict[str, _Object] = {}
        self._tags = itertools.count(1)

    @classmethod
    def named(cls, name: str) -> MemoryStorage:
        """The storage of that name in this process."""
        with _lock:
            return cls._shared.setdefault(name, cls(name))

    def __reduce__(self) -> tuple[Callable[[str, int], MemoryStorage], tuple[str, int]]:
        if not self._name:
            raise TypeError("a private memory:// store cannot be pickled; memory://name can, within one process")
        return _attach, (self._name, os.getpid())

    def execute(self, request: Any) -> Any:
        with _lock:
            return _ANSWERS[type(request)](self, request)

    async def aexecute(self, request: Any) -> Any:
        return self.execute(request)

    def close(self) -> None:
        """Nothing to let go of: the objects stay for the next one who opens the name."""

    def _get(self, request: Get) -> Found | Unchanged | None:
        found = self._objects.get(request.key)
        if found is None:
            return None
        if found.tag == request.unless:
            return "unchanged"
        check_size(request, len(found.body))
        return Found(found.body, found.tag)

    def _get_ranges(self, request: GetRanges) -> list[bytes]:
        found = self._objects.get(request.key)
        if found is None:
            raise NotFound(f"{self.url}: there is no object {request.key}", request.key)
        return [found.body[start:end] for start, end in request.ranges]

    def _create(self, request: Create) -> Tag:
        return self._put_if(PutIf(request.key, request.body, None))

    def _put_if(self, request: PutIf) -> Tag:
        self._expect(request.key, request.tag)
        return self._store(request.key, request.body)

    def _append(self, request: Append) -> Tag:
        self._expect(request.key, request.tag)
        return self._store(request.key, b"".join([*request.old, request.new]))

    def _delete(self, request: Delete) -> None:
        for key in request.keys:
            self._objects.pop(key, None)

    def _delete_if(self, request: DeleteIf) -> None:
        self._expect(request.key, request.tag)
        del self._objects[request.key]

    def _list(self, request: List) -> Page:
        after = request.after or ""
        keys = sorted(key for key in self._objects if key.startswith(request.prefix) and key > after)
        page = [(key, self._objects[key]) for key in keys[:PAGE]]
        entries = [Entry(key, len(found.body), found.tag, found.modified) for key, found in page]
        return Page(entries, len(keys) > PAGE)

    def _enclosing(self, request: Enclosing) -> None:
        """Names of stores in memory have nothing to do with each other."""

    def _open_upload(self, request: OpenUpload) -> _Upload:
        return _Upload(request.key)

    def _upload_part(self, request: UploadPart) -> None:
        request.handle.parts.append(bytes(request.body))

    def _finish_upload(self, request: FinishUpload) -> None:
        self._store(request.handle.key, b"".join(request.handle.parts))

    def _abort_upload(self, request: AbortUpload) -> None:
        request.handle.parts.clear()

    def _expect(self, key: str, tag: Tag | None) -> None:
        found = self._objects.get(key)
        if (found.tag if found else None) != tag:
            raise Conflict(f"{self.url}: {key} is not in the state that the write expects", key)

    def _store(self, key: str, body: bytes) -> Tag:
        stored = _Object(bytes(body), next(self._tags), time.time())
        self._objects[key] = stored
        return stored.tag


_ANSWERS: dict[type, Callable[[MemoryStorage, Any], Any]] = {
    Get: MemoryStorage._get,
    GetRanges: MemoryStorage._get_ranges,
    Create: MemoryStorage._create,
    PutIf: MemoryStorage._put_if,
    Append: MemoryStorage._append,
    Delete: MemoryStorage._delete,
    DeleteIf: MemoryStorage._delete_if,
    List: MemoryStorage._list,
    Enclosing: MemoryStorage._enclosing,
    OpenUpload: MemoryStorage._open_upload,
    UploadPart: MemoryStorage._upload_part,
    FinishUpload: MemoryStorage._finish_upload,
    AbortUpload: MemoryStorage._abort_upload,
}


def _attach(name: str, process: int) -> MemoryStorage:
    if process != os.getpid():
        raise TypeError(f"memory://{name} lives in the process that made it and cannot be sent to another one")
    return MemoryStorage.named(name)
