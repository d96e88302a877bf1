"""What storage does with one request: objects in a dict, with the semantics of an object store or of files.

Rules of this module:

- It answers as the real storages do (`lsm.storage`), at once and without failing by itself; delays and failures are the
  world's.
- An object store's tags never come twice. A file's tag is (generation, length, changed): an append keeps the
  generation, as it keeps the inode, and so does a backup that is restored in place.
- A file has a part that the disk has for sure, and beyond it what was appended and is not synced yet. What a failed
  sync dropped, the disk never gets, however often the file is synced after that.
- A folder entry (which file lies under a key, if any) is apart from data: it is changed first, and the disk knows it
  once the folder is synced. A power cut may take it back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
    Enclosing,
    Ensure,
    Entry,
    FinishUpload,
    Found,
    Get,
    GetRanges,
    List,
    OpenUpload,
    Page,
    PutIf,
    Settled,
    Settlement,
    Tag,
    UploadPart,
)

PAGE = 5
"""Entries on one page of a listing: few, so that listings have several pages."""


@dataclass(slots=True)
class Stored:
    """One object. Of `body`, the first `synced` bytes survive a power cut, but for the `dropped` ranges."""

    body: bytes
    generation: int
    modified: float
    synced: int
    dropped: list[tuple[int, int]] = field(default_factory=list)
    changed: int = 0

    @property
    def tag(self) -> Tag:
        return self.generation, len(self.body), self.changed


@dataclass(slots=True)
class Upload:
    """An upload under way."""

    key: str
    parts: list[bytes] = field(default_factory=list)


FOREIGN = {
    "lsm.json.bak": b"{}",
    "notes.txt": b"somebody's",
    "probe/notes.txt": b"somebody's",
    "tmp/report.csv": b"1,2,3",
    "segments/notes.txt": b"somebody's",
    "segments/ca/a/readme.md": b"somebody's",
    "segments/manifests/ca/a": b"another store's",
}
"""What lies under the root and is not the store's."""


