"""How records become durable.

Rules of this module:

- A record is durable once the conditional write that carries it has succeeded; only then is its caller told.
- **Group commit.** Callers of one thread queue. Whoever finds nobody committing leads: it commits what is queued as one
  frame, then hands over to the next in the queue. A caller that is cancelled or interrupted hands over, too.
- A batch keeps its commit id and its members until it is known what became of it: a failed conditional write does not
  tell, for it may have been our own write, answered twice, that made it fail. So before a batch is sent again, the
  manifest is read again and asked for the commit id.
- Values too large for a frame go first, into a segment. A flush is uploaded beside a commit, and lands with the next.
- What a task wrote and what a channel gains of it are the same bytes: where they are large, the blob *borrows* them.
- What is sent is made from the view that it is conditional on. After a conflict it is made anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from lsm.errors import CommitTimeout, ConcurrentRunError, Conflict, LSMError, Throttled, Unavailable
from lsm.find import latest
from lsm.flush import landed, prepare
from lsm.format import patch
from lsm.format.manifest import CommitId, Frame, Header, pack_frame, pack_header
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
from lsm.limits import MANIFEST
from lsm.process import Known, Process, Thread, refresh
from lsm.root import verify_root
from lsm.steps import All, Append, Now, PutIf, Sleep, Steps, Wait, results
from lsm.turn import give_way, in_turn, note_overtaken
from lsm.upload import upload
from lsm.view import BlobKey, View, assemble

logger = logging.getLogger("lsm")

_LEAD, _STORED, _LEFT = object(), object(), object()
_MOST_VALUES = 8 << 20  # in one batch, in bytes
_MOST_STUBS = 48 << 10
_LARGEST_STUB = 64 << 10
_MOST_SEGMENTS = 16  # of large values, in a tail
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 2.0
_LONGEST_TURN = 0.5  # a conflict is another's progress: who waited long because of it would only be overtaken again


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


@dataclass(eq=False, slots=True)
class Entry:
    """A caller in the queue.

    Attributes:
        change: What it wants stored.
        stub: About how many bytes its record takes beside its value.
        waiter: What it waits for, unless it leads: its outcome, or the sign to lead.
        outcome: What became of it, once that is settled; `None` before.
    """

    change: Change
    stub: int
    waiter: Future[Any] | None = None
    outcome: Any = None


@dataclass(eq=False, slots=True)
class Batch:
    """What is committed as one frame.

    Attributes:
        members: Whose records it holds.
        id: Its commit id.
        sent: Whether it may be stored already.
        uploaded: The segment with its large values, once that is stored.
    """

    members: list[Entry]
    id: CommitId
    sent: bool = False
    uploaded: _Values | None = None


@dataclass(eq=False, slots=True)
class _Values:
    """A segment of large values."""

    info: SegmentInfo
    body: bytes
    values: list[bytes]
    slots: list[Slot]
    made: float
    incarnation: bytes

    def serves(self, bodies: list[bytes], view: View, oldest: float) -> bool:
        """Whether it can be used again. Whoever deletes a thread deletes what was uploaded for that incarnation."""
        return self.values == bodies and self.incarnation == view.incarnation and self.made >= oldest


def commit(process: Process, thread: Thread, change: Change) -> Steps[None]:
    """Store a change, together with those that are queued at the time.

    Raises:
        CommitTimeout: If other writers or the store kept it from being stored until the deadline.
        ConcurrentRunError: If it is exclusive and the head is another.
        StorageError: If the store refuses.
        ValueError: If its names alone are too large.
    """
    entry = Entry(change, _stub_size(change.record) if change.record else 0)
    with thread.lock:
        thread.queue.append(entry)
        lead, thread.leading = not thread.leading, True
        process.busy[thread.id] = thread
        if not lead:
            entry.waiter = Future()
    if entry.waiter is not None:
        try:
            lead = (yield Wait(entry.waiter)) is _LEAD
        except LSMError:
            raise
        except BaseException:
            _leave(process, thread, entry, entry.waiter)
            raise
    if lead:
        yield from _lead(process, thread, entry)


def _leave(process: Process, thread: Thread, entry: Entry, waiter: Future[Any]) -> None:
    """A waiting caller was interrupted: take it out of the queue, and do not keep the lead if it was given it."""
    with thread.lock:
        leads = waiter.done() and not waiter.exception() and waiter.result() is _LEAD
        if entry in thread.queue:
            thread.queue.remove(entry)
        entry.outcome = entry.outcome or _LEFT
    if leads:
        _hand_over(process, thread)


def _hand_over(process: Process, thread: Thread) -> None:
    """Let the next caller lead: one of a batch whose fate is open, or the first in the queue."""
    with thread.lock:
        waiting = (*(thread.batch.members if thread.batch else ()), *thread.queue)
        heirs = (entry.waiter for entry in waiting if entry.outcome is None and entry.waiter is not None)
        heir = next((waiter for waiter in heirs if not waiter.done()), None)
        if heir is not None:
            heir.set_result(_LEAD)
        else:
            thread.leading = False
            thread.batch = None
            process.busy.pop(thread.id, None)


def _settle(entry: Entry, outcome: Any) -> None:
    """Tell a caller what became of its change, unless it has been told already."""
    if entry.outcome is not None:
        return
    entry.outcome = outcome
    if entry.waiter is not None and not entry.waiter.done():
        if isinstance(outcome, BaseException):
            entry.waiter.set_exception(outcome)
        else:
            entry.waiter.set_result(outcome)


def _lead(process: Process, thread: Thread, own: Entry) -> Steps[None]:
    """Commit batches until the own entry is in one, then hand over."""
    try:
        while own.outcome is None:
            yield from give_way(process, thread)
            with thread.lock:
                batch = thread.batch = thread.batch or _next_batch(thread)
            try:
                yield from _commit_batch(process, thread, batch)
            except LSMError as error:
                for entry in batch.members:
                    own_error = copy(error)  # each is raised elsewhere
                    own_error.__cause__ = error.__cause__
                    _settle(entry, own_error)
            with thread.lock:
                thread.batch = None
    finally:
        own.outcome = own.outcome or _LEFT
        _hand_over(process, thread)
    if isinstance(own.outcome, BaseException):
        raise own.outcome


def _next_batch(thread: Thread) -> Batch:
    members: list[Entry] = []
    values = stubs = 0
    while thread.queue and (not members or (values < _MOST_VALUES and stubs + thread.queue[0].stub < _MOST_STUBS)):
        entry = thread.queue.popleft()
        members.append(entry)
        values += entry.change.size
        stubs += entry.stub
    thread.commits += 1
    return Batch(members, (thread.writer, thread.commits))


def _commit_batch(process: Process, thread: Thread, batch: Batch) -> Steps[None]:
    now = yield Now()
    elapsed, pause, conflict = 0.0, _FIRST_PAUSE, False
    stale = thread.view is None or batch.sent
    while True:
        try:
            yield from in_turn(process, thread.key, conflict, partial(_attempt, process, thread, batch, stale, now))
            return _succeed(batch)
        except (Conflict, Throttled, Unavailable) as error:
            last_error, stale, conflict = error, True, isinstance(error, Conflict)
        last, now = now, (yield Now())
        took = max(0.0, now - last)  # a clock that is set back does not end the patience
        elapsed += took
        if conflict:
            note_overtaken(thread, now, took)
        if elapsed > process.limits.commit_deadline:
            raise CommitTimeout(
                f"thread {thread.id!r} in {process.url}: a commit to {thread.key} did not succeed within "
                f"{process.limits.commit_deadline:g} s ({last_error}); it may be tried again"
            ) from last_error
        logger.debug("thread %r: commit %s is tried again (%s)", thread.id, batch.id, last_error)
        if not conflict or (pause > _FIRST_PAUSE and not process.appends):
            seconds = pause * (0.5 + int.from_bytes(process.entropy(2), "big") / 65536)
            yield Sleep(seconds)
            now, elapsed = (yield Now()), elapsed + seconds
        pause = min(pause * 2, _LONGEST_TURN if conflict else _LONGEST_PAUSE)


def _attempt(process: Process, thread: Thread, batch: Batch, stale: bool, now: float, lock: Any) -> Steps[None]:
    """Commit a batch on top of the view at hand, or, if that is stale, of the newest, unless it is stored already."""
    view = thread.view
    if stale:
        view = yield from _look(process, thread)
        if view is not None and batch.sent and view.committed(batch.id):
            logger.debug("thread %r: commit %s was stored although its answer was lost", thread.id, batch.id)
            return
    elif not process.root_verified:
        yield from _look(process, thread)
    yield from _send(process, thread, view, batch, now, lock)


def _succeed(batch: Batch) -> None:
    for entry in batch.members:
        _settle(entry, _STORED)


def _look(process: Process, thread: Thread) -> Steps[View | None]:
    """The newest view; the root is verified beside, once per process."""
    if process.root_verified:
        return (yield from refresh(process, thread))
    view, _ = results((yield All([refresh(process, thread), verify_root(process.url)])))
    process.root_verified = True
    return view  # type: ignore[no-any-return]


def _send(process: Process, thread: Thread, view: View | None, batch: Batch, now: float, lock: Any) -> Steps[None]:
    """One attempt to commit a batch on top of a view. `now` is not later than it is."""
    if view is None:
        thread.flush = None
        view = _first_view(process, thread)
        if sum(entry.change.size for entry in batch.members) > process.limits.inline:
            # What is uploaded for a thread needs a manifest that the collector can change: see `lsm.collect`.
            view = replace(view, tag=(yield PutIf(thread.key, view.header_bytes, None)))
    flush = thread.flush
    if flush is not None and (not flush.fits(view) or now - flush.made > process.limits.grace / 2):
        flush = thread.flush = None
    asked = any(isinstance(entry.change, Nothing) for entry in batch.members)
    if flush is not None and asked and flush.view.count < view.count:
        flush = thread.flush = None
    if flush is None and view.count and (asked or view.size + _MOST_STUBS + process.limits.frame > MANIFEST):
        flush = prepare(view, process.compression, now, process.entropy(6))
        yield from upload(segment_key(thread.id, flush.info.ulid), flush.body, lock is None)
    yield from _refuse(process, thread, view, batch)
    members = [entry for entry in batch.members if entry.outcome is None]
    base = view
    if flush is not None:
        wanted = {
            (put.checkpoint.namespace, put.checkpoint.parent)
            for put in (entry.change for entry in members)
            if isinstance(put, Put) and put.checkpoint.parent
        }
        base = landed(flush, view, process.limits, process.compression, wanted)
        process.follow(view, base)
    values: dict[BlobKey, Known] = {}
    frame, raw = yield from _frame(process, thread, base, members, batch, now, values, lock is None)
    if frame is None and flush is None:
        return
    if flush is not None or view.tag is None or view.torn:
        request: Any = PutIf(thread.key, b"".join((*base.parts(), raw)), view.tag, lock)
    else:
        request = Append(thread.key, () if process.appends else base.parts(), raw, view.tag, lock)
    beside = None
    full = view.tail_size + len(raw) > process.limits.tail or len(view.tail.segments) >= _MOST_SEGMENTS
    if flush is None and view.count and full:
        beside = prepare(view, process.compression, now, process.entropy(6))
    made = [part.made for part in (flush, batch.uploaded if frame is not None and frame.segment else None) if part]
    if made and (yield Now()) - min(made) > process.limits.grace / 2:
        raise Unavailable(f"{thread.key}: an upload took so long that the collector may take it for an orphan")
    batch.sent = True
    if beside is None:
        outcomes = [(yield request)]
    else:
        outcomes = yield All([request, upload(segment_key(thread.id, beside.info.ulid), beside.body, lock is None)])
        if isinstance(outcomes[0], BaseException):
            raise outcomes[0]
    with thread.lock:
        after = base.extended([(frame, raw)] if frame else [], outcomes[0])
    thread.flush = None
    if view.torn:
        logger.warning(
            "thread %r: %s ended within a commit, which a crash of its writer explains, and damage, too. What came "
            "after commit %d is cut off; if it was acknowledged, it is lost",
            thread.id,
            thread.key,
            view.seq,
        )
    if flush is not None:
        logger.debug("thread %r: flushed %d records into segment %s", thread.id, flush.info.rows, flush.info.ulid)
    process.adopt(thread, after)
    if beside is not None and not isinstance(outcomes[1], BaseException):
        thread.flush = beside
    if frame is not None:
        _keep_values(process, after, frame, values)
    logger.debug("thread %r: commit %d with %d changes", thread.id, after.seq, len(members))


def _first_view(process: Process, thread: Thread) -> View:
    header = Header(thread.id, process.entropy(8))
    return assemble(thread.key, header, pack_header(header, process.compression), (), None)


# What a frame says.


def _frame(
    process: Process,
    thread: Thread,
    view: View,
    members: Sequence[Entry],
    batch: Batch,
    now: float,
    values: dict[BlobKey, Known],
    patient: bool,
) -> Steps[tuple[Frame | None, bytes]]:
    """The frame for a view, its large values uploaded. What is known of the values is added to `values`."""
    records: list[Record] = []
    taken: set[BlobKey] = set()
    stored = {key for entry in members if isinstance(entry.change, Put) for key in entry.change.blob_keys()}
    for entry in members:
        if isinstance(entry.change, Put):
            lenders = _lenders(process, view, entry.change, members)
            records += _put_records(process, view, entry.change, taken, stored, lenders, values)
        elif isinstance(entry.change, PutWrites):
            records.append(entry.change.writes)
    if not records:
        return None, b""
    seq = view.seq + 1
    large = _too_large(process, records)
    info = None
    if large:
        bodies = [record.value for record in large if isinstance(record.value, bytes)]
        segment = batch.uploaded
        if segment is None or not segment.serves(bodies, view, now - process.limits.grace / 2):
            segment = _value_segment(process, view, large, bodies, now)
            yield from upload(segment_key(thread.id, segment.info.ulid), segment.body, patient)
            batch.uploaded = segment
        info = replace(segment.info, number=view.next_number, base=seq, top=seq)
        slots = dict(zip(map(id, large), segment.slots, strict=True))
        for record in records:
            if isinstance(record, Blob):
                record.borrowed = tuple([_placed(part, slots) for part in record.borrowed])
        for record, body, slot in zip(large, bodies, segment.slots, strict=True):
            if isinstance(record, Writes):
                process.cache.put(_lent_key(info, slot.place), body, len(body) + 300)
        records = [
            replace(record, value=slots[id(record)].place) if id(record) in slots else record for record in records
        ]
    for record in records:
        record.seq = seq
    raw = pack_frame(batch.id, seq, records, info, view.incarnation, process.compression)
    if info is not None:
        for record in records:
            if isinstance(record.value, Place):
                record.value = record.value._replace(segment=info.number)
            if isinstance(record, Blob):
                record.borrowed = tuple(part._replace(segment=part.segment or info.number) for part in record.borrowed)
    return Frame(batch.id, seq, tuple(records), info, len(raw)), raw


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


def _value_segment(process: Process, view: View, records: Sequence[Record], values: list[bytes], now: float) -> _Values:
    writer = SegmentWriter(make_ulid(now, view.incarnation, process.entropy(6)), process.compression, values=True)
    slots = [writer.store(type(record), value) for record, value in zip(records, values, strict=True)]
    info = writer.finish()
    return _Values(info, writer.take(), values, slots, now, view.incarnation)


def _put_records(
    process: Process,
    view: View,
    put: Put,
    taken: set[BlobKey],
    stored: set[BlobKey],
    lenders: Sequence[_Lender],
    values: dict[BlobKey, Known],
) -> list[Record]:
    checkpoint = put.checkpoint
    parent = _find_parent(process, view, checkpoint)
    blobs: list[Record] = []
    table: dict[str, Pieces] = {}
    for channel, (version, value) in put.values.items():
        key = checkpoint.namespace, channel, version_key(version)
        fresh = key not in taken and view.is_fresh(checkpoint.namespace, channel, version)
        taken.add(key)
        blob = Blob(checkpoint.namespace, channel, version, b"", fresh=fresh)
        before = parent.versions.get(channel) if parent is not None else None
        # A patch names its base by version and commit, and this very commit stores another value under that version.
        replaced = before is not None and (checkpoint.namespace, channel, version_key(before)) in stored
        blobs.append(_with_value(process, view, None if replaced else parent, blob, value, lenders, values))
    if parent is not None and not view.has(parent):
        for channel, version in checkpoint.versions.items():
            if parent.versions.get(channel) != version:
                continue
            pieces = view.pieces(parent, channel)
            if pieces is not None and all(isinstance(piece, Place) for piece in pieces):
                table[channel] = pieces
    checkpoint.table = table
    return [*blobs, checkpoint]


def _find_parent(process: Process, view: View, checkpoint: Checkpoint) -> Checkpoint | None:
    """What this process knows of a checkpoint's parent: from the manifest, or because it has read it."""
    if checkpoint.parent is None:
        return None
    found = view.checkpoint(checkpoint.namespace, checkpoint.parent)
    if found is None:
        found = process.cache.get(("checkpoint", view.incarnation, checkpoint.namespace, checkpoint.parent))
    return found


