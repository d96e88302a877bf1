"""From the tail to a segment.

Rules of this module:

- `prepare` makes a segment of all records in the frames of a view; `landed` makes the manifest in which that segment
  stands in for those frames. Both are pure; `lsm.commit` uploads the one beside a commit and writes the other with
  the next.
- What is wanted most stays at hand: the header *carries* the heads of the namespaces written last, the root's first,
  with their writes, unless they are too many, and the values of small ones. Frames that remain keep what they build
  on.
- `build_header` is shared with rewrites: it decides what a header carries, within its limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lsm.format.envelope import Compression
from lsm.format.manifest import CommitId, Header, pack_header, unpack_frames
from lsm.format.names import make_ulid
from lsm.format.records import Blob, Checkpoint, Piece, Pieces, Place, Record, Writes, pack, version_key
from lsm.format.segment import SegmentInfo, SegmentWriter, Slot
from lsm.limits import HEADER, Limits
from lsm.view import CheckpointKey, View, assemble, pairs_of

_MOST_COMMITS = 128
_MOST_STRAYS = 64
_MOST_ANCHORS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Flush:
    """A segment that holds what the frames of a view hold.

    Attributes:
        view: That view.
        info: The segment.
        body: Its bytes.
        slots: The slot of every value that the frames held themselves, by the identity of its record.
    """

    view: View
    info: SegmentInfo
    body: bytes
    slots: Mapping[int, Slot]

    def fits(self, view: View) -> bool:
        """Whether it may still take the place of a view's frames: their header is the same, its fence included."""
        own = self.view
        return (
            view.header_bytes == own.header_bytes
            and view.count >= own.count
            and view.commit_of(own.seq) == own.commit_of(own.seq)
        )

    def final(self, number: int) -> Callable[[bytes | Place, Record], Place]:
        """What says where the value of a record is once the segment has a number."""

        def final(value: bytes | Place, record: Record) -> Place:
            return value if isinstance(value, Place) else self.slots[id(record)].place._replace(segment=number)

        return final


def prepare(view: View, compression: Compression, now: float, random: bytes) -> Flush:
    """Make a segment of a view's frames.

    Args:
        view: The view.
        compression: How the segment is compressed.
        now: The time, in seconds since the epoch.
        random: 6 random bytes, for its name.

    Returns:
        The flush, to be uploaded and landed.
    """
    after = view.header.seq
    writer = SegmentWriter(make_ulid(now, view.incarnation, random), compression, after)
    slots: dict[int, Slot] = {}

    def store(record: Record) -> Any:
        if isinstance(record.value, Place):
            return record.value
        slots[id(record)] = writer.store(type(record), record.value)
        return slots[id(record)]

    def moved(pieces: Pieces) -> Any:
        return tuple([slots[id(piece)] if isinstance(piece, Blob) else piece for piece in pieces])

    def seen(records: Iterable[Any]) -> list[Any]:
        return [each for each in records if after < each.seq <= view.seq]

    blobs = [blob for _, found in sorted(view.tail.blobs.items()) for blob in seen(found)]
    values = [None if blob.empty else store(blob) for blob in blobs]
    for blob, value in zip(blobs, values, strict=True):
        if blob.empty and blob.fresh:
            continue  # a blob that is not found is empty, too
        slot = writer.store(Blob, b"") if value is None else value
        writer.add(replace(blob, value=slot, base=moved(blob.base or ())))
    rows: list[tuple[CheckpointKey, int, int, Checkpoint | Writes]] = []
    for namespace, by_id in list(view.tail.checkpoints.items()):
        for id_, found in list(by_id.items()):
            newest = seen(found)[-1:]
            rows += [((namespace, id_), 0, each.seq, each) for each in newest]
    for key, calls in list(view.tail.writes.items()):
        rows += [(key, 1, each.seq, each) for each in seen(calls)]
    rows.sort(key=lambda row: row[:3])
    whole = {key for key, kind, _, _ in rows if kind == 0 and _is_new(view, *key)}
    for key, _, _, record in rows:
        guest = key not in whole  # writes that came before their checkpoint are guests, wherever that will be
        if isinstance(record, Checkpoint):
            table: Any = {  # as of this view: what was put again since the checkpoint counts
                channel: moved(pieces)
                for channel in record.versions
                if (pieces := view.pieces(record, channel)) is not None
            }
            writer.add(replace(record, value=store(record), table=table), guest)
        else:
            writer.add(replace(record, value=store(record)), guest)
    info = writer.finish()
    return Flush(view, info, writer.take(), slots)


