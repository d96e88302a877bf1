"""Segments: immutable sorted files of records.

Rules of this module:

- A segment is `magic | data blocks | index pages | footer`. Data blocks hold values, index pages hold the stubs of
  records, each a sealed block whose context is the segment's ULID. Everything else that a reader needs stands in
  the segment's `SegmentInfo`: in the manifest, and once more in the footer, so that a segment explains itself.
- There are two indexes: of checkpoints and writes by (namespace, checkpoint id), and of blobs by (namespace,
  channel, version). Each is a list of *runs* of pages; a run is one ranged read, and the info knows its first key.
- Keys in an info are cut at their first part of 48 characters or more: first keys downwards, last keys upwards. They
  bound, no more.
- Checkpoints, writes and blobs fill data blocks of their own kind, so that a chain's writes lie side by side.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from lsm.errors import CorruptionError, FormatVersionError
from lsm.format import FORMAT_VERSION, bloom
from lsm.format.envelope import META, RATIO, Compression, seal, unseal
from lsm.format.names import is_ulid
from lsm.format.packing import packb, unpackb
from lsm.format.records import HIDDEN, Blob, Checkpoint, Place, Record, Writes, pack, unpack, version_key

MAGIC = b"lsmseg" + struct.pack("<H", FORMAT_VERSION)
BLOCK = 64 << 10
_PAGE = 96 << 10
_MOST_RUNS = 48
_LARGEST_INDEX = 6 << 10  # first keys of runs, in bytes: each segment has two indexes in the header
_LARGEST_FILTER = 384
_CUT = 48
_LENGTH = struct.Struct("<I")
_TOP = "\U0010ffff"
_first = attrgetter("first")

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of index pages, read at once. No key in it is below `first`."""

    first: Key
    offset: int
    length: int
    rows: int


@dataclass(frozen=True, slots=True)
class Index:
    """The runs of one index of a segment, in order; no key is above `last`."""

    runs: tuple[Run, ...] = ()
    last: Key = ()

    def covering(self, low: Key, high: Key) -> list[Run]:
        """The runs that may hold keys from `low` to `high`, both included."""
        if not self.runs or _cut_down(high) < self.runs[0].first or _cut_down(low) > self.last:
            return []
        start = max(0, bisect_left(self.runs, _cut_down(low), key=_first) - 1)
        end = bisect_right(self.runs, high, start, key=_first)
        return list(self.runs[start:end])

    def upper(self, run: Run) -> Key | None:
        """A bound that no key of the run exceeds, if there is one."""
        at = self.runs.index(run) + 1
        bound = _cut_up(self.runs[at].first) if at < len(self.runs) else self.last
        bounds = [each for each in (bound, self.last) if not any(part.startswith(_TOP * _CUT) for part in each)]
        return bounds[0] if bounds else None


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """What the manifest knows of a segment.

    Attributes:
        number: How places refer to it; given when it is committed.
        ulid: The last part of its key.
        size: Its length, in bytes.
        base: What its records' `seq` is counted from.
        top: The highest `seq` of its records, counted likewise.
        checkpoints: How many checkpoints it has that are not hidden.
        rows: How many records.
        raw: The bytes of its values, uncompressed.
        oldest: The time of its oldest checkpoint or writes, in milliseconds since the epoch.
        terms: A Bloom filter of the terms of metadata, and of namespaces.
        shared: A Bloom filter of what other segments may have, too: checkpoints, and blobs that are not fresh.
        checkpoint_index: Of checkpoints and writes.
        blob_index: Of blobs.
        values: Whether it was written for the sake of large values.
        overrides: How many of its blobs are not fresh: they may replace older ones of the same key.
        companion: The segment that its records call segment 1, or 0.
        live: How many bytes of `raw` records still refer to, as far as is known.
    """

    number: int
    ulid: str
    size: int
    base: int
    top: int
    checkpoints: int
    rows: int
    raw: int
    oldest: int
    terms: bytes
    shared: bytes
    checkpoint_index: Index
    blob_index: Index
    values: bool = False
    overrides: int = 0
    companion: int = 0
    live: int = 0

    @property
    def context(self) -> bytes:
        """The context of the segment's sealed blocks."""
        return self.ulid.encode()

    def pack(self) -> bytes:
        """As bytes, for the manifest or the footer."""
        return packb(
            (
                self.number,
                self.ulid,
                self.size,
                self.base,
                self.top,
                self.checkpoints,
                self.rows,
                self.raw,
                self.oldest,
                self.terms,
                self.shared,
                _pack_index(self.checkpoint_index),
                _pack_index(self.blob_index),
                self.values,
                self.overrides,
                self.companion,
                self.live,
            )
        )

    @staticmethod
    def unpack(data: bytes, where: str) -> SegmentInfo:
        """The inverse of `pack`."""
        try:
            number, ulid, size, *counts, terms, shared, checkpoints, blobs, values, overrides, companion, live = (
                unpackb(data)
            )
            base, top, visible, rows, raw, oldest = counts
            numbers = (number, size, top - base, visible, rows, raw, oldest, overrides, companion, live)
            if (
                any(type(each) is not int or each < 0 for each in numbers)
                or type(base) is not int
                or not isinstance(terms, bytes)
                or not isinstance(shared, bytes)
            ):
                raise TypeError("a number or filter is of another type")
            if size and raw > RATIO * size:  # a footer does not know where it ends
                raise ValueError(f"{size:,} bytes hold no {raw:,}")
            if not is_ulid(ulid):  # it becomes a part of a key
                raise TypeError("a segment's name is not a ULID")
            return SegmentInfo(
                number,
                ulid,
                size,
                base,
                top,
                visible,
                rows,
                raw,
                oldest,
                terms,
                shared,
                _unpack_index(checkpoints),
                _unpack_index(blobs),
                bool(values),
                overrides,
                companion,
                live,
            )
        except Exception as error:  # msgpack raises several kinds
            raise CorruptionError(f"{where}: the entry of a segment is not well formed ({error})") from error