def _with_value(
    process: Process,
    view: View,
    parent: Checkpoint | None,
    blob: Blob,
    value: Typed | None,
    lenders: Sequence[_Lender],
    values: dict[BlobKey, Known],
) -> Blob:
    """A blob with its value: as a patch on the value before it, where that is at hand and makes it smaller."""
    if value is None:
        blob.empty = True
        return blob
    before = parent.versions.get(blob.channel) if parent is not None else None
    key = blob.namespace, blob.channel, version_key(blob.version)
    if parent is not None and before is not None and blob.fresh and len(value[1]) >= patch.SMALLEST:
        pieces = view.pieces(parent, blob.channel)
        known: Known | None = process.cache.get(process.value_key(view, pieces[-1])) if pieces else None
        if pieces and known is not None and known[0][0] == value[0] and patch.count_pieces(known[1]) == len(pieces):
            made = patch.extend(known[1], blob.version, known[0][1], value[1])
            if made is not None:
                kept = known[1][: made.keep]
                extends, base = kept[-1].version, pieces[: patch.count_pieces(kept)]
                at_hand = view.blob((blob.namespace, blob.channel, version_key(extends))) is not None
                if at_hand or all(isinstance(piece, Place) for piece in base):
                    ranges = _borrow(process, blob, made.data, lenders, patch.MAX_PIECES - 1 - len(base))
                    values[key] = value, (*kept, made.link._replace(borrowed=len(ranges)))
                    blob.value, blob.extends = pack_patch(made.link, made.data, ranges), extends
                    blob.base = None if at_hand else base
                    return blob
    ranges = _borrow(process, blob, value[1], lenders, patch.MAX_PIECES - 1)
    values[key] = value, (patch.whole(blob.version, value[1])._replace(borrowed=len(ranges)),)
    blob.value = pack_whole(value, blob.version, ranges)
    return blob


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


