"""A thread as one version of its manifest tells it.

Rules of this module:

- Pure: no requests. A `View` answers from the header and the frames alone, and says when that is not enough.
- The records of the frames are indexed once, in a `Tail` that grows as frames are appended and that the views of one
  header share; a view sees the records up to its own commit number only. So a reader's view never changes under it.
- Where the values of a checkpoint are (its *table*) is settled when its record is indexed: from the blobs in the
  tail, from what the record itself says, or from its parent. All processes settle it alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from lsm.errors import CorruptionError
from lsm.format.bloom import has
from lsm.format.manifest import CommitId, Frame, Frames, Header, raws_of, unpack_frames, unpack_header
from lsm.format.patch import MAX_PIECES
from lsm.format.records import HIDDEN, Blob, Checkpoint, Pieces, Place, Record, Version, Writes, version_key
from lsm.format.segment import SegmentInfo, above, blob_term, namespace_term
from lsm.steps import Tag

BlobKey = tuple[str, str, str]
CheckpointKey = tuple[str, str]
R = TypeVar("R", Checkpoint, Blob)


@dataclass(slots=True)
class Tail:
    """The records of a header and of the frames after it, by key.

    It is only ever added to, but while others read it: a table is copied before it is iterated over. `ends` says where
    each frame ends, in bytes from the start of the first, `chains` what the frame after each goes on from.
    """

    seq: int
    frames: list[tuple[CommitId, bytes]] = field(default_factory=list)
    segments: dict[int, SegmentInfo] = field(default_factory=dict)
    numbers: dict[int, SegmentInfo] = field(default_factory=dict)
    checkpoints: dict[str, dict[str, list[Checkpoint]]] = field(default_factory=dict)
    writes: dict[CheckpointKey, list[Writes]] = field(default_factory=dict)
    blobs: dict[BlobKey, list[Blob]] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    peaks: dict[tuple[str, str], Version] = field(default_factory=dict)
    carried_heads: dict[str, str] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    overriding: tuple[SegmentInfo, ...] = ()
    changed: int = 0
    ends: list[int] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)

    def carry(self, header: Header) -> None:
        """Index what a header carries."""
        self.numbers.update((info.number, info) for info in header.segments)
        for record in header.carried:
            self._apply(record)
        for namespace, channel, version in header.peaks:
            self._raise_peak((namespace, channel), version)
        self.carried_heads.update(header.heads)
        self.partial = frozenset(header.partial)
        self.changed = max(self.changed, header.changed)
        self.overriding = tuple(info for info in header.segments if info.overrides)

    def append(self, frame: Frame, raw: bytes) -> None:
        """Index one more frame."""
        if frame.segment is not None:
            self.segments[frame.segment.number] = self.numbers[frame.segment.number] = frame.segment
        for record in frame.records:
            self._apply(record)
        self.ends.append((self.ends[-1] if self.ends else 0) + len(raw))
        self.chains.append(frame.chain)
        self.frames.append((frame.commit, raw))
        self.seq = frame.seq

    def _apply(self, record: Record) -> None:
        if isinstance(record, Blob):
            self._apply_blob(record)
            return
        self.changed = max(self.changed, record.time)
        if isinstance(record, Writes):
            self.writes.setdefault((record.namespace, record.id), []).append(record)
        else:
            record.table = self._table(record)
            by_id = self.checkpoints.setdefault(record.namespace, {})
            by_id.setdefault(record.id, []).append(record)
            if not record.flags & HIDDEN and record.id > self.heads.get(record.namespace, ""):
                self.heads[record.namespace] = record.id
            for channel, version in record.versions.items():
                self._raise_peak((record.namespace, channel), version)

    def _apply_blob(self, blob: Blob) -> None:
        if blob.extends is not None and (blob.base is None or not self.alive(blob.base)):
            base = self.pieces((blob.namespace, blob.channel, version_key(blob.extends)))
            if not base and blob.base is None:
                raise CorruptionError(
                    f"commit {blob.seq} patches channel {blob.channel!r} of namespace {blob.namespace!r} at version "
                    f"{blob.extends!r}, which the manifest does not know"
                )
            blob.base = base or blob.base
        if len(blob.base or ()) + len(blob.own) > MAX_PIECES:
            raise CorruptionError(f"commit {blob.seq} makes a chain of more than {MAX_PIECES} pieces")
        self.blobs.setdefault((blob.namespace, blob.channel, version_key(blob.version)), []).append(blob)
        self._raise_peak((blob.namespace, blob.channel), blob.version)

    def alive(self, pieces: Pieces) -> bool:
        """Whether all the segments that pieces lie in are still there."""
        return not [piece for piece in pieces if isinstance(piece, Place) and piece.segment not in self.numbers]

    def pieces(self, key: BlobKey) -> Pieces | None:
        """The pieces of the newest blob of a key in the tail."""
        found = self.blobs.get(key)
        return found[-1].pieces if found else None

    def _raise_peak(self, channel: tuple[str, str], version: Version) -> None:
        peak = self.peaks.get(channel)
        if peak is None or (version != peak and is_later(version, peak)):
            self.peaks[channel] = version

    def _table(self, checkpoint: Checkpoint) -> dict[str, Pieces]:
        namespace, said = checkpoint.namespace, checkpoint.table
        parents = self.checkpoints.get(namespace, {}).get(checkpoint.parent or "")
        parent = parents[-1] if parents else None
        table = {}
        for channel, version in checkpoint.versions.items():
            pieces = self.pieces((namespace, channel, version_key(version)))
            if pieces is None:
                pieces = said.get(channel)
                if pieces is not None and not self.alive(pieces):  # a rewrite has moved them since
                    pieces = None
            if pieces is None and parent is not None and parent.versions.get(channel) == version:
                pieces = parent.table.get(channel)
            if pieces is not None:
                table[channel] = pieces
        return table


def is_later(version: Version, than: Version) -> bool:
    """Whether a version is of the same kind as another and higher: then it has never been used before `than` was
    the highest."""
    if isinstance(version, str) or isinstance(than, str):
        return isinstance(version, str) and isinstance(than, str) and version > than
    return version > than


@dataclass(frozen=True, slots=True)
class View:
    """One version of a thread's manifest.

    Attributes:
        key: The manifest's key.
        header: Its header.
        header_bytes: The same, as stored.
        tail: The records at hand.
        seq: The number of the last commit that it sees.
        count: How many frames it sees.
        tag: The manifest's tag.
        loose: Whether the stored manifest ends in an append that nobody confirmed: the next write replaces it whole.
        dropped: How many bytes at its end are no part of the view, for that append is torn.
    """

    key: str
    header: Header
    header_bytes: bytes
    tail: Tail
    seq: int
    count: int
    tag: Tag
    loose: bool = False
    dropped: int = 0

    @property
    def size(self) -> int:
        """The length of the manifest up to this view, in bytes."""
        return len(self.header_bytes) + self.tail_size

    def parts(self) -> tuple[bytes, ...]:
        """The manifest up to this view, in parts."""
        return self.header_bytes, *(raw for _, raw in self.tail.frames[: self.count])

    @property
    def tail_size(self) -> int:
        """The length of the frames up to this view, in bytes."""
        return self.tail.ends[self.count - 1] if self.count else 0

    @property
    def changed(self) -> int:
        """The time of the newest record, in milliseconds since the epoch."""
        return self.tail.changed

    @property
    def incarnation(self) -> bytes:
        """Which life of the thread this is."""
        return self.header.incarnation

    def extended(self, frames: Iterable[tuple[Frame, bytes]], tag: Tag, loose: bool = False, dropped: int = 0) -> View:
        """The view after more frames. The frames that the tail has already are only counted."""
        seq, count = self.seq, self.count
        for frame, raw in frames:
            if frame.seq > self.tail.seq:
                self.tail.append(frame, raw)
            seq, count = frame.seq, count + 1
        return View(self.key, self.header, self.header_bytes, self.tail, seq, count, tag, loose, dropped)

    @property
    def chain(self) -> int:
        """What the checksum of the next frame goes on from."""
        return self.tail.chains[self.count - 1] if self.count else self.header.chain

    def commit_of(self, seq: int) -> CommitId:
        """The id of the commit that a frame holds."""
        return self.tail.frames[seq - self.header.seq - 1][0]

    def follows(self, other: View) -> bool:
        """Whether this view is a later one of the same history. Of a thread that was put back to an earlier state (a
        backup was restored) the views before and after are of different ones."""
        if other.incarnation != self.incarnation or other.seq > self.seq:
            return False
        if other.count:
            return self.committed(other.commit_of(other.seq))
        return not other.header.commits or self.committed(other.header.commits[-1])

    def committed(self, commit: CommitId) -> bool:
        """Whether a commit is in this view: in its frames, or among those that the header remembers."""
        if any(each == commit for each, _ in self.tail.frames[: self.count]):
            return True
        return any(writer == commit[0] and count >= commit[1] for writer, count in self.header.commits)

    @property
    def next_number(self) -> int:
        """The number that the next segment of the thread gets."""
        return max(self.header.next_number, 1 + max(list(self.tail.segments), default=0))

    # Segments.

    def segments(self) -> list[SegmentInfo]:
        """The directory, oldest first."""
        added = [info for info in list(self.tail.segments.values()) if info.base <= self.seq]
        return [*self.header.segments, *added]

    def segment(self, number: int) -> SegmentInfo | None:
        """A segment by its number, or `None` where it has been replaced."""
        return self.tail.numbers.get(number)

    def alive(self, pieces: Pieces) -> bool:
        """Whether all the segments that pieces lie in are still there."""
        return self.tail.alive(pieces)

    def may_hold(self, info: SegmentInfo, namespace: str) -> bool:
        """Whether a segment may have checkpoints or writes of a namespace."""
        return bool(info.checkpoint_index.covering((namespace,), above(namespace))) and has(
            info.terms, namespace_term(namespace)
        )

    def holders(self, namespace: str) -> list[SegmentInfo]:
        """The segments that may have checkpoints or writes of a namespace."""
        return [info for info in self.segments() if self.may_hold(info, namespace)]

    # Records at hand.

    def newest(self, records: Sequence[R] | None) -> R | None:
        """The newest of the records of one key that this view sees."""
        for record in reversed(records or ()):
            if record.seq <= self.seq:
                return record
        return None

    def checkpoint(self, namespace: str, id_: str) -> Checkpoint | None:
        """A checkpoint, if it is at hand."""
        return self.newest(self.tail.checkpoints.get(namespace, {}).get(id_))

    def checkpoints(self, namespace: str | None = None) -> Iterator[Checkpoint]:
        """All checkpoints at hand, in no order."""
        spaces = [namespace] if namespace is not None else list(self.tail.checkpoints)
        for space in spaces:
            for records in list(self.tail.checkpoints.get(space, {}).values()):
                record = self.newest(records)
                if record is not None:
                    yield record

    def writes(self, namespace: str, id_: str) -> list[Writes]:
        """The writes of a checkpoint that are at hand, in order of commit."""
        return [each for each in self.tail.writes.get((namespace, id_), ()) if each.seq <= self.seq]

    def blob(self, key: BlobKey) -> Blob | None:
        """The newest blob of a key, if it is at hand."""
        return self.newest(self.tail.blobs.get(key))

    def has(self, checkpoint: Checkpoint) -> bool:
        """Whether this very record is at hand."""
        return self.checkpoint(checkpoint.namespace, checkpoint.id) is checkpoint

    def pieces(self, checkpoint: Checkpoint, channel: str) -> Pieces | None:
        """Where the value of a checkpoint's channel is, or `None` where it must be looked up by its key."""
        pieces, doubts = self.hint(checkpoint, channel)
        return None if doubts else pieces

    def hint(self, checkpoint: Checkpoint, channel: str) -> tuple[Pieces | None, list[SegmentInfo]]:
        """Where the value of a checkpoint's channel is as far as is known, and what may prove that wrong.

        Returns:
            The pieces, or `None`. The segments that have every blob of that key which is newer than the checkpoint:
            if none of them has one, the pieces are right. Without segments they are right in any case.
        """
        key = checkpoint.namespace, channel, version_key(checkpoint.versions[channel])
        blob = self.blob(key)
        doubts: list[SegmentInfo] = []
        if blob is not None:
            pieces = blob.pieces
        else:
            doubts = self.doubts(key, checkpoint.seq)
            # A segment that has the checkpoint itself tells of the blobs in it by the checkpoint's table.
            own = checkpoint.value.segment if isinstance(checkpoint.value, Place) else None
            if all(info.number == own for info in doubts):
                doubts = []
            pieces = checkpoint.table.get(channel)
        return (pieces if pieces is not None and self.alive(pieces) else None), doubts

    def doubts(self, key: BlobKey, since: float = -inf) -> list[SegmentInfo]:
        """The segments that may have a blob, newer than a commit, that took the place of another of its key."""
        newer = [info for info in self.tail.overriding if info.top > since]
        term = blob_term(*key) if newer else b""
        return [info for info in newer if has(info.shared, term)]

    def head_at_hand(self, namespace: str) -> Checkpoint | None:
        """The highest checkpoint of a namespace among those at hand."""
        id_ = self.tail.heads.get(namespace)
        if id_ is None:
            return None
        found = self.checkpoint(namespace, id_)
        if found is not None and not found.flags & HIDDEN:
            return found
        visible = [each for each in self.checkpoints(namespace) if not each.flags & HIDDEN]
        return max(visible, key=lambda each: each.id, default=None)

    def knows_head(self, namespace: str) -> bool:
        """Whether the namespace's highest checkpoint is at hand: it is carried, or no segment has any."""
        return namespace in self.tail.carried_heads or not self.holders(namespace)

    def is_complete(self, namespace: str, id_: str) -> bool:
        """Whether all that is stored of a checkpoint is at hand, its writes included."""
        head = self.tail.carried_heads.get(namespace)
        if head is not None and id_ == head and namespace not in self.tail.partial:
            return True
        if head is not None and id_ > head and not self.header.stray:
            return True
        return not self.holders(namespace)

    def is_fresh(self, namespace: str, channel: str, version: Version) -> bool:
        """Whether a version is proved never to have been stored before."""
        peak = self.tail.peaks.get((namespace, channel))
        if peak is not None and not is_later(version, peak):
            return False
        return self.knows_head(namespace)


