"""Records: what the engine stores, in memory and as bytes.

Rules of this module:

- Three kinds: a `Checkpoint`, the `Writes` of one `put_writes` call, and a `Blob` (one channel at one version). A
  record is a small *stub* (keys, links, where things are) and a *value* (opaque bytes). Frames, the header and the
  indexes of segments hold stubs; the value lies in the stub, or where its `Place` says.
- `seq` is the number of the commit that made a record. Of two records with one key the higher `seq` is the newer.
- A record in a segment refers to its own segment as segment 0, to its companion (a segment of large values that was
  made with it) as segment 1, and counts `seq` from the segment's base.
- One schema for both directions: `check` says what a record may consist of. A writer asks it before anything is queued,
  and nothing is unpacked that does not pass it: what is accepted can be read, and what comes from storage is data.
- The entries of writes are kept as *runs*, so that thousands of writes to one channel are one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lsm.errors import CorruptionError
from lsm.format import patch
from lsm.format.packing import packb, unpack_flat, unpackb

Version = patch.Version
Typed = tuple[str, bytes]
"""What a serialiser makes: the name of an encoding, and bytes."""

MOST_NAMES = 4 << 20
"""The names in one call have no more characters, so that its record fits a page of an index whatever else that has."""
MOST_CHANNELS = 1 << 15
"""No checkpoint has more channels, for the same reason: each may have places of some 1,300 bytes."""
MOST_WRITES = 1 << 20
"""No call stores more writes."""
MOST_VALUE = (1 << 32) - (1 << 20)
"""No value is larger, in bytes, before patches: a block and MessagePack hold 4 GiB, less what is said beside it."""
_LEAST_WRITE = 3  # the bytes that a write takes among the values of its call, at least
_LOWEST, _HIGHEST = -(1 << 63), (1 << 64) - 1  # what MessagePack has integers for

HIDDEN = 1
"""Kept only for its descendants' sake: walked, but neither listed nor loaded."""
ORPHAN = 2
"""Its parent is hidden or gone: shown without one."""


class Place(NamedTuple):
    """Where a value lies: `length` bytes at `start` of the unsealed block at `[offset, offset + stored)`."""

    segment: int
    offset: int
    stored: int
    start: int
    length: int

    def part(self, start: int, length: int) -> Place:
        """The place of `length` of its bytes, from `start` on."""
        return self._replace(start=self.start + start, length=length)


Value = bytes | Place
Range = tuple[int, int]
"""Where some bytes start in others, and their length."""


@dataclass(slots=True, eq=False)
class Blob:
    """The value of one channel at one version.

    Attributes:
        extends: For a patch, the version that it is applied to, or `None`.
        base: The pieces of that version, or `None` where they are to be found by `extends`.
        fresh: Whether this key is proved never to have been stored before.
        empty: The channel had no value.
        borrowed: Where parts of its new bytes lie, in order, in what tasks wrote: these are not in its value.
    """

    namespace: str
    channel: str
    version: Version
    value: Value
    seq: int = 0
    extends: Version | None = None
    fresh: bool = False
    empty: bool = False
    base: Pieces | None = None
    borrowed: tuple[Place, ...] = ()

    @property
    def own(self) -> Pieces:
        """The pieces that it adds to those of its base."""
        return (*self.borrowed, self.value if isinstance(self.value, Place) else self)

    @property
    def pieces(self) -> Pieces | None:
        """Every piece of the value from the whole one to this, or `None` where the base is not known."""
        if self.empty:
            return ()
        if self.extends is not None and self.base is None:
            return None
        return (*self.base, *self.own) if self.base else self.own