def _lenders(process: Process, view: View, put: Put, members: Sequence[Entry]) -> list[_Lender]:
    """The large writes on the parent of a checkpoint with large values, as far as their bytes are at hand."""
    inline, namespace, parent = process.limits.inline, put.checkpoint.namespace, put.checkpoint.parent
    if parent is None or all(value is None or len(value[1]) <= inline for _, value in put.values.values()):
        return []
    found: list[_Lender] = []
    for writes in view.writes(namespace, parent):
        if isinstance(writes.value, Place):
            data: bytes | None = process.cache.get(_lent_key(view.segment(writes.value.segment), writes.value))
            found += [_Lender(writes, data)] if data is not None else []
    for writes in [entry.change.writes for entry in members if isinstance(entry.change, PutWrites)]:
        if (writes.namespace, writes.id) == (namespace, parent) and isinstance(writes.value, bytes):
            found += [_Lender(writes, writes.value)] if len(writes.value) > inline else []
    return found


def _lent_key(info: SegmentInfo | None, place: Place) -> tuple[Any, ...]:
    return "lent", info and info.ulid, place.offset, place.start


def _borrow(process: Process, blob: Blob, data: bytes, lenders: Sequence[_Lender], most: int) -> list[Range]:
    """Let a blob have what tasks wrote to its channel for its own, where that saves more than a frame would take.

    Returns:
        The ranges of `data` that it borrows, in order; `most` at most.
    """
    least = process.limits.inline
    loans: list[tuple[Range, Any]] = []
    gaps = [(0, len(data))]
    for writes, lent in lenders:
        if not any(channel == blob.channel for _, channel in writes.entries):
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
    blob.borrowed = tuple(part for _, part in loans)
    return [taken for taken, _ in loans]