def open_view(key: str, body: bytes, tag: Tag, thread_id: str | None, appends: bool) -> View:
    """A view from the bytes of a manifest.

    Args:
        key: The manifest's key.
        body: Its bytes.
        tag: Its tag.
        thread_id: The thread that it must belong to, if the caller knows.
        appends: Whether the store appends, so that the end may be an append that nobody confirmed.

    Raises:
        CorruptionError: If it is damaged, or another thread's.
        FormatVersionError: If a newer version wrote it.
    """
    view = header_view(key, body, tag, thread_id, appends)
    found = frames_after(view, body, len(view.header_bytes), appends)
    return with_frames(view, found, body, len(view.header_bytes), tag)


def header_view(key: str, body: bytes, tag: Tag, thread_id: str | None, appends: bool) -> View:
    """The view of the header alone. Takes and raises what `open_view` does."""
    header, end = unpack_header(body, key)
    if thread_id is not None and header.thread_id != thread_id:
        raise CorruptionError(
            f"{key}: this is the manifest of thread {header.thread_id!r}, not of {thread_id!r}: an object was moved"
        )
    if len(body) < end and not appends:
        raise CorruptionError(f"{key}: the manifest ends within its header; restore it from a backup")
    return assemble(key, header, (body + header.incarnation[len(body) - end :])[:end], (), tag)


