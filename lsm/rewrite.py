"""One rewrite: segments in, segments with what a keep-rule keeps out.

Rules of this module:

- Compaction, prune, deletion of runs, expiry and copying differ in their inputs and keep-rule only. What a keep-rule
  keeps is found out by `survey`, namespace by namespace.
- It streams, from `merge` to `output`: memory does not grow with the values, only with the checkpoints of a namespace.
- Large values stay in the segments that they lie in, unless those are *drained*: small beside all others, or mostly
  garbage.
- Inputs are the newest segments, back to some point in time: places point from newer segments to older ones, so that
  none is left pointing at what has gone. What was flushed meanwhile is checked for what it builds on.
- Pieces are copied as they are, with the pieces that they build on, so that writers may go on patching.
- Nothing refers to what is made until `swap` puts it in the place of the inputs. Two rewrites may race: one wins the
  swap, and what the other made is an orphan, for the collector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from lsm.errors import CorruptionError
from lsm.format.bloom import has
from lsm.format.patch import MAX_PIECES
from lsm.format.records import (
    HIDDEN,
    ORPHAN,
    Blob,
    Checkpoint,
    Pieces,
    Place,
    Record,
    Version,
    Writes,
    pack_whole,
    pack_writes,
    runs_of,
    unpack_writes,
    version_key,
)
from lsm.format.segment import Key, SegmentInfo, Slot, guest_term
from lsm.lineage import KeepRule
from lsm.merge import Rows, Windows, newest
from lsm.output import Output
from lsm.process import Process, Thread
from lsm.steps import Now, Steps
from lsm.survey import Kept, survey
from lsm.values import Materials
from lsm.view import BlobKey, CheckpointKey, View, is_later


@dataclass(slots=True)
class Rewritten:
    """What a rewrite made.

    Attributes:
        segments: The new segments, without numbers; of two, the first is the companion of the second.
        inputs: The names of those that they replace.
        incarnation: The incarnation that they are for.
        seq: The last commit that was in segments when they were read: what was flushed since has a higher number.
        fence: The fence of the thread that they are for, before the first of them began to be stored.
        live: For every segment that stays, by its name, how many of its bytes are still referred to.
        dropped: The blobs that are gone, where a keep-rule dropped any.
        unlinked: The checkpoints that are gone or hidden.
        peaks: The highest version of every channel that is kept, by (namespace, channel); empty unless all segments
            were rewritten.
        stray: Whether some of it may be found above the highest visible checkpoint of a namespace.
    """

    segments: list[SegmentInfo]
    inputs: set[str]
    incarnation: bytes
    seq: int
    fence: int
    live: dict[str, int] = field(default_factory=dict)
    dropped: set[BlobKey] = field(default_factory=set)
    unlinked: set[CheckpointKey] = field(default_factory=set)
    peaks: dict[tuple[str, str], Version] = field(default_factory=dict)
    stray: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What to rewrite.

    Attributes:
        view: The view that it is read from.
        inputs: The segments whose records are rewritten.
        drained: The segments of large values that are emptied.
        rule: What to keep; all that nothing newer has replaced, where there is none.
        target: The thread that the new segments are for.
        incarnation: That thread's.
        fence: That thread's.
        copying: Whether `target` is another thread, in which nothing may be replaced.
        older: The `seq` of what is copied: lower than all in the target.
    """

    view: View
    inputs: tuple[SegmentInfo, ...]
    drained: tuple[SegmentInfo, ...]
    target: str
    incarnation: bytes
    fence: int
    rule: KeepRule | None = None
    copying: bool = False
    older: int = 0

    @property
    def whole(self) -> bool:
        """Whether all records that are in segments are rewritten."""
        rest = {info.ulid for info in self.view.header.segments if not info.values}
        return rest <= {info.ulid for info in self.inputs}


def rewrite(process: Process, thread: Thread, plan: Plan) -> Steps[Rewritten]:
    """Write what a plan keeps into new segments. Nothing refers to them yet.

    Raises:
        CorruptionError: If an input is damaged.
        SegmentGone: If an input is not there any more.
    """
    now = yield Now()
    copy = _Copy(process, thread, plan, now)
    try:
        yield from copy.run()
        return (yield from copy.finish())
    except Exception:
        yield from copy.abort()
        raise


class _Placed(NamedTuple):
    """Where a blob's own pieces are now (none: it is empty), and what it is applied to."""

    own: tuple[Any, ...]
    base: str | None


_Blobs = dict[tuple[str, str], _Placed]
"""The blobs of one namespace, by (channel, version key)."""