def _keep_values(process: Process, view: View, frame: Frame, values: Mapping[BlobKey, Known]) -> None:
    """Keep the values just stored at hand: for the next read, and to find what the next version adds."""
    for blob in frame.records:
        if isinstance(blob, Blob) and blob.pieces:
            known = values[blob.namespace, blob.channel, version_key(blob.version)]
            cost = len(known[0][1]) + 100 * len(known[1]) + 300
            process.cache.put(process.value_key(view, blob.pieces[-1]), known, cost)


def _refuse(process: Process, thread: Thread, view: View, batch: Batch) -> Steps[None]:
    """Tell the members that may not be stored on top of a view."""
    heads: dict[str, str | None] = {}
    for entry in batch.members:
        put = entry.change
        if entry.outcome is not None or not isinstance(put, Put) or not put.exclusive:
            continue
        namespace, parent = put.checkpoint.namespace, put.checkpoint.parent
        if namespace not in heads:
            head = yield from latest(process, thread, view, namespace)
            heads[namespace] = head.checkpoint.id if head else None
        if heads[namespace] in (parent, put.checkpoint.id):
            heads[namespace] = put.checkpoint.id
        else:
            _settle(entry, ConcurrentRunError(thread.id, namespace, parent, heads[namespace]))


def _stub_size(record: Record) -> int:
    """About how many bytes a record takes beside its value.

    Raises:
        ValueError: If they are too many for a manifest.
    """
    if isinstance(record, Checkpoint):
        names = sum(len(channel) + len(str(version)) + 8 for channel, version in record.versions.items())
        size = names + len(record.namespace) + len(record.id) + len(record.terms) + 100
    elif isinstance(record, Writes):
        names = sum(len(channel) + 8 for _, channel in record.entries)
        size = names + len(record.namespace) + len(record.id) + len(record.task_id) + len(record.task_path) + 50
    else:
        size = len(record.namespace) + len(record.channel) + 100
    if size > _LARGEST_STUB:
        raise ValueError(
            f"the names in one call take {size:,} bytes, {_LARGEST_STUB:,} is the most: the namespace, the ids and the "
            "names of channels are too long or too many"
        )
    return size
