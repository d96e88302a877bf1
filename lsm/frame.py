"""What a commit says: the changes that callers ask for, and the frame that tells of them.

Rules of this module:

- A frame is made from the view that it will follow: which of its blobs are patches, and on what, depends on it.
- A new value is compared with the parent's value of the channel, where that is at hand: nothing is read for it.
- Values too large for a frame go into a segment that the frame adds. It is used again where the same changes are tried
  again.
- What a task wrote and what a channel gains of it are the same bytes: where they are large, the blob *borrows* them.
- Who waits for whom, and what is tried again, is not known here: see `lsm.commit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lsm.format import patch
from lsm.format.manifest import CommitId, Frame, chain_of, pack_frame
from lsm.format.names import make_ulid, segment_key
from lsm.format.records import (
    Blob,
    Checkpoint,
    Pieces,
    Place,
    Range,
    Record,
    Typed,
    Version,
    Writes,
    pack_patch,
    pack_whole,
    version_key,
)
from lsm.format.segment import SegmentInfo, SegmentWriter, Slot
from lsm.process import Known, Process, Thread
from lsm.steps import Now, Steps
from lsm.upload import upload
from lsm.view import BlobKey, View


@dataclass(eq=False, slots=True)
class Put:
    """A checkpoint to store.

    Attributes:
        checkpoint: Its record, with its value inside and an empty table.
        values: The version and the value of every channel that has a new one; `None` for a channel that is empty.
        exclusive: Refuse it unless its parent is the namespace's head.
    """

    checkpoint: Checkpoint
    values: Mapping[str, tuple[Version, Typed | None]]
    exclusive: bool = False

    @property
    def record(self) -> Record:
        """Its main record."""
        return self.checkpoint

    def blob_keys(self) -> list[BlobKey]:
        """The keys of the blobs that it stores."""
        namespace = self.checkpoint.namespace
        return [(namespace, channel, version_key(version)) for channel, (version, _) in self.values.items()]

    @property
    def size(self) -> int:
        """About how many bytes it adds, before patches."""
        return len(self.checkpoint.value) + sum(len(value[1]) for _, value in self.values.values() if value)


@dataclass(eq=False, slots=True)
class PutWrites:
    """Writes to store."""

    writes: Writes

    @property
    def record(self) -> Record:
        """Its record."""
        return self.writes

    @property
    def size(self) -> int:
        """About how many bytes it adds."""
        return len(self.writes.value)


@dataclass(eq=False, slots=True)
class Nothing:
    """No record: only to have the tail flushed."""

    record: None = None
    size: int = 0


Change = Put | PutWrites | Nothing


def stub_size(record: Record) -> int:
    """About how many bytes a record takes beside its value, before compression."""
    if isinstance(record, Checkpoint):
        names = sum(len(channel) + len(str(version)) + 8 for channel, version in record.versions.items())
        return names + len(record.namespace) + len(record.id) + len(record.terms) + 100
    if isinstance(record, Writes):
        names = sum(len(channel) + 8 for _, _, channel in record.runs)
        return names + len(record.namespace) + len(record.id) + len(record.task_id) + len(record.task_path) + 50
    return len(record.namespace) + len(record.channel) + 100


@dataclass(eq=False, slots=True)
class ValueSegment:
    """A segment of large values."""

    info: SegmentInfo
    body: bytes
    values: list[bytes]
    slots: list[Slot]
    incarnation: bytes
    fence: int

    def serves(self, bodies: list[bytes], view: View) -> bool:
        """Whether it can be used again. Whoever deletes a thread deletes what was uploaded for that incarnation, and a
        collector that may take what nobody has named yet raises the fence first."""
        return self.values == bodies and (self.incarnation, self.fence) == (view.incarnation, view.header.fence)


@dataclass(frozen=True, slots=True)
class Made:
    """A frame.

    Attributes:
        frame: The frame, or `None` where there is nothing to say.
        raw: Its bytes.
        values: What is known of the values of its blobs, by their keys.
        segment: The segment of its large values, stored, if it has one.
    """

    frame: Frame | None = None
    raw: bytes = b""
    values: Mapping[BlobKey, Known] = field(default_factory=dict)
    segment: ValueSegment | None = None


def make_frame(
    process: Process,
    thread: Thread,
    view: View,
    changes: Sequence[Change],
    id_: CommitId,
    segment: ValueSegment | None,
    patient: bool,
) -> Steps[Made]:
    """Make a frame, and store its large values.

    Args:
        process: The process.
        thread: The thread.
        view: What the frame will follow.
        changes: What it tells of.
        id_: The commit's id.
        segment: The segment that an earlier attempt stored, if there is one.
        patient: Whether to try again where the store is busy.

    Raises:
        StorageError: If large values could not be stored.
    """
    draft = _Draft(process, view, changes)
    for change in changes:
        draft.add(change)
    if not draft.records:
        return Made()
    records, seq = draft.records, view.seq + 1
    large = _too_large(process, records)
    info = None
    if large:
        bodies = [record.value for record in large if isinstance(record.value, bytes)]
        if segment is None or not segment.serves(bodies, view):
            segment = _value_segment(process, view, large, bodies, (yield Now()))
            yield from upload(segment_key(thread.id, segment.info.ulid), segment.body, patient)
        info = replace(segment.info, number=view.next_number, base=seq, top=seq)
        records = _settled(process, records, large, bodies, segment)
    for record in records:
        record.seq = seq
    raw = pack_frame(id_, seq, records, info, view.incarnation, process.compression, view.chain)
    if info is not None:
        for record in records:
            _number(record, info.number)
    return Made(
        Frame(id_, seq, tuple(records), info, len(raw), chain_of(raw)), raw, draft.values, segment if large else None
    )


def _too_large(process: Process, records: Sequence[Record]) -> list[Record]:
    """The records whose values do not ride in the frame."""
    sizes = [len(record.value) for record in records]
    total = sum(sizes)
    if total <= process.limits.frame and max(sizes) <= process.limits.inline:
        return []
    by_size = sorted(records, key=lambda record: len(record.value), reverse=True)
    large = set()
    for record in by_size:
        if len(record.value) <= process.limits.inline and total <= process.limits.frame:
            break
        total -= len(record.value)
        large.add(id(record))
    return [record for record in records if id(record) in large]


def _value_segment(
    process: Process, view: View, records: Sequence[Record], values: list[bytes], now: float
) -> ValueSegment:
    writer = SegmentWriter(make_ulid(now, view.incarnation, process.entropy(6)), process.compression, values=True)
    slots = [writer.store(type(record), value) for record, value in zip(records, values, strict=True)]
    info = writer.finish()
    return ValueSegment(info, writer.take(), values, slots, view.incarnation, view.header.fence)


def _settled(
    process: Process, records: Sequence[Record], large: Sequence[Record], bodies: Sequence[bytes], segment: ValueSegment
) -> list[Record]:
    """The records, referring to where their large values are. What tasks wrote is kept at hand, to be borrowed."""
    slots = {id(record): slot for record, slot in zip(large, segment.slots, strict=True)}
    for record, body in zip(large, bodies, strict=True):
        if isinstance(record, Writes):
            key = _lent_key(segment.info, slots[id(record)].place)
            process.cache.put(key, body, len(body) + 300)
    for record in records:
        if isinstance(record, Blob):
            record.borrowed = tuple([_placed(part, slots) for part in record.borrowed])
    return [replace(record, value=slots[id(record)].place) if id(record) in slots else record for record in records]


def _number(record: Record, number: int) -> None:
    """Give a record's places in the segment that its frame adds that segment's number."""
    if isinstance(record.value, Place):
        record.value = record.value._replace(segment=number)
    if isinstance(record, Blob):
        record.borrowed = tuple([part._replace(segment=part.segment or number) for part in record.borrowed])


class _Lender(NamedTuple):
    """What a task wrote, and all the bytes of it."""

    writes: Writes
    data: bytes


class _Loan(NamedTuple):
    """A range of bytes that this very commit stores."""

    writes: Writes
    start: int
    length: int


def _placed(part: Place | _Loan, slots: Mapping[int, Slot]) -> Place:
    """Where borrowed bytes lie. `slots` has those of what this commit stores, by the identity of the record."""
    return part if isinstance(part, Place) else slots[id(part.writes)].place.part(part.start, part.length)


def _lent_key(info: SegmentInfo | None, place: Place) -> tuple[Any, ...]:
    """The key, in the cache, of what a task wrote."""
    return "lent", info and info.ulid, place.offset, place.start


class _Draft:
    """The records of a frame.

    Args:
        process: The process.
        view: What the frame will follow.
        changes: All that it will tell of.

    Attributes:
        records: The records, so far.
        values: What is known of the values of blobs.
    """

    def __init__(self, process: Process, view: View, changes: Sequence[Change]):
        self.records: list[Record] = []
        self.values: dict[BlobKey, Known] = {}
        self._process = process
        self._view = view
        self._writes = [change.writes for change in changes if isinstance(change, PutWrites)]
        self._stored = {key for change in changes if isinstance(change, Put) for key in change.blob_keys()}
        self._taken: set[BlobKey] = set()

    def add(self, change: Change) -> None:
        """Add what a change asks for."""
        if isinstance(change, Put):
            self._put(change)
        elif isinstance(change, PutWrites):
            self.records.append(change.writes)

    def _put(self, put: Put) -> None:
        view, checkpoint = self._view, put.checkpoint
        parent = self._find_parent(checkpoint)
        lenders = self._lenders(put)
        for channel, (version, value) in put.values.items():
            key = checkpoint.namespace, channel, version_key(version)
            fresh = key not in self._taken and view.is_fresh(checkpoint.namespace, channel, version)
            self._taken.add(key)
            blob = Blob(checkpoint.namespace, channel, version, b"", fresh=fresh, empty=value is None)
            if value is not None:
                self._give_value(blob, value, parent, lenders)
            self.records.append(blob)
        table: dict[str, Pieces] = {}
        if parent is not None and not view.has(parent):
            for channel, version in checkpoint.versions.items():
                if parent.versions.get(channel) != version:
                    continue
                pieces = view.pieces(parent, channel)
                if pieces is not None and all(isinstance(piece, Place) for piece in pieces):
                    table[channel] = pieces
        checkpoint.table = table
        self.records.append(checkpoint)

    def _find_parent(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """What this process knows of a checkpoint's parent: from the manifest, or because it has read it."""
        if checkpoint.parent is None:
            return None
        found = self._view.checkpoint(checkpoint.namespace, checkpoint.parent)
        return found or self._process.recall(self._view, checkpoint.namespace, checkpoint.parent)

    def _give_value(self, blob: Blob, value: Typed, parent: Checkpoint | None, lenders: Sequence[_Lender]) -> None:
        """Give a blob its value: as a patch on the value before it, where that is at hand and makes it smaller."""
        key = blob.namespace, blob.channel, version_key(blob.version)
        if parent is not None and blob.fresh and len(value[1]) >= patch.SMALLEST:
            known = self._give_patch(blob, value, parent, lenders)
            if known is not None:
                self.values[key] = known
                return
        ranges = self._borrow(blob, value[1], lenders, patch.MAX_PIECES - 1)
        self.values[key] = value, (patch.whole(blob.version, value[1])._replace(borrowed=len(ranges)),)
        blob.value = pack_whole(value, blob.version, ranges)

    def _give_patch(self, blob: Blob, value: Typed, parent: Checkpoint, lenders: Sequence[_Lender]) -> Known | None:
        """Make a blob a patch, if that is possible and worth it; what is then known of its value."""
        view, before = self._view, parent.versions.get(blob.channel)
        if before is None:
            return None
        pieces = view.pieces(parent, blob.channel)
        old: Known | None = self._process.cache.get(self._process.value_key(view, pieces[-1])) if pieces else None
        if not pieces or old is None or old[0][0] != value[0] or patch.count_pieces(old[1]) != len(pieces):
            return None
        made = patch.extend(old[1], blob.version, old[0][1], value[1])
        if made is None:
            return None
        kept = old[1][: made.keep]
        base, extends = pieces[: patch.count_pieces(kept)], kept[-1].version
        named = blob.namespace, blob.channel, version_key(extends)
        at_hand = view.blob(named)
        # A patch names its base by version and commit. That must not find another value, which was stored since under a
        # version further back, or is by this very commit.
        if named in self._stored or (at_hand.pieces != base if at_hand else extends != before and view.doubts(named)):
            return None
        if not at_hand and not all(isinstance(piece, Place) for piece in base):
            return None
        ranges = self._borrow(blob, made.data, lenders, patch.MAX_PIECES - 1 - len(base))
        blob.value, blob.extends = pack_patch(made.link, made.data, ranges), extends
        blob.base = None if at_hand else base
        return value, (*kept, made.link._replace(borrowed=len(ranges)))

    def _lenders(self, put: Put) -> list[_Lender]:
        """The large writes on the parent of a checkpoint with large values, as far as their bytes are at hand."""
        inline, at = self._process.limits.inline, (put.checkpoint.namespace, put.checkpoint.parent)
        if at[1] is None or all(value is None or len(value[1]) <= inline for _, value in put.values.values()):
            return []
        found: list[_Lender] = []
        for writes in self._view.writes(at[0], at[1]):
            if isinstance(writes.value, Place):
                info = self._view.segment(writes.value.segment)
                data: bytes | None = self._process.cache.get(_lent_key(info, writes.value))
                found += [_Lender(writes, data)] if data is not None else []
        for writes in self._writes:
            if (writes.namespace, writes.id) == at and isinstance(writes.value, bytes) and len(writes.value) > inline:
                found.append(_Lender(writes, writes.value))
        return found

    def _borrow(self, blob: Blob, data: bytes, lenders: Sequence[_Lender], most: int) -> list[Range]:
        """Let a blob have what tasks wrote to its channel for its own, where that saves more than a frame would take.

        Returns:
            The ranges of `data` that it borrows, in order; `most` at most.
        """
        least = self._process.limits.inline
        loans: list[tuple[Range, Any]] = []
        gaps = [(0, len(data))]
        for writes, lent in lenders:
            if not any(channel == blob.channel for _, _, channel in writes.runs):
                continue
            for gap in [each for each in gaps if each[1] - each[0] > least]:
                low, high = gap
                start, at, length = patch.overlap(lent, data[low:high])
                if length > least and len(loans) < most:
                    value = writes.value
                    part = value.part(start, length) if isinstance(value, Place) else _Loan(writes, start, length)
                    loans.append(((low + at, length), part))
                    gaps.remove(gap)
                    gaps += [(low, low + at), (low + at + length, high)]
        loans.sort(key=lambda loan: loan[0])
        blob.borrowed = tuple([part for _, part in loans])
        return [taken for taken, _ in loans]


def keep_values(process: Process, view: View, made: Made) -> None:
    """Keep the values that a frame stores at hand: for the next read, and to find what the next version adds.

    Args:
        process: The process.
        view: The view with the frame.
        made: The frame.
    """
    for blob in made.frame.records if made.frame else ():
        if isinstance(blob, Blob) and (pieces := blob.pieces):
            known = made.values[blob.namespace, blob.channel, version_key(blob.version)]
            cost = len(known[0][1]) + 100 * len(known[1]) + 300
            process.cache.put(process.value_key(view, pieces[-1]), known, cost)