def _pack_index(index: Index) -> tuple[Any, ...]:
    return [(run.first, run.offset, run.length, run.rows) for run in index.runs], index.last


def _unpack_index(data: Any) -> Index:
    runs, last = data
    if any(type(number) is not int or number < 0 for run in runs for number in run[1:]):
        raise TypeError("a run is not made of numbers")
    if any(type(part) is not str for key in (last, *(run[0] for run in runs)) for part in key):
        raise TypeError("a key is not made of text")
    return Index(tuple(Run(tuple(first), *numbers) for first, *numbers in runs), tuple(last))


def _cut_down(key: Key) -> Key:
    """A bound that the key does not go below; what is in order stays so."""
    for at, part in enumerate(key):
        if len(part) >= _CUT:
            return (*key[:at], part[:_CUT])
    return key


def _cut_up(key: Key) -> Key:
    """A bound that no key, cut down, goes above that is cut down as this one is."""
    for at, part in enumerate(key):
        if len(part) >= _CUT:
            stem = part[:_CUT].rstrip(_TOP)
            return (*key[:at], stem[:-1] + chr(ord(stem[-1]) + 1) if stem else _TOP * (_CUT + 1))
    return key


def above(namespace: str) -> Key:
    """A bound above all keys of a namespace: no text lies between a text and itself with a zero behind it."""
    return (namespace + "\0",)


# Reading.


class Page:
    """One page of an index: the keys and stubs of some records, in order.

    Attributes:
        groups: The key of each row without its last part: (namespace,) or (namespace, channel).
        tails: The last part of each row's key: a checkpoint id or a version key.
        terms: The metadata terms of all rows.
        cost: About how much memory it takes, in bytes.
    """

    __slots__ = ("_by_key", "_rows", "cost", "groups", "tails", "terms")
    terms: bytes

    def __init__(self, raw: bytes, where: str):
        try:
            table, numbers, self.tails, self._rows, self.terms = unpackb(raw)
            groups = [tuple(group) for group in table]
            self.groups: list[Key] = [groups[number] for number in numbers]
            if not len(self.groups) == len(self.tails) == len(self._rows):
                raise TypeError("columns differ in length")
            texts = [*self.tails, *(part for group in groups for part in group)]
            for kind, values in ((str, texts), (bytes, [*self._rows, self.terms]), (int, numbers)):
                if not set(map(type, values)) <= {kind}:
                    raise TypeError("a column is of another type")
            if not all(groups) or min(numbers, default=0) < 0:
                raise TypeError("a key is incomplete")
        except Exception as error:  # msgpack raises several kinds
            raise CorruptionError(f"{where}: a page of the index is not well formed ({error})") from error
        self._by_key: dict[Key, list[int]] | None = None
        self.cost = 3 * len(raw) + 1000

    def __len__(self) -> int:
        return len(self.tails)

    def find(self, key: Key) -> list[int]:
        """The rows of a key, which may be several."""
        if self._by_key is None:
            found: dict[Key, list[int]] = {}
            for row, group in enumerate(self.groups):
                found.setdefault((*group, self.tails[row]), []).append(row)
            self._by_key = found
        return self._by_key.get(key, [])

    def record(self, row: int, info: SegmentInfo, where: str) -> Record:
        """The stub of one row."""
        return unpack(self._rows[row], where, info.number, info.base, info.companion)

    def has_term(self, term: bytes) -> bool:
        """Whether a checkpoint of the page has a metadata term."""
        at = self.terms.find(term)
        while at >= 0 and at % bloom.HASH_BYTES:
            at = self.terms.find(term, at + 1)
        return at >= 0


