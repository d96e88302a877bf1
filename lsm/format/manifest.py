"""The manifest: a header, then commit frames.

Rules of this module:

- `prelude (24) | sealed header | mark | (head | sealed records | mark)*`. The prelude and the head of every frame have
  checksums of their own.
- A *mark* (the incarnation's 8 bytes) ends the header and every frame. Where a store appends, it is written after what
  it ends has been synced, so that bytes before a mark are durable, and damage to them is `CorruptionError`.
- What follows the last mark is one append that nobody confirmed. If it is a whole frame it counts: a power cut may have
  taken its mark alone. Anything else is *torn*, whatever its shape, and was never acknowledged.
- Frames are a chain: each counts on from the `seq` before, and the checksum of its head goes on from that of the frame
  before. So frames of another history of the same thread (a restored backup) do not follow.
- Sealed blocks have the thread's incarnation as context: frames of one thread do not open in another.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lsm.errors import CorruptionError, FormatVersionError
from lsm.format import FORMAT_VERSION
from lsm.format.envelope import META, Compression, seal, unseal
from lsm.format.packing import packb, unpackb
from lsm.format.patch import Version
from lsm.format.records import Place, Record, checked_version, pack, place_of, unpack
from lsm.format.segment import SegmentInfo

MAGIC = b"lsmman"
_PRELUDE = struct.Struct("<6sHI8s")
_HEAD = struct.Struct("<I8sQQ")
_CRC = struct.Struct("<I")
PRELUDE_SIZE = _PRELUDE.size + _CRC.size
HEAD_SIZE = _HEAD.size + _CRC.size
MARK_SIZE = 8

CommitId = tuple[bytes, int]
"""Who committed (8 random bytes of a process), and its how-manieth commit that was."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a thread's manifest says before its frames.

    Attributes:
        thread_id: The thread.
        incarnation: 8 random bytes: a thread that is deleted and made again has others.
        seq: The number of the last commit that is in the segments; the first frame has the next.
        next_number: The number that the next segment gets.
        segments: The directory, in order of age.
        carried: Records that are in segments too, kept at hand: heads, and what the frames build on.
        inline: Values of carried records, by place, so that a small state needs no second round.
        heads: The namespaces whose highest checkpoint is carried, and its id.
        peaks: (namespace, channel, version) of the highest version ever stored, where it is not that head's.
        commits: The last commit of each recent writer, most recent last.
        retired: (ulid, seconds since the epoch) of segments that were replaced not long ago.
        changed: The time of the newest record that is in segments, in milliseconds since the epoch.
        stray: Whether segments may hold something above a namespace's head: writes of checkpoints still to come, or
            hidden checkpoints.
        partial: The namespaces of which the head is carried without all its writes, for there are too many.
        chain: What the checksum of the first frame goes on from: that of the last commit in the segments.
        fence: How often a collector was about to remove what was never named: what was uploaded under an older number
            may be gone.
        deleted: Whether this is a tombstone: the thread has ended (see `lsm.removal`).
    """

    thread_id: str
    incarnation: bytes
    seq: int = 0
    next_number: int = 2
    segments: tuple[SegmentInfo, ...] = ()
    carried: tuple[Record, ...] = ()
    inline: Mapping[Place, bytes] = field(default_factory=dict)
    heads: tuple[tuple[str, str], ...] = ()
    peaks: tuple[tuple[str, str, Version], ...] = ()
    commits: tuple[CommitId, ...] = ()
    retired: tuple[tuple[str, int], ...] = ()
    changed: int = 0
    stray: bool = False
    partial: tuple[str, ...] = ()
    chain: int = 0
    fence: int = 0
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """One commit.

    Attributes:
        commit: Its id.
        seq: Its number.
        records: What it stores; their values may lie in segments.
        segment: The segment that it adds to the directory, which its records call segment 0.
        size: Its length in the manifest, in bytes, with its mark.
        chain: What the checksum of the next frame goes on from.
    """

    commit: CommitId
    seq: int
    records: tuple[Record, ...]
    segment: SegmentInfo | None = None
    size: int = field(default=0, compare=False)
    chain: int = field(default=0, compare=False)


class Frames(NamedTuple):
    """The frames of a manifest, or of a part of one.

    Attributes:
        frames: All that are whole.
        end: Where the last of them ends in the bytes, its mark included where that is there.
        marked: Whether the bytes end with the last frame's mark: all of them are durable.
        open: Whether nothing but the last frame's mark is missing: somebody may be about to write it.
    """

    frames: list[Frame]
    end: int
    marked: bool = True
    open: bool = False

    def without_last(self) -> Frames:
        """The same without the last frame."""
        last = self.frames[-1].size - MARK_SIZE
        return Frames(self.frames[:-1], self.end - last, marked=False)


def pack_header(header: Header, compression: Compression) -> bytes:
    """A header as bytes."""
    body = packb(
        (
            header.thread_id,
            header.seq,
            header.next_number,
            [info.pack() for info in header.segments],
            [pack(record, _lowest(header.segments)) for record in header.carried],
            [(place, value) for place, value in header.inline.items()],
            header.heads,
            header.peaks,
            header.commits,
            header.retired,
            header.changed,
            header.stray,
            header.partial,
            header.chain,
            header.fence,
            header.deleted,
        )
    )
    sealed = seal(body, compression, header.incarnation, META)
    prelude = _PRELUDE.pack(MAGIC, FORMAT_VERSION, len(sealed), header.incarnation)
    return b"".join((prelude, _CRC.pack(zlib.crc32(prelude)), sealed, header.incarnation))


def unpack_header(data: bytes, where: str) -> tuple[Header, int]:
    """The header at the beginning of a manifest, and where its mark ends. The mark itself may be cut off: so an append
    that failed leaves the manifest, for nobody to append to it again.

    Raises:
        CorruptionError: If it is damaged.
        FormatVersionError: If a newer version wrote it.
    """
    if len(data) < PRELUDE_SIZE:
        raise CorruptionError(f"{where}: a manifest of {len(data)} bytes is too short to be one")
    magic, version, length, incarnation = _PRELUDE.unpack_from(data)
    if zlib.crc32(data[: _PRELUDE.size]) != _CRC.unpack_from(data, _PRELUDE.size)[0] or magic != MAGIC:
        raise CorruptionError(f"{where}: the beginning of the manifest is damaged; restore it from a backup")
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{where}: the manifest has format {version}, this version knows {FORMAT_VERSION}; upgrade this process"
        )
    end = PRELUDE_SIZE + length
    if end > len(data):
        raise CorruptionError(f"{where}: the manifest ends within its header; restore it from a backup")
    body = unseal(data[PRELUDE_SIZE:end], incarnation, where, META)
    try:
        fields = unpackb(body)
        thread_id, seq, next_number, segments, carried, inline, *known, chain, fence, deleted = fields
        heads, peaks, commits, retired, changed, stray, partial = known
        texts = [thread_id, *(text for head in heads for text in head), *(text for peak in peaks for text in peak[:2])]
        texts += [*(ulid for ulid, _ in retired), *partial]
        numbers = [seq, next_number, changed, chain, fence]
        numbers += [*(count for _, count in commits), *(at for _, at in retired)]
        raws = [*(value for _, value in inline), *(writer for writer, _ in commits)]
        for kind, values in ((str, texts), (int, numbers), (bytes, raws), (bool, [stray, deleted])):
            if not all(type(value) is kind for value in values):
                raise TypeError("a field is of another type")
        infos = tuple([SegmentInfo.unpack(each, where) for each in segments])
        header = Header(
            thread_id,
            incarnation,
            seq,
            next_number,
            infos,
            tuple([unpack(each, where, base=_lowest(infos)) for each in carried]),
            {place_of(place): value for place, value in inline},
            tuple([(namespace, id_) for namespace, id_ in heads]),
            tuple([(namespace, channel, checked_version(version)) for namespace, channel, version in peaks]),
            tuple([(writer, count) for writer, count in commits]),
            tuple([(ulid, at) for ulid, at in retired]),
            changed,
            stray,
            tuple(partial),
            chain,
            fence,
            deleted,
        )
    except CorruptionError:
        raise
    except Exception as error:  # msgpack raises several kinds
        raise CorruptionError(f"{where}: the header is not well formed ({error})") from error
    if not all(isinstance(record.value, Place) for record in header.carried):
        raise CorruptionError(f"{where}: the header carries a value that no segment has")
    if data[end : end + MARK_SIZE] != incarnation[: len(data) - end]:
        raise CorruptionError(f"{where}: the end of the header is damaged; restore it from a backup")
    return header, end + MARK_SIZE


def _lowest(segments: Sequence[SegmentInfo]) -> int:
    """What the `seq` of a header's records is counted from: 0, unless something was copied beside what was there."""
    return min((info.base for info in segments if info.base < 0), default=0)