Piece = Place | Blob
"""One piece of a value: in a segment, or (a blob with its value inside) in the manifest."""
Pieces = tuple[Piece, ...]
"""The pieces of a value, the whole one first, each behind the bytes that it borrows; none at all where the channel is
known to be empty."""


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A checkpoint.

    Attributes:
        root: The checkpoint of the root namespace that it belongs to, for a subgraph's.
        time: When it was put, in milliseconds since the epoch.
        versions: The version of every channel.
        table: Where the values are, as far as this is known: a hint. Keys of `versions` that are missing here are
            looked up by (namespace, channel, version).
        terms: The hashes of its metadata, 8 bytes each, in a row.
        deltas: The channels that are rebuilt from their ancestors' writes, or `None` where nobody said.
        flags: `HIDDEN`, `ORPHAN`.
    """

    namespace: str
    id: str
    parent: str | None
    root: str | None
    time: int
    versions: dict[str, Version]
    table: dict[str, Pieces]
    terms: bytes
    deltas: tuple[str, ...] | None
    value: Value
    flags: int = 0
    seq: int = 0


Run = tuple[int, int, str]
"""Writes in a row: the index of the first, their number, and the channel of all."""


@dataclass(slots=True, eq=False)
class Writes:
    """The writes of one task, as one call stored them.

    Attributes:
        runs: Its entries, in order, as `runs_of` makes them; negative indices are LangGraph's special writes.
    """

    namespace: str
    id: str
    task_id: str
    task_path: str
    time: int
    runs: tuple[Run, ...]
    value: Value
    seq: int = 0

    @property
    def count(self) -> int:
        """How many entries it has."""
        return sum([run[1] for run in self.runs])

    @property
    def entries(self) -> list[tuple[int, str]]:
        """The (index, channel) of each write."""
        return [(index, channel) for first, count, channel in self.runs for index in range(first, first + count)]


def runs_of(entries: Iterable[tuple[int, str]]) -> tuple[Run, ...]:
    """The runs of (index, channel) pairs.

    Example:
        >>> runs_of([(0, "a"), (1, "a"), (2, "b"), (-1, "__error__")])
        ((0, 2, 'a'), (2, 1, 'b'), (-1, 1, '__error__'))
    """
    runs: list[Run] = []
    first = count = 0
    last: str | None = None
    for index, channel in entries:
        if channel == last and index == first + count:
            count += 1
            continue
        if last is not None:
            runs.append((first, count, last))
        first, count, last = index, 1, channel
    if last is not None:
        runs.append((first, count, last))
    return tuple(runs)


Record = Checkpoint | Writes | Blob


def version_key(version: Version) -> str:
    """One text for each version that Python's `==` tells apart (`1 == 1.0 == True`).

    Example:
        >>> version_key("7"), version_key(7) == version_key(7.0), version_key(0.5)
        ('s7', True, 'n0.5')
    """
    if isinstance(version, str):
        return "s" + version
    if isinstance(version, float) and not version.is_integer():  # infinities and NaN are no integers either
        return f"n{version!r}"
    return f"n{int(version)}"


# The schema.


def check(record: Record) -> None:
    """See that a record consists of what it may consist of.

    Raises:
        TypeError: If a part is of another type.
        ValueError: If a part is out of range, or the record too large.

    Example:
        >>> check(Blob("", "count", 1 << 64, b""))
        Traceback (most recent call last):
        ...
        ValueError: channel 'count' has version 18446744073709551616: an integer version lies from -2**63 to 2**64 - 1
    """
    if isinstance(record, Checkpoint):
        _check_checkpoint(record)
    elif isinstance(record, Writes):
        _check_writes(record)
    else:
        check_names(namespace=record.namespace, channel=record.channel)
        _check_version(record.channel, record.version)
        if record.extends is not None:
            _check_version(record.channel, record.extends)
    check_value(record.value)


def _check_checkpoint(checkpoint: Checkpoint) -> None:
    size = check_names(namespace=checkpoint.namespace, id=checkpoint.id)
    if checkpoint.parent is not None:
        size += check_names(parent=checkpoint.parent)
    if checkpoint.root is not None:
        size += check_names(root=checkpoint.root)
    for channel in checkpoint.deltas or ():
        size += check_names(channel=channel)
    for channel, version in checkpoint.versions.items():
        if type(channel) is type(version) is str:  # nearly always
            size += len(channel) + len(version)
        else:
            size += check_names(channel=channel) + _check_version(channel, version)
    if type(checkpoint.terms) is not bytes:
        raise TypeError(f"terms must be bytes, not {type(checkpoint.terms).__name__}")
    _check_number("the time", checkpoint.time)
    _check_number("flags", checkpoint.flags)
    _check_size(size + len(checkpoint.terms))
    if len(checkpoint.versions) > MOST_CHANNELS:
        raise ValueError(f"a checkpoint has {len(checkpoint.versions):,} channels, {MOST_CHANNELS:,} is the most")


def _check_writes(writes: Writes) -> None:
    size = check_names(namespace=writes.namespace, id=writes.id, task_id=writes.task_id, task_path=writes.task_path)
    _check_number("the time", writes.time)
    for first, count, channel in writes.runs:
        size += len(channel) if type(channel) is str else check_names(channel=channel)
        _check_number("an index", first)
        if _check_number("a count", count) < 1:
            raise ValueError(f"a run has {count} writes")
    _check_size(size)
    if writes.count > MOST_WRITES:
        raise ValueError(f"one call has {writes.count:,} writes, {MOST_WRITES:,} is the most")
    length = check_value(writes.value)
    if writes.count * _LEAST_WRITE > length:
        raise ValueError(f"{writes.count:,} writes do not fit into the {length:,} bytes of their values")


def check_put(checkpoint: Checkpoint, values: Mapping[str, tuple[Version, Typed | None]]) -> None:
    """See that a checkpoint and the new values of channels make records. Raises what `check` raises."""
    check(checkpoint)
    size = 0
    for channel, (version, typed) in values.items():
        if type(channel) is type(version) is str:
            size += len(channel) + len(version)
        else:
            size += check_names(channel=channel) + _check_version(channel, version)
        if typed is not None:
            check_typed(typed)
    _check_size(size)


def check_names(**names: Any) -> int:
    """See that names are text. Returns how long they are together. Raises what `check` raises."""
    size = 0
    for name, text in names.items():
        if type(text) is not str:
            raise TypeError(f"{name} must be a str, not {type(text).__name__}: {text!r:.80}")
        size += len(text)
    return size


def _check_size(size: int) -> None:
    if size > MOST_NAMES:
        raise ValueError(f"the names in one call have {size:,} characters, {MOST_NAMES:,} is the most")


def _check_number(name: str, number: Any) -> int:
    if type(number) is not int:
        raise TypeError(f"{name} must be an int, not {type(number).__name__}")
    if not _LOWEST <= number <= _HIGHEST:
        raise ValueError(f"{name} lies outside of -2**63 to 2**64 - 1")
    return number


def _check_version(channel: str, version: Any) -> int:
    """How long a version is."""
    kind = type(version)
    if kind is str:
        return len(version)
    if kind is int and not _LOWEST <= version <= _HIGHEST:
        shown = version if version.bit_length() < 1000 else f"of {version.bit_length():,} bits"
        raise ValueError(f"channel {channel!r} has version {shown}: an integer version lies from -2**63 to 2**64 - 1")
    if kind not in (int, float, bool):
        raise TypeError(f"channel {channel!r} has version {version!r:.80}, which is no str, int or float")
    return 9


def check_typed(value: Typed) -> None:
    """See that a serialiser has made what it should. Raises what `check` raises."""
    kind, data = value
    if type(kind) is not str:
        raise TypeError(f"a serialiser's type name must be a str, not {type(kind).__name__}: {kind!r:.80}")
    if type(data) is not bytes:
        raise TypeError(f"a serialiser must make bytes, not {type(data).__name__}")
    check_value(data)
    _check_size(len(kind))


def check_value(value: Any) -> int:
    """See that a value is bytes that fit a block, or their place. Returns their number. Raises what `check` raises."""
    if isinstance(value, Place):
        length = value.length
    elif type(value) is bytes:
        length = len(value)
    else:
        raise TypeError(f"a value must be bytes or a place, not {type(value).__name__}")
    if length > MOST_VALUE:
        raise ValueError(f"a value has {length:,} bytes, {MOST_VALUE:,} is the most")
    return length


# Values: what a place or a stub holds.


def pack_payload(checkpoint: Typed, metadata: Typed) -> bytes:
    """The value of a `Checkpoint`."""
    return packb((*checkpoint, *metadata))


def unpack_payload(value: bytes, where: str) -> tuple[Typed, Typed]:
    """The inverse of `pack_payload`: the serialised checkpoint and metadata."""
    fields = _unpack_list(value, where)
    _expect(len(fields) == 4, where)
    return _typed(fields[0], fields[1], where), _typed(fields[2], fields[3], where)


def pack_writes(values: Iterable[Typed]) -> bytes:
    """The value of `Writes`: the values in the order of its entries."""
    return packb([part for typed in values for part in typed])


def unpack_writes(value: bytes, where: str) -> list[Typed]:
    """The inverse of `pack_writes`."""
    fields = _unpack_list(value, where)
    _expect(len(fields) % 2 == 0, where)
    return [_typed(fields[i], fields[i + 1], where) for i in range(0, len(fields), 2)]


def pack_whole(value: Typed, version: Version, borrowed: Sequence[Range] = ()) -> bytes:
    """The value of a `Blob` that is stored whole, without the ranges of its bytes that it borrows."""
    return packb((version, value[0], _without(value[1], borrowed)))


def pack_patch(link: patch.Link, data: bytes, borrowed: Sequence[Range] = ()) -> bytes:
    """The value of a `Blob` that is stored as a patch, without the ranges of its new bytes that it borrows."""
    spans = [number for span in link.spans for number in span]
    return packb((link.version, _without(data, borrowed), spans, link.level))


def _without(data: bytes, borrowed: Sequence[Range]) -> bytes | list[bytes]:
    if not borrowed:
        return data
    bounds = [0, *(bound for start, length in borrowed for bound in (start, start + length)), len(data)]
    return [data[bounds[at] : bounds[at + 1]] for at in range(0, len(bounds), 2)]


def unpack_pieces(pieces: Sequence[bytes], where: str) -> tuple[Typed, tuple[patch.Link, ...]]:
    """Put a value together.

    Args:
        pieces: The values of its pieces, the whole one first.
        where: The object, for errors.

    Returns:
        The value, and its chain.
    """
    (version, kind, (data, borrowed)), *patches = _links(pieces, where)
    _expect(isinstance(kind, str), where)
    links = [patch.whole(version, data)._replace(borrowed=borrowed)]
    for version, (inserted, borrowed), numbers, level in patches:
        _expect(isinstance(numbers, list) and len(numbers) % 3 == 0, where)
        _expect(all(type(number) is int and number >= 0 for number in (level, *numbers)), where)
        spans = tuple([patch.Span(*numbers[at : at + 3]) for at in range(0, len(numbers), 3)])
        try:
            data = patch.apply(data, spans, inserted)
        except ValueError as error:
            raise CorruptionError(f"{where}: {error}") from error
        links.append(patch.Link(version, spans, len(inserted), level, borrowed))
    return (kind, data), tuple(links)


def _links(pieces: Sequence[bytes], where: str) -> list[list[Any]]:
    """The fields of a chain's links. In the place of each one's new bytes are these with what it borrows, and how many
    pieces that is. Only from the end can it be told which pieces are borrowed."""
    _expect(len(pieces) <= patch.MAX_PIECES, where)
    rest, links = list(pieces), []
    while rest:
        fields = _unpack_list(rest.pop(), where)
        _expect(len(fields) in (3, 4) and isinstance(fields[0], (str, int, float)), where)
        at = 2 if len(fields) == 3 else 1
        own = [fields[at]] if isinstance(fields[at], bytes) else fields[at]
        _expect(isinstance(own, list) and all(isinstance(part, bytes) for part in own), where)
        _expect(0 < len(own) <= len(rest) + 1, where)
        borrowed = [rest.pop() for _ in own[1:]]
        fields[at] = own[0] + b"".join(
            [part for pair in zip(reversed(borrowed), own[1:], strict=True) for part in pair]
        )
        fields[at] = fields[at], len(borrowed)
        links.append(fields)
    links.reverse()
    _expect(bool(links) and [len(fields) for fields in links] == [3] + [4] * (len(links) - 1), where)
    return links


# Stubs.


def pack(record: Record, base: int = 0, place: Callable[[Any], Place] | None = None) -> bytes:
    """One record as bytes.

    Args:
        record: What to pack. Places must be final.
        base: What its `seq` is counted from.
        place: Turns what stands for a value or piece (a segment writer's slot) into its place.
    """

    def packed(value: Any) -> Any:
        return value if isinstance(value, (bytes, Place)) else place(value) if place else _no_place(value)

    seq = record.seq - base
    if isinstance(record, Checkpoint):
        table = [
            (channel, version, None if pieces is None else [part for piece in pieces for part in packed(piece)])
            for channel, version in record.versions.items()
            for pieces in (record.table.get(channel),)
        ]
        fields: tuple[Any, ...] = (
            0,
            seq,
            packed(record.value),
            record.namespace,
            record.id,
            record.parent,
            record.root,
            record.time,
            record.flags,
            record.terms,
            record.deltas,
            table,
        )
    elif isinstance(record, Writes):
        runs = [part for run in record.runs for part in run]
        fields = (
            1,
            seq,
            packed(record.value),
            record.namespace,
            record.id,
            record.task_id,
            record.task_path,
            record.time,
            runs,
        )
    else:
        flags = record.fresh | record.empty << 1
        base_pieces = None if record.base is None else [part for piece in record.base for part in packed(piece)]
        fields = (
            2,
            seq,
            packed(record.value),
            record.namespace,
            record.channel,
            record.version,
            record.extends,
            flags,
            base_pieces,
            [part for place_ in record.borrowed for part in packed(place_)],
        )
    return packb(fields)


def _no_place(value: object) -> Place:
    raise TypeError(f"{value!r} has no place yet")


def unpack(data: bytes, where: str, segment: int = 0, base: int = 0, companion: int = 0) -> Record:
    """The inverse of `pack`.

    Args:
        data: What `pack` made.
        where: The object, for errors.
        segment: The number of the segment that it was read from, if it was: what it calls segment 0.
        base: What its `seq` is counted from.
        companion: The number of the segment that it calls segment 1.
    """
    fields = _unpack_list(data, where, unpackb)
    own = segment, companion
    try:
        kind, seq, value, *rest = fields
        if isinstance(value, list):
            value = place_of(value, own)
        if _check_number("seq", seq) < 0:
            raise ValueError("seq is below zero")
        record = _UNPACK[kind](rest, value, seq + base, own)
        check(record)
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise CorruptionError(f"{where}: a record is not well formed ({error})") from error
    return record


def _unpack_checkpoint(rest: list[Any], value: Value, seq: int, own: tuple[int, int]) -> Checkpoint:
    namespace, id_, parent, root, time, flags, terms, deltas, table = rest
    return Checkpoint(
        namespace,
        id_,
        parent,
        root,
        time,
        {channel: version for channel, version, _ in table},
        {channel: _places(pieces, own) for channel, _, pieces in table if pieces is not None},
        terms,
        None if deltas is None else tuple(deltas),
        value,
        flags,
        seq,
    )


def _unpack_writes(rest: list[Any], value: Value, seq: int, own: tuple[int, int]) -> Writes:
    namespace, id_, task_id, task_path, time, runs = rest
    found = tuple(zip(runs[::3], runs[1::3], runs[2::3], strict=True))
    return Writes(namespace, id_, task_id, task_path, time, found, value, seq)


def _unpack_blob(rest: list[Any], value: Value, seq: int, own: tuple[int, int]) -> Blob:
    namespace, channel, version, extends, flags, pieces, borrowed = rest
    return Blob(
        namespace,
        channel,
        version,
        value,
        seq,
        extends,
        bool(flags & 1),
        bool(flags & 2),
        None if pieces is None else _places(pieces, own),
        _places(borrowed, own),
    )


_UNPACK: dict[int, Callable[..., Record]] = {0: _unpack_checkpoint, 1: _unpack_writes, 2: _unpack_blob}


def _unpack_list(data: bytes, where: str, unpacked: Callable[[bytes], Any] = unpack_flat) -> list[Any]:
    try:
        value = unpacked(data)
    except Exception as error:  # msgpack raises several kinds, ValueError's and its own
        raise CorruptionError(f"{where}: a record does not unpack ({error})") from error
    _expect(isinstance(value, list), where)
    return value  # type: ignore[no-any-return]


def _expect(condition: bool, where: str) -> None:
    if not condition:
        raise CorruptionError(f"{where}: a record is not well formed")


def checked_version(value: Any) -> Version:
    """A version, as it was unpacked. Raises what `check` raises."""
    _check_version("", value)
    return value  # type: ignore[no-any-return]


def _typed(kind: Any, data: Any, where: str) -> Typed:
    _expect(type(kind) is str and type(data) is bytes, where)
    return kind, data


def place_of(numbers: Sequence[Any], own: tuple[int, int] = (0, 0)) -> Place:
    """A place, as it was unpacked.

    Args:
        numbers: What a `Place` consists of.
        own: The numbers of the segments that it calls 0 and 1.

    Raises:
        TypeError: If it is none.
    """
    for number in numbers:
        if type(number) is not int or number < 0:
            raise TypeError("a place is not made of numbers")
    segment, *rest = numbers
    return Place(segment if segment > 1 else own[segment], *rest)


def _places(numbers: list[Any], own: tuple[int, int]) -> tuple[Place, ...]:
    if len(numbers) > 5 * patch.MAX_PIECES:
        raise ValueError(f"a value has {len(numbers) // 5} pieces, {patch.MAX_PIECES} is the most")
    return tuple([place_of(numbers[start : start + 5], own) for start in range(0, len(numbers), 5)])