def open_run(data: bytes, info: SegmentInfo, where: str) -> list[Page]:
    """The pages of a run.

    Args:
        data: The bytes of the run, as read.
        info: The segment that they were read from.
        where: Its key, for errors.

    Raises:
        CorruptionError: If the bytes are damaged.
    """
    pages, at = [], 0
    while at < len(data):
        if at + _LENGTH.size > len(data):
            raise CorruptionError(f"{where}: the index is cut short")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > len(data) - at:
            raise CorruptionError(f"{where}: the index is cut short")
        pages.append(Page(unseal(data[at : at + length], info.context, where, META), where))
        at += length
    return pages


def open_footer(data: bytes, where: str) -> SegmentInfo:
    """The info that a whole segment, or its end, carries.

    Raises:
        CorruptionError: If this is not the end of a segment.
        FormatVersionError: If a newer version wrote it.
    """
    if len(data) < len(MAGIC) + _LENGTH.size or data[-len(MAGIC) : -2] != MAGIC[:-2]:
        raise CorruptionError(f"{where}: this is not a whole segment")
    if data[-2:] != MAGIC[-2:]:
        raise FormatVersionError(f"{where}: the segment has format {data[-2]}, this version knows {FORMAT_VERSION}")
    end = len(data) - len(MAGIC) - _LENGTH.size
    (length,) = _LENGTH.unpack_from(data, end)
    if length > end:
        raise CorruptionError(f"{where}: this is not a whole segment")
    return SegmentInfo.unpack(unseal(data[end - length : end], b"footer", where, META), where)


# Writing.


@dataclass(slots=True, eq=False)
class Slot:
    """A value that has been added to a segment; its place is known once its block is full."""

    segment: int
    start: int
    length: int
    offset: int = -1
    stored: int = 0

    @property
    def place(self) -> Place:
        """Where it lies, in the terms of the segment that records of it are added to."""
        if self.offset < 0:
            raise TypeError("the slot's block is not sealed yet")
        return Place(self.segment, self.offset, self.stored, self.start, self.length)


class _Block:
    """A data block that is being filled."""

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.parts: list[bytes] = []
        self.size = 0
        self.slots: list[Slot] = []

    def add(self, value: bytes) -> Slot:
        slot = Slot(self.segment, self.size, len(value))
        self.parts.append(value)
        self.slots.append(slot)
        self.size += len(value)
        return slot


