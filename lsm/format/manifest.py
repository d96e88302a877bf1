"""The manifest: a header, then commit frames.

Rules of this module:

- `prelude (20) | sealed header | frame*`. The prelude has a checksum of its own; so has the head of every frame, so
  that damage can be told from an append that a crash tore.
- Only a last frame that is incomplete, or made of zeros, is *torn*, and only where the store appends. All else that
  does not add up is `CorruptionError`.
- Frames count: the `seq` of each is that of the one before, plus one.
- Sealed blocks have the thread's incarnation as context: frames of one thread do not open in another.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgpack

from lsm.errors import CorruptionError, FormatVersionError
from lsm.format import FORMAT_VERSION
from lsm.format.envelope import META, Compression, seal, unseal
from lsm.format.packing import packb
from lsm.format.patch import Version
from lsm.format.records import Place, Record, checked_version, pack, place_of, unpack
from lsm.format.segment import SegmentInfo

MAGIC = b"lsmman"
_PRELUDE = struct.Struct("<6sHI8s")
_HEAD = struct.Struct("<I8sQQ")
_CRC = struct.Struct("<I")
PRELUDE_SIZE = _PRELUDE.size + _CRC.size
HEAD_SIZE = _HEAD.size + _CRC.size

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


@dataclass(frozen=True, slots=True)
class Frame:
    """One commit.

    Attributes:
        commit: Its id.
        seq: Its number.
        records: What it stores; their values may lie in segments.
        segment: The segment that it adds to the directory, which its records call segment 0.
        size: Its length in the manifest, in bytes.
    """

    commit: CommitId
    seq: int
    records: tuple[Record, ...]
    segment: SegmentInfo | None = None
    size: int = field(default=0, compare=False)


def pack_header(header: Header, compression: Compression) -> bytes:
    """A header as bytes."""
    body = packb(
        (
            header.thread_id,
            header.seq,
            header.next_number,
            [info.pack() for info in header.segments],
            [pack(record) for record in header.carried],
            [(place, value) for place, value in header.inline.items()],
            header.heads,
            header.peaks,
            header.commits,
            header.retired,
            header.changed,
            header.stray,
            header.partial,
        )
    )
    sealed = seal(body, compression, header.incarnation, META)
    prelude = _PRELUDE.pack(MAGIC, FORMAT_VERSION, len(sealed), header.incarnation)
    return b"".join((prelude, _CRC.pack(zlib.crc32(prelude)), sealed))


def unpack_header(data: bytes, where: str) -> tuple[Header, int]:
    """The header at the beginning of a manifest, and its length.

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
        fields = msgpack.unpackb(body, unicode_errors="surrogatepass")
        thread_id, seq, next_number, segments, carried, inline, *known, commits, retired, changed, stray, partial = (
            fields
        )
        heads, peaks = known
        texts = [thread_id, *(text for head in heads for text in head), *(text for peak in peaks for text in peak[:2])]
        texts += [*(ulid for ulid, _ in retired), *partial]
        numbers = [seq, next_number, changed, *(count for _, count in commits), *(at for _, at in retired)]
        raws = [*(value for _, value in inline), *(writer for writer, _ in commits)]
        for kind, values in ((str, texts), (int, numbers), (bytes, raws), (bool, [stray])):
            if not all(type(value) is kind for value in values):
                raise TypeError("a field is of another type")
        header = Header(
            thread_id,
            incarnation,
            seq,
            next_number,
            tuple([SegmentInfo.unpack(each, where) for each in segments]),
            tuple([unpack(each, where) for each in carried]),
            {place_of(place): value for place, value in inline},
            tuple([(namespace, id_) for namespace, id_ in heads]),
            tuple([(namespace, channel, checked_version(version)) for namespace, channel, version in peaks]),
            tuple([(writer, count) for writer, count in commits]),
            tuple([(ulid, at) for ulid, at in retired]),
            changed,
            stray,
            tuple(partial),
        )
    except CorruptionError:
        raise
    except Exception as error:  # msgpack raises several kinds
        raise CorruptionError(f"{where}: the header is not well formed ({error})") from error
    return header, end


def pack_frame(
    commit: CommitId,
    seq: int,
    records: Sequence[Record],
    segment: SegmentInfo | None,
    incarnation: bytes,
    compression: Compression,
) -> bytes:
    """A frame as bytes."""
    body = packb((segment and segment.pack(), [pack(record, seq) for record in records]))
    sealed = seal(body, compression, incarnation + seq.to_bytes(8, "little"), META)
    head = _HEAD.pack(len(sealed), *commit, seq)
    return b"".join((head, _CRC.pack(zlib.crc32(head, zlib.crc32(incarnation))), sealed))


def unpack_frames(
    data: bytes, start: int, seq: int, incarnation: bytes, torn: bool, where: str
) -> tuple[list[Frame], int]:
    """The frames of a manifest, from a position on.

    Args:
        data: The bytes.
        start: Where the first frame begins.
        seq: The number of the commit before it.
        incarnation: The thread's.
        torn: Whether a torn last frame may be there: it is left out.
        where: The manifest's key, for errors.

    Returns:
        The frames, and where the last whole one ends.

    Raises:
        CorruptionError: If anything but a torn last frame does not add up.
    """
    frames, at = [], start
    while at < len(data):
        rest = len(data) - at
        if torn and (rest < HEAD_SIZE or not any(data[at : at + HEAD_SIZE])) and _zeros_or_short(data, at):
            break
        if rest < HEAD_SIZE:
            raise CorruptionError(f"{where}: the manifest ends within a frame; restore it from a backup")
        length, writer, count, number = _HEAD.unpack_from(data, at)
        head = data[at : at + _HEAD.size]
        if zlib.crc32(head, zlib.crc32(incarnation)) != _CRC.unpack_from(data, at + _HEAD.size)[0]:
            raise CorruptionError(f"{where}: the head of the frame at byte {at} is damaged; restore a backup")
        if number != seq + 1:
            raise CorruptionError(f"{where}: commit {number} follows commit {seq}; restore the manifest from a backup")
        body = at + HEAD_SIZE
        if body + length > len(data) or (torn and body + length == len(data) and not any(data[body:])):
            if torn:
                break
            raise CorruptionError(f"{where}: the manifest ends within a frame; restore it from a backup")
        raw = unseal(data[body : body + length], incarnation + number.to_bytes(8, "little"), where, META)
        frames.append(_open_body(raw, (writer, count), number, HEAD_SIZE + length, where))
        at, seq = body + length, number
    return frames, at


def _zeros_or_short(data: bytes, at: int) -> bool:
    return len(data) - at < HEAD_SIZE or not any(memoryview(data)[at:])


def _open_body(raw: bytes, commit: CommitId, seq: int, size: int, where: str) -> Frame:
    try:
        added, records = msgpack.unpackb(raw, unicode_errors="surrogatepass")
        segment = None if added is None else SegmentInfo.unpack(added, where)
        number = segment.number if segment else 0
        return Frame(commit, seq, tuple([unpack(each, where, number, seq) for each in records]), segment, size)
    except CorruptionError:
        raise
    except Exception as error:  # msgpack raises several kinds
        raise CorruptionError(f"{where}: the frame of commit {seq} is not well formed ({error})") from error