def _is_new(view: View, namespace: str, id_: str) -> bool:
    """Whether no segment has anything of a checkpoint."""
    return view.tail.carried_heads.get(namespace) != id_ and view.is_complete(namespace, id_)


def landed(flush: Flush, view: View, limits: Limits, compression: Compression, wanted: Iterable[CheckpointKey]) -> View:
    """The view in which a flush stands for the frames that it holds.

    Args:
        flush: The flush; it fits the view.
        view: The newest view.
        limits: What the header may hold.
        compression: How the header is compressed.
        wanted: Checkpoints that the next commit builds on.

    Returns:
        The view, not stored yet: its tag is that of `view`.
    """
    info = replace(flush.info, number=view.next_number)
    old = flush.view

    added = [old.tail.segments[number] for number in sorted(old.tail.segments) if old.segment(number) is not None]
    added = [each for each in added if each.base <= old.seq]
    frames = view.tail.frames[old.count : view.count]
    header = build_header(
        replace(
            old.header,
            seq=old.seq,
            next_number=info.number + 1,
            segments=(*old.header.segments, *added, info),
            changed=view.changed,
            chain=old.chain,
            commits=_remember(old.header.commits, [commit for commit, _ in old.tail.frames[: old.count]]),
        ),
        old,
        limits,
        compression,
        {*wanted, *_parents(view, old.seq)},
        _bases(view, old),
        flush.final(info.number),
    )
    return rebased(view, header, compression, frames, old.seq)


def rebased(
    view: View, header: Header, compression: Compression, frames: list[tuple[CommitId, bytes]], seq: int
) -> View:
    """The view of a new header, followed by frames that another header had, from the commit after `seq` on."""
    raw = b"".join([each for _, each in frames])
    found = unpack_frames(raw, 0, seq, header.incarnation, header.chain, False, view.key)
    pairs = pairs_of(found, raw, 0, header.incarnation)
    return assemble(view.key, header, pack_header(header, compression), pairs, view.tag)


def spilled(flush: Flush, view: View, namespace: str, id_: str) -> Checkpoint | None:
    """A checkpoint of a flush, as the view in which that has landed has it in segments."""
    record = flush.view.checkpoint(namespace, id_)
    number = max([info.number for info in view.header.segments if info.ulid == flush.info.ulid], default=0)
    return _stub(flush.view, record, flush.final(number)) if record is not None and number else None


def _stub(view: View, checkpoint: Checkpoint, final: Callable[[bytes | Place, Record], Place]) -> Checkpoint:
    """A checkpoint of a view as it is in segments."""
    table: dict[str, Pieces] = {
        channel: _moved(pieces, final)
        for channel in checkpoint.versions
        if (pieces := view.pieces(checkpoint, channel)) is not None
    }
    return replace(checkpoint, value=final(checkpoint.value, checkpoint), table=table)


def _moved(pieces: Pieces, final: Callable[[bytes | Place, Record], Place]) -> Pieces:
    return tuple([final(piece.value, piece) if isinstance(piece, Blob) else piece for piece in pieces])


def _remember(known: tuple[CommitId, ...], more: Iterable[CommitId]) -> tuple[CommitId, ...]:
    last = dict(known)
    for writer, count in more:
        last.pop(writer, None)
        last[writer] = count
    return tuple(last.items())[-_MOST_COMMITS:]


def _parents(view: View, seq: int) -> set[CheckpointKey]:
    """The checkpoints that those after a commit inherit from."""
    return {
        (namespace, record.parent)
        for namespace, by_id in list(view.tail.checkpoints.items())
        for records in list(by_id.values())
        for record in records
        if seq < record.seq <= view.seq and record.parent
    }


def _bases(view: View, old: View) -> list[Blob]:
    """The blobs of an older view, as that has them, that patches in a view take over pieces from."""
    bases = []
    for records in list(view.tail.blobs.values()):
        for blob in records:
            if old.seq < blob.seq <= view.seq and blob.extends is not None:
                found = old.tail.blobs.get((blob.namespace, blob.channel, version_key(blob.extends)), ())
                bases += [each for each in found if each.seq <= old.seq][-1:]
    return bases