class Store:
    """All objects under one root, among others.

    Args:
        appends: Whether it behaves as files do.
        now: The clock that objects are stamped with.
    """

    def __init__(self, appends: bool, now: Callable[[], float]):
        self.appends = appends
        self.objects: dict[str, Stored] = {}
        self._entries: dict[str, Stored | None] = {}  # what the disk has under keys whose entry is not synced
        self._now = now
        self._generations = 0
        for key, body in FOREIGN.items():
            self.objects[key] = Stored(body, 0, 0.0, len(body))

    def apply(self, request: Any) -> Any:
        """The answer to a storage request; what it changes is changed."""
        return _ANSWERS[type(request)](self, request)

    # Writes of files, which are not one moment: they can be seen first, and are synced then.

    def confirm(self, request: Any) -> Tag | None:
        """A write was synced: an append's data, which then gets its mark; or the entry of a whole file. Answers the tag
        after it."""
        key = request.handle.key if isinstance(request, FinishUpload) else request.key
        found = self.objects.get(key)
        if isinstance(request, Append) and found is not None:
            found.synced = len(found.body)
            found.body += _mark_of(request)
        self._entries.pop(key, None)
        return found.tag if found is not None else None

    def fail(self, request: Any, length: int, random: Random) -> None:
        """A write's sync failed. An append is cut off, with the mark before it; if that fails, too, it stays."""
        found = self.objects.get(getattr(request, "key", ""))
        if not isinstance(request, Append) or found is None:
            return
        if random.random() < 0.7:
            self._cut(found, length - request.mark)
        else:
            found.dropped.append((length, len(found.body)))

    def take_back(self, request: Append, length: int) -> None:
        """Whoever appended was interrupted: the file is cut off where it was. Whether it was synced is not known, so
        that the mark before goes, too."""
        found = self.objects.get(request.key)
        if found is not None and len(found.body) > length:
            self._cut(found, length - request.mark)

    def _cut(self, found: Stored, length: int) -> None:
        self._generations += 1
        found.body, found.generation = found.body[:length], self._generations
        found.synced = min(found.synced, length)
        found.dropped = [(low, min(high, length)) for low, high in found.dropped if low < length]

    def tear(self, request: Append, random: Random) -> bool:
        """A process dies while it appends: a part of the bytes is there."""
        found = self.objects.get(request.key)
        if found is None or found.tag != request.tag:
            return False
        body = request.new[: len(request.new) - request.mark]
        found.body += body[: random.randrange(len(body) + 1)]
        found.modified = self._now()
        return True

    def cut_power(self, random: Random) -> list[str]:
        """What was not synced is lost, or in part: entries, and of data any blocks. Answers the keys it touched."""
        hurt = []
        entries, self._entries = self._entries, {}
        for key, before in sorted(entries.items(), key=lambda entry: entry[0]):
            if random.random() < 0.5:
                hurt.append(key)
                if before is None:
                    self.objects.pop(key, None)
                else:
                    self.objects[key] = before
        for key, found in sorted(self.objects.items()):
            if len(found.body) > found.synced or found.dropped:
                found.body = _torn(found, random)
                found.synced, found.dropped = len(found.body), []
                hurt.append(key)
        return hurt

    # Backups.

    def backup(self) -> dict[str, Stored]:
        """All objects as they are, while nothing moves."""
        return {key: replace(found) for key, found in self.objects.items()}

    def restore(self, backup: dict[str, Stored]) -> None:
        """Put everything back to what it was: in place, where a file is still the same one."""
        self._entries.clear()
        for key in [*self.objects]:
            if key not in backup:
                del self.objects[key]
        for key, kept in backup.items():
            if self.appends:
                self._generations += 1
                self.objects[key] = replace(kept, synced=len(kept.body), dropped=[], changed=self._generations)
            else:
                self._store(key, kept.body)

    # The answers.

    def _get(self, request: Get) -> Any:
        found = self.objects.get(request.key)
        if found is None:
            return None
        if found.tag == request.unless:
            return "unchanged"
        if self.appends and request.start and _grew(request, found):
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
        if request.tag is None and request.key in self.objects:
            self._entries.pop(request.key, None)  # whoever is told that it exists may build on it
        self._expect(request.key, request.tag)
        return self._store(request.key, request.body)

    def _append(self, request: Append) -> Tag:
        found = self._expect(request.key, request.tag)
        if not self.appends:
            return self._store(request.key, b"".join([*request.old, request.new]))
        assert found is not None
        self._entries.pop(request.key, None)  # whoever appends has its place synced before
        found.body += request.new[: len(request.new) - request.mark]
        found.modified = self._now()
        return found.tag

    def _delete(self, request: Delete) -> None:
        for key in request.keys:
            self.objects.pop(key, None)
            self._entries.pop(key, None)

    def _delete_if(self, request: DeleteIf) -> None:
        assert self.appends, "object stores do not delete on a condition"
        self._expect(request.key, request.tag)
        self._change_entry(request.key)
        del self.objects[request.key]

    def _ensure(self, request: Ensure) -> None:
        self._expect(request.key, request.tag)
        self._entries.pop(request.key, None)

    def _settled(self, request: Settled) -> Settlement:
        found = self.objects.get(request.key)
        return "settled" if found is not None and found.tag == request.tag else "changed"

    def _list(self, request: List) -> Page:
        keys = sorted(key for key in self.objects if key.startswith(request.prefix) and key > (request.after or ""))
        entries = [
            Entry(key, len(found.body), found.tag, found.modified)
            for key in keys[:PAGE]
            for found in (self.objects[key],)
        ]
        return Page(entries, len(keys) > PAGE)

    def _enclosing(self, request: Enclosing) -> None:
        """There is nothing above."""

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

    def _change_entry(self, key: str) -> None:
        if self.appends:
            self._entries.setdefault(key, self.objects.get(key))

    def _store(self, key: str, body: bytes) -> Tag:
        self._change_entry(key)
        self._generations += 1
        stored = self.objects[key] = Stored(bytes(body), self._generations, self._now(), len(body))
        return stored.tag


BLOCK = 64
"""What a disk writes at once, in bytes: little, so that short appends are torn into several."""


def _grew(request: Get, found: Stored) -> bool:
    """Whether a file seems to have been appended to since it was read."""
    known: Any = request.unless
    return known is not None and known[:2] == (found.generation, request.start) and len(found.body) > request.start


def _mark_of(request: Append) -> bytes:
    return request.new[len(request.new) - request.mark :]


def _torn(found: Stored, random: Random) -> bytes:
    """A file after a power cut: of the blocks that were not synced any may be missing, and its end."""
    body = bytearray(found.body)
    lost = [(start, min(start + BLOCK, len(body))) for start in range(found.synced, len(body), BLOCK)]
    missing = random.choice((0.0, 0.0, 0.3, 1.0))
    for low, high in [*(each for each in lost if random.random() < missing), *found.dropped]:
        body[low:high] = bytes(high - low)
    end = len(body) if random.random() < 0.5 else found.synced + random.randrange(len(body) - found.synced + 1)
    return bytes(body[:end])


_ANSWERS: dict[type, Callable[[Store, Any], Any]] = {
    Get: Store._get,
    GetRanges: Store._get_ranges,
    Create: Store._create,
    PutIf: Store._put_if,
    Append: Store._append,
    Delete: Store._delete,
    DeleteIf: Store._delete_if,
    Ensure: Store._ensure,
    Settled: Store._settled,
    List: Store._list,
    Enclosing: Store._enclosing,
    OpenUpload: Store._open_upload,
    UploadPart: Store._upload_part,
    FinishUpload: Store._finish_upload,
    AbortUpload: Store._abort_upload,
}
