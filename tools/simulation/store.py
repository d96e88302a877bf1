"""What storage does with one request: objects in a dict, with the semantics of an object store or of files.

Rules of this module:

- It answers as the real storages do (`lsm.storage`), at once and without failing by itself; delays and failures are the
  world's.
- An object store's tags never come twice. A file's tag is (generation, length): appending keeps the generation, as it
  keeps the inode.
- A file has a part that the disk has for sure, and beyond it what was appended and is not synced yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from lsm.errors import Conflict, NotFound
from lsm.steps import (
    AbortUpload,
    Append,
    Appended,
    Create,
    Delete,
    DeleteIf,
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
    UploadPart,
)

PAGE = 5
"""Entries on one page of a listing: few, so that listings have several pages."""


@dataclass(slots=True)
class Stored:
    """One object. Of `body`, the first `synced` bytes survive a power cut."""

    body: bytes
    generation: int
    modified: float
    synced: int

    @property
    def tag(self) -> Tag:
        return self.generation, len(self.body)


@dataclass(slots=True)
class Upload:
    """An upload under way."""

    key: str
    parts: list[bytes] = field(default_factory=list)


class Store:
    """All objects under one root.

    Args:
        appends: Whether it behaves as files do.
        now: The clock that objects are stamped with.
    """

    def __init__(self, appends: bool, now: Callable[[], float]):
        self.appends = appends
        self.objects: dict[str, Stored] = {}
        self._now = now
        self._generations = 0

    def apply(self, request: Any) -> Any:
        """The answer to a storage request; what it changes is changed."""
        return _ANSWERS[type(request)](self, request)

    # Appends of files, which are not one moment.

    def tear(self, request: Append, random: Random) -> bool:
        """A process dies while it appends: a part of the bytes is there."""
        found = self.objects.get(request.key)
        if found is None or found.tag != request.tag:
            return False
        found.body += request.new[: random.randrange(len(request.new) + 1)]
        found.modified = self._now()
        return True

    def take_back(self, key: str, length: int) -> None:
        """An append failed: the file is cut off where it was, and gets another birth."""
        found = self.objects.get(key)
        if found is not None and len(found.body) > length:
            self._store(key, found.body[:length])

    def sync(self, key: str) -> None:
        """The disk has the whole file."""
        found = self.objects.get(key)
        if found is not None:
            found.synced = len(found.body)

    def cut_power(self, random: Random) -> list[str]:
        """What was not synced is lost, kept in part, or zeros. Answers the keys of the files that it touched."""
        hurt = []
        for key, found in sorted(self.objects.items()):
            lost = len(found.body) - found.synced
            if lost > 0:
                kept = found.body[: found.synced]
                if random.random() < 0.3:
                    found.body = kept + bytes(random.randrange(lost + 1))
                else:
                    found.body = found.body[: found.synced + random.randrange(lost + 1)]
                found.synced = len(found.body)
                hurt.append(key)
        return hurt

    # The answers.

    def _get(self, request: Get) -> Any:
        found = self.objects.get(request.key)
        if found is None:
            return None
        if found.tag == request.unless:
            return "unchanged"
        grown = request.unless == (found.generation, request.start) and len(found.body) > request.start
        if self.appends and request.start and grown:
            return Appended(found.body[request.start :], found.tag)
        return Found(found.body, found.tag)

    def _get_ranges(self, request: GetRanges) -> list[bytes]:
        found = self.objects.get(request.key)
        if found is None:
            raise NotFound(f"there is no object {request.key}", request.key)
        return [found.body[start:end] for start, end in request.ranges]

    def _create(self, request: Create) -> Tag:
        return self._put_if(PutIf(request.key, request.body, None))

    def _put_if(self, request: PutIf) -> Tag:
        self._expect(request.key, request.tag)
        return self._store(request.key, request.body)

    def _append(self, request: Append) -> Tag:
        found = self._expect(request.key, request.tag)
        if not self.appends:
            return self._store(request.key, b"".join([*request.old, request.new]))
        assert found is not None
        found.body += request.new
        found.modified = self._now()
        return found.tag

    def _delete(self, request: Delete) -> None:
        for key in request.keys:
            self.objects.pop(key, None)

    def _delete_if(self, request: DeleteIf) -> None:
        self._expect(request.key, request.tag)
        del self.objects[request.key]

    def _list(self, request: List) -> Page:
        keys = sorted(key for key in self.objects if key.startswith(request.prefix) and key > (request.after or ""))
        entries = [
            Entry(key, len(found.body), found.tag, found.modified)
            for key in keys[:PAGE]
            for found in (self.objects[key],)
        ]
        return Page(entries, len(keys) > PAGE)

    def _open_upload(self, request: OpenUpload) -> Upload:
        return Upload(request.key)

    def _upload_part(self, request: UploadPart) -> None:
        request.handle.parts.append(bytes(request.body))

    def _finish_upload(self, request: FinishUpload) -> None:
        self._store(request.handle.key, b"".join(request.handle.parts))

    def _abort_upload(self, request: AbortUpload) -> None:
        request.handle.parts.clear()

    def _expect(self, key: str, tag: Tag | None) -> Stored | None:
        found = self.objects.get(key)
        if (found.tag if found else None) != tag:
            raise Conflict(f"{key} is not in the state that the write expects", key)
        return found

    def _store(self, key: str, body: bytes) -> Tag:
        self._generations += 1
        stored = self.objects[key] = Stored(bytes(body), self._generations, self._now(), len(body))
        return stored.tag


_ANSWERS: dict[type, Callable[[Store, Any], Any]] = {
    Get: Store._get,
    GetRanges: Store._get_ranges,
    Create: Store._create,
    PutIf: Store._put_if,
    Append: Store._append,
    Delete: Store._delete,
    DeleteIf: Store._delete_if,
    List: Store._list,
    OpenUpload: Store._open_upload,
    UploadPart: Store._upload_part,
    FinishUpload: Store._finish_upload,
    AbortUpload: Store._abort_upload,
}