def build_header(
    header: Header,
    view: View,
    limits: Limits,
    compression: Compression,
    parents: Iterable[CheckpointKey],
    bases: Iterable[Blob],
    final: Callable[[bytes | Place, Record], Place],
) -> Header:
    """A header with all that it should carry, as far as there is room: values go first, then heads, then parents and
    strays. The blobs that later frames patch stay; where they alone are too large, no such header can be stored.

    Args:
        header: All but what is carried.
        view: The records to choose from.
        limits: How much may be carried.
        compression: How it will be compressed.
        parents: Checkpoints that later frames inherit from.
        bases: Blobs that later frames patch.
        final: Where a record's value is in segments.
    """
    carried: list[Record] = []
    done: set[CheckpointKey] = set()

    for key in sorted(set(parents)):
        parent = view.checkpoint(*key)
        if parent is not None and len(carried) < _MOST_ANCHORS:
            carried.append(_stub(view, parent, final))
            done.add(key)
    foundations: list[Record] = [
        replace(blob, value=final(blob.value, blob), base=_moved(blob.base or (), final))
        for blob in dict.fromkeys(bases)
    ]
    carried += foundations
    strays, stray = _strays(view)
    carried += [replace(writes, value=final(writes.value, writes)) for writes in strays]
    header = replace(header, stray=header.stray or stray)
    needed_later = len(carried)
    heads: list[tuple[str, str]] = []
    partial: list[str] = []
    peaks: list[tuple[str, str, Any]] = []
    inline: dict[Place, bytes] = {}
    room = limits.heads
    for namespace, head, whole in _recent_heads(view):
        own_peaks = [
            (namespace, channel, peak)
            for (space, channel), peak in list(view.tail.peaks.items())
            if space == namespace and head.versions.get(channel) != peak
        ]
        records: list[Record] = [] if (namespace, head.id) in done else [_stub(view, head, final)]
        size = sum(len(pack(record)) for record in records) + sum(len(str(peak)) for peak in own_peaks)
        if size > room and namespace:
            continue  # the root's head is worth more than its share
        writes = [replace(each, value=final(each.value, each)) for each in view.writes(namespace, head.id)]
        size_of_writes = sum(len(pack(each)) for each in writes)
        whole = whole and (not writes or size + size_of_writes <= room)
        if whole:
            records += writes
            size += size_of_writes
        else:
            partial.append(namespace)
        room -= size
        carried += records
        heads.append((namespace, head.id))
        peaks += own_peaks
        values = _values(view, head, final) if whole else None
        needed = sum(map(len, values.values())) if values is not None else room + 1
        if values is not None and needed <= min(limits.small, room):
            inline.update(values)
            room -= needed
    full = replace(header, carried=tuple(carried), heads=tuple(heads), peaks=tuple(peaks), partial=tuple(partial))
    least = replace(header, carried=tuple(foundations), stray=header.stray or bool(strays))
    steps = [replace(full, inline=inline), full, replace(header, carried=tuple(carried[:needed_later])), least]
    return next((each for each in steps if len(pack_header(each, compression)) <= HEADER), least)


def _recent_heads(view: View) -> list[tuple[str, Checkpoint, bool]]:
    """The heads that are known for sure, the root's first, then by how recently they were written to; and whether all
    their writes are at hand."""
    known = []
    for namespace in list(view.tail.checkpoints):
        if not view.knows_head(namespace):
            continue
        head = view.head_at_hand(namespace)
        if head is not None:
            last = max([head.seq, *(writes.seq for writes in view.writes(namespace, head.id))])
            known.append((namespace != "", -last, namespace, head))
    known.sort(key=lambda each: each[:3])
    return [(namespace, head, view.is_complete(namespace, head.id)) for _, _, namespace, head in known[:_MOST_ANCHORS]]


def _strays(view: View) -> tuple[list[Writes], bool]:
    """Writes whose checkpoint may still come; and whether there are too many to carry."""
    strays = [
        each
        for (namespace, id_), calls in list(view.tail.writes.items())
        if view.checkpoint(namespace, id_) is None
        for each in calls
        if each.seq <= view.seq
    ]
    return ([], True) if len(strays) > _MOST_STRAYS else (strays, False)


def _values(view: View, head: Checkpoint, final: Callable[[bytes | Place, Record], Place]) -> dict[Place, bytes] | None:
    """All values that a head's state is made of, by their places, if they are all at hand."""
    values: dict[Place, bytes] = {}

    def take(record: Any, value: bytes | Place) -> bool:
        if isinstance(value, bytes):
            values[final(value, record)] = value
            return True
        known = view.header.inline.get(value)
        if known is not None:
            values[value] = known
        return known is not None

    def take_piece(piece: Piece) -> bool:
        return take(piece, piece.value) if isinstance(piece, Blob) else take(None, piece)

    whole = take(head, head.value)
    whole = whole and all(take(each, each.value) for each in view.writes(head.namespace, head.id))
    whole = whole and all(take_piece(piece) for pieces in head.table.values() for piece in pieces)
    return values if whole else None