def pack_frame(
    commit: CommitId,
    seq: int,
    records: Sequence[Record],
    segment: SegmentInfo | None,
    incarnation: bytes,
    compression: Compression,
    chain: int,
) -> bytes:
    """A frame as bytes, with its mark. `chain` is that of the frame (or header) before it."""
    body = packb((segment and segment.pack(), [pack(record, seq) for record in records]))
    sealed = seal(body, compression, incarnation + seq.to_bytes(8, "little"), META)
    head = _HEAD.pack(len(sealed), *commit, seq)
    return b"".join((head, _CRC.pack(_sum(head, incarnation, chain)), sealed, incarnation))


def _sum(head: bytes, incarnation: bytes, chain: int) -> int:
    """The checksum of a frame's head."""
    return zlib.crc32(head, zlib.crc32(incarnation, chain))


def chain_of(raw: bytes) -> int:
    """What the checksum of the next frame goes on from: the two checksums of this one, of its head and its records.

    Args:
        raw: The frame, with its mark.
    """
    end = len(raw) - MARK_SIZE
    return zlib.crc32(raw[end - _CRC.size : end], _CRC.unpack_from(raw, _HEAD.size)[0])


def raws_of(data: bytes, start: int, frames: Sequence[Frame], incarnation: bytes) -> list[bytes]:
    """The bytes of consecutive frames from a position on, each with its mark, be that missing in the data."""
    raws = []
    for frame in frames:
        end = start + frame.size
        raws.append(data[start : end - MARK_SIZE] + incarnation)
        start = end
    return raws