def frames_after(view: View, body: bytes, start: int, appends: bool) -> Frames:
    """The frames that follow a view, from a position in some bytes on. Raises what `open_view` does."""
    return unpack_frames(body, start, view.seq, view.incarnation, view.chain, appends, view.key)


def with_frames(view: View, found: Frames, body: bytes, start: int, tag: Tag) -> View:
    """The view with the frames that follow it."""
    loose = not found.marked or len(body) < start
    dropped = 0 if loose and found.open else max(0, len(body) - found.end)
    return view.extended(pairs_of(found, body, start, view.incarnation), tag, loose, dropped)


def pairs_of(found: Frames, body: bytes, start: int, incarnation: bytes) -> Iterable[tuple[Frame, bytes]]:
    """Frames, each with its bytes, which begin at a position."""
    return zip(found.frames, raws_of(body, start, found.frames, incarnation), strict=True)


def assemble(key: str, header: Header, header_bytes: bytes, frames: Iterable[tuple[Frame, bytes]], tag: Tag) -> View:
    """A view from its parts."""
    tail = Tail(header.seq)
    try:
        tail.carry(header)
        view = View(key, header, header_bytes, tail, header.seq, 0, tag)
        return view.extended(frames, tag)
    except CorruptionError as error:
        raise CorruptionError(f"{key}: {error}") from error