class _IndexWriter:
    """An index that is being filled, in order of keys."""

    def __init__(self, compression: Compression, context: bytes):
        self._compression: Compression = compression
        self._context = context
        self._waiting: deque[tuple[Key, Record, list[Slot]]] = deque()
        self._rows: list[tuple[Key, bytes, bytes]] = []
        self._size = 0
        self._pages: list[tuple[Key, bytes, int]] = []
        self._last: Key = ()

    def add(self, key: Key, record: Record, slots: list[Slot]) -> None:
        self._waiting.append((key, record, slots))

    def drain(self, base: int) -> None:
        """Pack the records whose values have their places."""
        while self._waiting and not [slot for slot in self._waiting[0][2] if slot.offset < 0]:
            key, record, _ = self._waiting.popleft()
            packed = pack(record, base, lambda slot: slot.place)
            self._rows.append((key, packed, record.terms if isinstance(record, Checkpoint) else b""))
            self._size += len(packed)
            self._last = key
            if self._size >= _PAGE:
                self._close_page()

    def _close_page(self) -> None:
        table: dict[Key, int] = {}
        numbers = [table.setdefault(key[:-1], len(table)) for key, _, _ in self._rows]
        raw = packb(
            (
                list(table),
                numbers,
                [key[-1] for key, _, _ in self._rows],
                [packed for _, packed, _ in self._rows],
                b"".join(terms for _, _, terms in self._rows),
            )
        )
        self._pages.append((self._rows[0][0], seal(raw, self._compression, self._context, META), len(self._rows)))
        self._rows, self._size = [], 0

    def finish(self, offset: int, out: list[bytes]) -> Index:
        if self._rows:
            self._close_page()
        group = max(1, -(-len(self._pages) // _MOST_RUNS))
        firsts = [_cut_down(first) for first, _, _ in self._pages]
        while group < len(firsts) and len(packb(firsts[::group])) > _LARGEST_INDEX:
            group *= 2
        runs = []
        for start in range(0, len(self._pages), group):
            pages = self._pages[start : start + group]
            length = 0
            for _, sealed, _ in pages:
                out.append(_LENGTH.pack(len(sealed)))
                out.append(sealed)
                length += _LENGTH.size + len(sealed)
            runs.append(Run(firsts[start], offset, length, sum(rows for _, _, rows in pages)))
            offset += length
        return Index(tuple(runs), _cut_up(self._last))


class SegmentWriter:
    """Makes a segment, a record at a time, in memory that does not grow with its values.

    A value is stored first, then its record is added with the slot. Blobs are added in order of (namespace, channel,
    version key), checkpoints and writes in order of (namespace, checkpoint id). `take` hands out the bytes that are
    ready.

    Args:
        ulid: The segment's name.
        compression: How its blocks are compressed.
        base: What the records' `seq` is counted from.
        values: See `SegmentInfo.values`.
        called: What records call it: 0 in the segment itself, 1 in the one that it is the companion of.

    Example:
        >>> writer = SegmentWriter("0" * 26, "zstd")
        >>> writer.add(Blob("", "messages", "v1", writer.store(Blob, b"hello")))
        >>> info = writer.finish()
        >>> len(writer.take()) == info.size, info.rows
        (True, 1)
    """

    def __init__(self, ulid: str, compression: Compression, base: int = 0, values: bool = False, called: int = 0):
        self.ulid = ulid
        self.size = len(MAGIC)
        self._compression: Compression = compression
        self._context = ulid.encode()
        self._base = base
        self._values = values
        self._called = called
        self._out: list[bytes] = [MAGIC]
        self._blocks: dict[type, _Block] = {}
        self._checkpoints = _IndexWriter(compression, self._context)
        self._blobs = _IndexWriter(compression, self._context)
        self._hashes: set[bytes] = set()
        self._shared: set[bytes] = set()
        self._overrides = 0
        self._namespace: str | None = None
        self._raw = 0
        self._counts = [0, 0, 0, 2**63]

    @property
    def rows(self) -> int:
        """How many records have been added."""
        return self._counts[1]

    def store(self, kind: type[Record], value: bytes) -> Slot:
        """Write a value.

        Args:
            kind: The kind of its record, whose values are kept together.
            value: The value.

        Returns:
            What stands for it in records, until its place is known and ever after.
        """
        block = self._blocks.setdefault(kind, _Block(self._called))
        if block.size and block.size + len(value) > BLOCK:
            self._seal(kind)
            block = self._blocks[kind]
        slot = block.add(value)
        self._raw += len(value)
        if block.size >= BLOCK:
            self._seal(kind)
        return slot

    def part(self, slot: Slot, start: int, length: int) -> Slot:
        """What stands for `length` bytes, from `start` on, of a value that was stored."""
        part = replace(slot, start=slot.start + start, length=length)
        if part.offset < 0:
            next(block for block in self._blocks.values() if slot in block.slots).slots.append(part)
        return part

    def add(self, record: Record, guest: bool = False) -> None:
        """Index a record.

        Args:
            record: Its stub. Its value, pieces and table are places or slots.
            guest: Whether other segments may have records of the same checkpoint.
        """
        self._count(record)
        slots: list[Any] = [record.value]
        if isinstance(record, Blob):
            slots += (*(record.base or ()), *record.borrowed)
            key: Key = (record.namespace, record.channel, version_key(record.version))
            if not record.fresh:
                self._shared.add(blob_term(*key))
                self._overrides += 1
        else:
            key = (record.namespace, record.id)
            if guest:
                self._shared.add(guest_term(*key))
            if record.namespace != self._namespace:
                self._namespace = record.namespace
                self._hashes.add(namespace_term(record.namespace))
            if isinstance(record, Checkpoint):
                slots += (piece for pieces in record.table.values() for piece in pieces)
        index = self._blobs if isinstance(record, Blob) else self._checkpoints
        index.add(key, record, [slot for slot in slots if isinstance(slot, Slot)])
        index.drain(self._base)

    def _seal(self, kind: type) -> None:
        block = self._blocks[kind]
        sealed = seal(b"".join(block.parts), self._compression, self._context)
        for slot in block.slots:
            slot.offset, slot.stored = self.size, len(sealed)
        self._out.append(sealed)
        self.size += len(sealed)
        self._blocks[kind] = _Block(self._called)
        self._blobs.drain(self._base)
        self._checkpoints.drain(self._base)

    def _count(self, record: Record) -> None:
        visible, rows, top, oldest = self._counts
        if isinstance(record, Checkpoint):
            visible += not record.flags & HIDDEN
            terms = record.terms
            self._hashes.update(terms[at : at + bloom.HASH_BYTES] for at in range(0, len(terms), bloom.HASH_BYTES))
        if isinstance(record, (Checkpoint, Writes)):
            oldest = min(oldest, record.time)
        self._counts = [visible, rows + 1, max(top, record.seq - self._base), oldest]

    def take(self) -> bytes:
        """The bytes that have been made since the last call."""
        ready, self._out = b"".join(self._out), []
        return ready

    def finish(self) -> SegmentInfo:
        """End the segment.

        Returns:
            Its info, with number 0: the commit gives it one.
        """
        for kind in [kind for kind, block in self._blocks.items() if block.slots]:
            self._seal(kind)
        self._blobs.drain(self._base)
        self._checkpoints.drain(self._base)
        blobs = self._blobs.finish(self.size, self._out)
        self.size += sum(run.length for run in blobs.runs)
        checkpoints = self._checkpoints.finish(self.size, self._out)
        self.size += sum(run.length for run in checkpoints.runs)
        visible, rows, top, oldest = self._counts
        info = SegmentInfo(
            0,
            self.ulid,
            0,
            self._base,
            self._base + top,
            visible,
            rows,
            self._raw,
            oldest if oldest < 2**63 else 0,
            bloom.make(self._hashes, _LARGEST_FILTER),
            bloom.make(self._shared, _LARGEST_FILTER),
            checkpoints,
            blobs,
            self._values,
            self._overrides,
            live=self._raw,
        )
        footer = seal(info.pack(), "none", b"footer")
        self._out += [footer, _LENGTH.pack(len(footer)), MAGIC]
        self.size += len(footer) + _LENGTH.size + len(MAGIC)
        return replace(info, size=self.size)


def namespace_term(namespace: str) -> bytes:
    """The hash under which a segment's filter knows a namespace."""
    return bloom.term_hash(b"namespace", namespace.encode("utf-8", "surrogatepass"))


def guest_term(namespace: str, id_: str) -> bytes:
    """The hash under which a segment's filter knows a checkpoint of which other segments may have records, too."""
    return bloom.term_hash(b"guest", *(part.encode("utf-8", "surrogatepass") for part in (namespace, id_)))


def blob_term(*key: str) -> bytes:
    """The hash under which a segment's filter knows the key of a blob that is not fresh."""
    return bloom.term_hash(b"blob", *(part.encode("utf-8", "surrogatepass") for part in key))


def rows_of(pages: Iterable[Page], info: SegmentInfo, where: str) -> Iterator[tuple[Key, Record]]:
    """All records of some pages, with their keys."""
    for page in pages:
        for row, group in enumerate(page.groups):
            yield (*group, page.tails[row]), page.record(row, info, where)