class _Copy:
    """One rewrite under way."""

    def __init__(self, process: Process, thread: Thread, plan: Plan, now: float):
        self._process = process
        self._thread = thread
        self._plan = plan
        self._now = now
        self._moving = {info.number for info in (*plan.inputs, *plan.drained)}
        base = plan.older if plan.copying else min(info.base for info in plan.inputs)
        output = partial(Output, process, plan.target, plan.incarnation, base, now)
        self._log, self._values = output(values=False), output(values=True)
        self._values_used = False
        self._windows = Windows(thread, plan.view)
        self._live: Counter[int] = Counter()
        self._lent: Counter[tuple[int, int]] = Counter()
        self._lenders: dict[tuple[int, int], Slot] = {}
        self._elsewhere: dict[BlobKey, Pieces | None] = {}
        inputs = {info.ulid for info in (*plan.inputs, *plan.drained)}
        self._made = Rewritten([], inputs, plan.incarnation, plan.view.header.seq, plan.fence)

    def run(self) -> Steps[None]:
        blobs = Rows(self._process, self._thread, self._plan.inputs, blobs=True)
        rows = Rows(self._process, self._thread, self._plan.inputs, blobs=False)
        while True:
            next_blob = yield from blobs.peek()
            next_row = yield from rows.peek()
            spaces = [key[0] for key in (next_blob, next_row) if key is not None]
            if not spaces:
                return
            namespace = min(spaces)
            kept = yield from self._survey(namespace)
            placed = yield from self._copy_blobs(blobs, namespace, kept)
            yield from self._copy_rows(rows, namespace, kept, placed)

    def finish(self) -> Steps[Rewritten]:
        made = self._made
        if self._values_used:
            made.segments.append((yield from self._values.finish()))
        if self._log.writer.rows:
            made.segments.append((yield from self._log.finish()))
        oldest = min((info.base for info in self._plan.inputs), default=0)
        for segment in self._plan.view.header.segments:
            known = self._plan.whole or segment.base > oldest  # else records that stay may refer to it, too
            if segment.values and segment.ulid not in made.inputs and known:
                made.live[segment.ulid] = self._live[segment.number]
        return made

    def abort(self) -> Steps[None]:
        yield from self._log.abort()
        yield from self._values.abort()

    def _survey(self, namespace: str) -> Steps[Kept | None]:
        """What is kept of a namespace; `None` for everything."""
        if self._plan.rule is None:
            return None
        kept = yield from survey(self._process, self._thread, self._plan.inputs, namespace, self._plan.rule)
        self._made.unlinked |= kept.unlinked
        self._made.dropped |= kept.dropped
        return kept

    # Blobs.

    def _copy_blobs(self, rows: Rows, namespace: str, kept: Kept | None) -> Steps[_Blobs]:
        placed: _Blobs = {}
        self._lent.clear()
        self._lenders.clear()
        while (key := (yield from rows.peek())) is not None and key[0] == namespace:
            newest_blobs = yield from self._channel(rows, key[:2])
            for version, blob in newest_blobs.items():
                own = key[1], version
                if self._plan.whole:
                    self._raise_peak((blob.namespace, blob.channel), blob.version)
                if (kept is not None and own not in kept.blobs) or (blob.empty and self._plan.whole):
                    continue  # an empty blob need not be there, unless it hides an older one
                base_key = None if blob.extends is None else version_key(blob.extends)
                before = None if base_key is None else newest_blobs.get(base_key)
                if before is not None and before.seq > blob.seq:  # what it was made from has been replaced meanwhile
                    blob, base_key = (yield from self._whole(blob)), None
                yield from self._copy_blob(blob, own, base_key, placed)
        yield from self._log.pump()
        return placed

    def _channel(self, rows: Rows, channel: Key) -> Steps[dict[str, Blob]]:
        """The blobs of one channel that count, by version key. In the order of keys a base may come after its patch."""
        found: dict[str, Blob] = {}
        while (key := (yield from rows.peek())) is not None and key[:2] == channel:
            group = yield from rows.group()
            assert group is not None
            found[key[2]] = group[1][-1]
        return found

    def _copy_blob(self, blob: Blob, own: tuple[str, str], base_key: str | None, placed: _Blobs) -> Steps[None]:
        borrowed = yield from self._moved_loans(blob.borrowed)
        value = yield from self._moved(blob)
        placed[own] = _Placed(() if blob.empty else (*borrowed, value), base_key)
        base = () if base_key is None else self._pieces((blob.channel, base_key), placed)
        if base is None:
            base = self._staying(blob.base)
        fresh = blob.fresh or self._plan.whole
        self._add(replace(blob, value=value, base=base, borrowed=borrowed, fresh=fresh, seq=self._seq(blob)))

    def _raise_peak(self, channel: tuple[str, str], version: Version) -> None:
        peak = self._made.peaks.get(channel)
        if peak is None or is_later(version, peak):
            self._made.peaks[channel] = version

    def _whole(self, blob: Blob) -> Steps[Blob]:
        """A patch as a blob that stands alone. A newer blob of its key, in a frame, is not what is wanted."""
        key = blob.namespace, blob.channel, version_key(blob.version)
        materials = Materials(self._process, self._thread, self._plan.view)
        yield from materials.look_up([key], blob.seq)
        yield from materials.collect(materials.places(key))
        value = materials.channel(key)
        assert value is not None
        slot: Any = self._store(Blob, pack_whole(value, blob.version))
        yield from self._log.pump()
        yield from self._values.pump()
        return replace(blob, value=slot, extends=None, base=(), borrowed=())

    def _pieces(self, key: tuple[str, str], placed: _Blobs) -> Any:
        """The pieces of a blob that was rewritten, or `None` where they are not known."""
        pieces: list[Any] = []
        at: tuple[str, str] | None = key
        while at is not None:
            if at not in placed:
                return None
            if len(pieces) > MAX_PIECES:
                raise CorruptionError(
                    f"thread {self._thread.id!r}: channel {key[0]!r} is a chain of patches without end, according to "
                    f"the segments of {self._thread.key}; restore them from a backup"
                )
            own, base = placed[at]
            if not own:
                return ()
            pieces += reversed(own)
            at = None if base is None else (at[0], base)
        return tuple(reversed(pieces))

    def _not_among_inputs(self, checkpoint: Checkpoint, channel: str) -> Steps[Pieces | None]:
        """The pieces of a value whose blob no input has: as the checkpoint says, unless they were moved since."""
        said = checkpoint.table.get(channel)
        if self._plan.whole or said == ():  # where all blobs are rewritten, one that is not among them has no value
            return ()
        staying = self._staying(said)
        if said is None or staying is not None:
            return staying
        key = checkpoint.namespace, channel, version_key(checkpoint.versions[channel])
        if key not in self._elsewhere:
            materials = Materials(self._process, self._thread, self._plan.view)
            yield from materials.look_up([key])
            self._elsewhere[key] = self._staying(materials.pieces[key])
        return self._elsewhere[key]

    def _staying(self, pieces: Pieces | None) -> Pieces | None:
        """Pieces, if none of them is moved or gone."""
        if pieces is None or self._plan.copying:
            return None
        stay = all(isinstance(piece, Place) and piece.segment not in self._moving for piece in pieces)
        return pieces if stay and self._plan.view.alive(pieces) else None

    # Checkpoints and writes.

    def _copy_rows(self, rows: Rows, namespace: str, kept: Kept | None, placed: _Blobs) -> Steps[None]:
        hidden_last = False
        while (key := (yield from rows.peek())) is not None and key[0] == namespace:
            found = yield from rows.group()
            assert found is not None
            checkpoint = newest(found[1])
            writes = [each for each in found[1] if isinstance(each, Writes)]
            channels: set[str] | None = None
            if checkpoint is not None:
                if kept is not None and checkpoint.id not in kept.live:
                    channels = kept.needed.get(checkpoint.id)
                    if channels is None:
                        continue
                yield from self._copy_checkpoint(checkpoint, kept, channels, placed)
                hidden_last = channels is not None or bool(checkpoint.flags & HIDDEN)
            for each, entries in _winners(writes):
                if channels is not None:
                    names = [channel for _, channel in each.entries]
                    entries = [position for position in entries if names[position] in channels]
                if checkpoint is None and self._plan.whole and self._is_abandoned(each):
                    continue
                if entries:
                    # The thread's own header carries strays, unless it says otherwise; that of a copy does not.
                    self._made.stray |= checkpoint is None and (self._plan.copying or self._plan.view.header.stray)
                    yield from self._copy_writes(each, entries, early=checkpoint is None)
            yield from self._log.pump()
        self._made.stray |= hidden_last

    def _copy_checkpoint(
        self, checkpoint: Checkpoint, kept: Kept | None, channels: set[str] | None, placed: _Blobs
    ) -> Steps[None]:
        versions = checkpoint.versions
        if self._plan.whole:  # a version without a value has been used, too: here it is said to have none
            for channel, version in versions.items():
                self._raise_peak((checkpoint.namespace, channel), version)
        changes: dict[str, Any] = {}
        if channels is not None:
            versions = {
                channel: version
                for channel, version in versions.items()
                if channel in channels and (channel, version_key(version)) in placed
            }
            changes = {"flags": checkpoint.flags | HIDDEN, "terms": b"", "deltas": None, "value": b""}
        elif kept is not None and checkpoint.parent is not None and checkpoint.parent not in kept.live:
            changes = {"flags": checkpoint.flags | ORPHAN}
        table: dict[str, Any] = {}
        for channel, version in versions.items():
            pieces = self._pieces((channel, version_key(version)), placed)
            if pieces is None:
                pieces = yield from self._not_among_inputs(checkpoint, channel)
            if pieces is not None:
                table[channel] = pieces
        value = yield from self._moved(replace(checkpoint, **changes))
        if isinstance(value, bytes):
            value = self._store(Checkpoint, value)
        made = replace(checkpoint, **changes, versions=versions, table=table)
        self._add(replace(made, value=value, seq=self._seq(checkpoint)))

    def _copy_writes(self, writes: Writes, positions: list[int], early: bool) -> Steps[None]:
        if len(positions) == writes.count:
            value = yield from self._moved(writes)
            self._add(replace(writes, value=value, seq=self._seq(writes)), early)
            return
        assert isinstance(writes.value, Place)
        data = yield from self._windows.value(writes.value)
        values = unpack_writes(data, self._thread.key)
        packed = pack_writes(values[position] for position in positions)
        entries = writes.entries
        slot = self._store(Writes, packed)
        made: Any = replace(writes, runs=runs_of(entries[position] for position in positions), seq=self._seq(writes))
        made.value = slot
        self._add(made, early)

    def _is_abandoned(self, writes: Writes) -> bool:
        """Whether the checkpoint of writes that is not in any input did not come in a frame either, for a long time."""
        if self._plan.view.checkpoint(writes.namespace, writes.id) is not None:
            return False
        return writes.time < (self._now - self._process.limits.grace) * 1000

    # Values.

    def _moved(self, record: Record) -> Steps[Any]:
        """Where the value of a record is from now on; the bytes, where it lies in the record."""
        value = record.value
        if not isinstance(value, Place):
            return value  # a slot already, or empty
        at = value.segment, value.offset
        if value.segment not in self._moving and not self._plan.copying:
            lent = min(self._lent.pop(at, 0), value.length)  # counted already
            self._live[value.segment] += value.length - lent
            return value
        if at in self._lenders and isinstance(record, Writes):
            return self._values.writer.part(self._lenders[at], value.start, value.length)
        data = yield from self._windows.value(value)
        slot = self._store(type(record), data)
        yield from self._log.pump()
        yield from self._values.pump()
        return slot

    def _moved_loans(self, borrowed: Sequence[Place]) -> Steps[tuple[Any, ...]]:
        """Where the bytes that a blob borrows are from now on. What is moved is moved once for both who have it, unless
        that would keep more than is wanted."""
        moved: list[Any] = []
        for place in borrowed:
            at = place.segment, place.offset
            if place.segment not in self._moving and not self._plan.copying:
                self._live[place.segment] += place.length
                self._lent[at] += place.length
                moved.append(place)
                continue
            if at not in self._lenders:
                block = yield from self._windows.block(place)
                if place.length * 2 < len(block):
                    moved.append(self._store(Writes, block[place.start : place.start + place.length]))
                    continue
                self._values_used = True
                self._lenders[at] = self._values.writer.store(Writes, block)
            moved.append(self._values.writer.part(self._lenders[at], place.start, place.length))
            yield from self._values.pump()
        return tuple(moved)

    def _store(self, kind: type[Record], data: bytes) -> Slot:
        if len(data) > self._process.limits.inline:
            self._values_used = True
            return self._values.writer.store(kind, data)
        return self._log.writer.store(kind, data)

    def _add(self, record: Record, early: bool = False) -> None:
        """Index a record; `early` where its checkpoint may come in a segment that is not among the inputs."""
        self._log.writer.add(record, early or self._is_guest(record))

    def _is_guest(self, record: Record) -> bool:
        if isinstance(record, Blob) or (self._plan.whole and not self._plan.copying):
            return False
        term = guest_term(record.namespace, record.id)
        return self._plan.copying or any(has(info.shared, term) for info in self._plan.inputs)

    def _seq(self, record: Record) -> int:
        return self._plan.older if self._plan.copying else record.seq


def _winners(calls: Sequence[Writes]) -> list[tuple[Writes, list[int]]]:
    """Of the writes of one checkpoint, in order of commit: the positions in each call that still count."""
    winners: dict[tuple[str, int], tuple[int, int]] = {}
    for number, call in enumerate(calls):
        for position, (index, _) in enumerate(call.entries):
            key = call.task_id, index
            if index < 0 or key not in winners:
                winners[key] = number, position
    kept: dict[int, list[int]] = {}
    for number, position in winners.values():
        kept.setdefault(number, []).append(position)
    return [(calls[number], sorted(kept[number])) for number in sorted(kept)]