def unpack_frames(data: bytes, start: int, seq: int, incarnation: bytes, chain: int, torn: bool, where: str) -> Frames:
    """The frames of a manifest, from a position on.

    Args:
        data: The bytes.
        start: Where the first frame begins.
        seq: The number of the commit before it.
        incarnation: The thread's.
        chain: That of the frame (or header) before it.
        torn: Whether the end may be an append that nobody confirmed.
        where: The manifest's key, for errors.

    Raises:
        CorruptionError: If anything else does not add up.
    """
    frames: list[Frame] = []
    at, marked, problem = start, True, ""
    while at < len(data) and marked:
        try:
            frame = _frame_at(data, at, seq, incarnation, chain, where)
        except CorruptionError as error:
            problem = str(error)
            break
        frames.append(frame)
        at, seq, chain = at + frame.size, frame.seq, frame.chain
        marked = data[at - MARK_SIZE : at] == incarnation
    if not marked:
        at -= MARK_SIZE
        problem = f"{where}: the end of commit {seq} is damaged; restore the manifest from a backup"
    if problem and (not torn or data.find(incarnation, at) >= 0):  # what comes before a mark was durable
        raise CorruptionError(problem)
    return Frames(frames, at, not problem, not marked and incarnation.startswith(data[at:]))


def _frame_at(data: bytes, at: int, seq: int, incarnation: bytes, chain: int, where: str) -> Frame:
    """The frame at a position; its mark need not be there.

    Raises:
        CorruptionError: If there is none that follows commit `seq`.
    """
    if len(data) - at < HEAD_SIZE:
        raise CorruptionError(f"{where}: the manifest ends within a frame; restore it from a backup")
    length, writer, count, number = _HEAD.unpack_from(data, at)
    body = at + HEAD_SIZE
    head_sum = _sum(data[at : at + _HEAD.size], incarnation, chain)
    if head_sum != _CRC.unpack_from(data, at + _HEAD.size)[0]:
        raise CorruptionError(f"{where}: the head of the frame at byte {at} is damaged; restore a backup")
    if number != seq + 1:
        raise CorruptionError(f"{where}: commit {number} follows commit {seq}; restore the manifest from a backup")
    if body + length > len(data):
        raise CorruptionError(f"{where}: the manifest ends within a frame; restore it from a backup")
    sealed = data[body : body + length]
    raw = unseal(sealed, incarnation + number.to_bytes(8, "little"), where, META)
    next_chain = zlib.crc32(sealed[-_CRC.size :], head_sum)
    return _open_body(raw, (writer, count), number, HEAD_SIZE + length + MARK_SIZE, next_chain, where)


def _open_body(raw: bytes, commit: CommitId, seq: int, size: int, chain: int, where: str) -> Frame:
    try:
        added, records = unpackb(raw)
        segment = None if added is None else SegmentInfo.unpack(added, where)
        number = segment.number if segment else 0
        opened = tuple([unpack(each, where, number, seq) for each in records])
        if any(record.seq != seq for record in opened):
            raise TypeError("a record is another commit's")
        return Frame(commit, seq, opened, segment, size, chain)
    except CorruptionError:
        raise
    except Exception as error:  # msgpack raises several kinds
        raise CorruptionError(f"{where}: the frame of commit {seq} is not well formed ({error})") from error
