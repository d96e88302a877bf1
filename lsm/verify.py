"""Reading and checking all that is stored of a thread.

Rules of this module:

- It reads what readers read, with the code that they read with, through a cache of its own that begins empty: nothing
  counts as read that was not.
- It changes nothing. Only a repair does, and that drops a torn tail, which the next write would drop, too.
- A problem is a text that names the object. One problem does not hide the others, except that records are checked only
  where the indexes of all segments can be read.
- Memory is bounded: by a page of an index and a batch of values; beside that, of the checkpoints of one namespace the
  ids, parents and names of stored channels are held.
- A thread that is written to meanwhile is no problem: it is begun again where a segment was replaced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from lsm.cache import Cache
from lsm.collect import Collected, list_all
from lsm.errors import Conflict, CorruptionError, FormatVersionError, LSMError, NotFound, StorageError
from lsm.fetch import SegmentGone, load_runs
from lsm.find import Item, by_id
from lsm.format.bloom import HASH_BYTES, has
from lsm.format.names import ROOT_KEY, SEGMENTS, segment_key, segments_prefix
from lsm.format.records import (
    HIDDEN,
    ORPHAN,
    Blob,
    Checkpoint,
    Place,
    Record,
    Writes,
    unpack_payload,
    unpack_writes,
    version_key,
)
from lsm.format.segment import MAGIC, Index, SegmentInfo, blob_term, namespace_term, open_footer, rows_of
from lsm.merge import Rows
from lsm.process import Process, Thread, missing
from lsm.root import verify_root
from lsm.steps import Entry, Get, GetRanges, PutIf, Steps
from lsm.values import Materials
from lsm.view import CheckpointKey, View, assemble, is_later, open_view
from lsm.walk import Manifests, side_by_side, thread_id_at

T = TypeVar("T")

_CACHE = 32 << 20
_FOOTER = 256 << 10
_BATCH = 8 << 20
_MOST_ITEMS = 512
_BLOCK = 64 << 10
_ATTEMPTS = 20


@dataclass(slots=True)
class Report:
    """What was found out about a thread.

    Attributes:
        thread_id: The thread.
        problems: What is wrong, each naming the object; empty for a thread that is whole.
        checkpoints: How many checkpoints it has, the hidden ones included.
        writes: How many calls of `put_writes`.
        blobs: How many values of channels.
        segments: How many segments.
        bytes: How much it takes on storage, without garbage.
        torn: How many bytes at the end of its manifest a crash left behind; they are no part of it.
        garbage: Objects that nothing refers to: replaced segments, and uploads that were never committed.
        repaired: Whether the torn bytes were dropped.
    """

    thread_id: str
    problems: list[str] = field(default_factory=list)
    checkpoints: int = 0
    writes: int = 0
    blobs: int = 0
    segments: int = 0
    bytes: int = 0
    torn: int = 0
    garbage: Collected = field(default_factory=Collected)
    repaired: bool = False


@dataclass(slots=True)
class StoreReport:
    """What was found out about a store: the sums of its threads' reports.

    Attributes:
        threads: How many threads.
        problems: By thread id (or the key of what is no thread's), what is wrong.
    """

    threads: int = 0
    checkpoints: int = 0
    segments: int = 0
    bytes: int = 0
    torn: int = 0
    repaired: int = 0
    garbage: Collected = field(default_factory=Collected)
    problems: dict[str, list[str]] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        """Count one thread."""
        self.threads += 1
        self.checkpoints += report.checkpoints
        self.segments += report.segments
        self.bytes += report.bytes
        self.torn += report.torn > 0
        self.repaired += report.repaired
        self.garbage.add(report.garbage)
        if report.problems:
            self.problems[report.thread_id] = report.problems


def verify_thread(process: Process, thread: Thread, repair: bool = False) -> Steps[Report]:
    """Check one thread: its manifest, every segment, every record and value, every reference, every chain.

    Args:
        process: The process; what it has cached is not used.
        thread: The thread.
        repair: Whether to drop a torn tail.

    Returns:
        The report. A thread that does not exist has no problems, and all its objects are garbage.

    Raises:
        StorageError: If the store does not answer.
    """
    for _ in range(_ATTEMPTS):
        listed = yield from list_all(segments_prefix(thread.id))
        report = Report(thread.id)
        found = yield Get(thread.key)
        if found is None:
            report.garbage = Collected(len(listed), sum(entry.size for entry in listed))
            return report
        try:
            view = open_view(thread.key, found.body, found.tag, thread.id, process.appends)
        except (CorruptionError, FormatVersionError) as error:
            report.problems.append(str(error))
            return report
        report.torn = len(found.body) - view.size
        if view.torn and repair:
            try:
                yield PutIf(thread.key, found.body[: view.size], found.tag)
            except Conflict:
                continue
            report.repaired = True
        check = _Check(process, thread, view, listed, report)
        try:
            yield from check.run()
        except SegmentGone as gone:
            again = yield Get(thread.key)
            if again is None or again.body[: view.size] != found.body[: view.size]:
                continue
            report.problems.append(str(missing(process, thread, gone.info)))
        return report
    report.problems.append(f"{thread.key}: the thread changed all the time while it was checked; try again")
    return report


def verify_store(
    process: Process, each: Callable[[Report], None] | None = None, repair: bool = False, width: int = 4
) -> Steps[StoreReport]:
    """Check a whole store.

    Args:
        process: The process.
        each: Told the report of every thread.
        repair: Whether to drop torn tails.
        width: How many threads at once.
    """
    total = StoreReport()
    keys: set[str] = set()

    def check(entry: Entry) -> Steps[None]:
        try:
            thread_id = yield from thread_id_at(process, entry.key)
            if thread_id is None:
                return
            report = yield from verify_thread(process, process.thread(thread_id), repair)
        except LSMError as error:
            report = Report(entry.key, [str(error)])
        total.add(report)
        if each is not None:
            each(report)

    yield from _verify_root(process, total)
    manifests = Manifests()
    while not manifests.done:
        page = yield from manifests.next()
        keys.update(entry.key for entry in page)
        yield from side_by_side(deque(page), check, width)
    for entry in (yield from list_all(SEGMENTS)):
        name = entry.key.removeprefix(SEGMENTS).rsplit("/", 1)[0]
        if f"manifests/{name}" not in keys:
            total.garbage.add(Collected(1, entry.size))
    return total


def _verify_root(process: Process, total: StoreReport) -> Steps[None]:
    try:
        if (yield Get(ROOT_KEY)) is not None:  # else it would be written
            yield from verify_root(process.url)
    except StorageError:
        raise
    except LSMError as error:
        total.problems[ROOT_KEY] = [str(error)]


class _Node(NamedTuple):
    """A checkpoint, as far as chains are concerned."""

    seq: int
    parent: str | None
    flags: int
    deltas: tuple[str, ...]
    stored: frozenset[str]


_Group = tuple[Any, list[Any]]
"""A key, and its records in order of commit."""


class _Check:
    """The check of one view of a thread."""

    def __init__(self, process: Process, thread: Thread, view: View, listed: Sequence[Entry], report: Report):
        self._process = replace(process, cache=Cache(_CACHE), busy={}, failed={})
        self._thread = thread
        self._header = view.header
        # Without the values in the header, so that those in the segments are read.
        self._view = replace(view, header=replace(view.header, inline={}))
        self._sizes = {entry.key.rsplit("/", 1)[-1]: entry.size for entry in listed}
        self._report = report
        self._nodes: dict[str, _Node] = {}
        self._at_hand: dict[str, dict[str, _Node]] = {}
        self._names: dict[frozenset[str], frozenset[str]] = {}

    def run(self) -> Steps[None]:
        infos = self._view.segments()
        report = self._report
        report.segments = len(infos)
        report.bytes = self._view.size + sum(info.size for info in infos)
        named = {info.ulid for info in infos}
        garbage = [size for name, size in self._sizes.items() if name not in named]
        report.garbage = Collected(len(garbage), sum(garbage))
        if len({info.number for info in infos}) < len(infos):
            self._problem(f"{self._thread.key}: two segments have the same number")
        before = len(report.problems)
        for info in infos:
            yield from self._check_segment(info)
        if len(report.problems) > before:
            return  # records cannot be told from gaps where an index is damaged
        logs = [info for info in infos if not info.values]
        yield from self._check_at_hand()
        yield from self._in_batches(Rows(self._process, self._thread, logs, blobs=True), self._check_blobs)
        yield from self._in_batches(Rows(self._process, self._thread, logs, blobs=False), self._check_rows)
        yield from self._check_carried()

    def _problem(self, text: str) -> None:
        if text not in self._report.problems:
            self._report.problems.append(text)

    def _expect(self, condition: bool, text: str) -> None:
        if not condition:
            self._problem(text)

    # Segments.

    def _check_segment(self, info: SegmentInfo) -> Steps[None]:
        where = segment_key(self._thread.id, info.ulid)
        size = self._sizes.get(info.ulid, info.size)
        self._expect(size == info.size, f"{where}: it has {size} bytes instead of {info.size}; restore a backup")
        try:
            ranges = ((0, len(MAGIC)), (max(0, info.size - _FOOTER), info.size))
            begin, end = yield GetRanges(where, ranges)
            self._expect(begin == MAGIC, f"{where}: its first bytes are damaged; restore it from a backup")
            footer = open_footer(end, where)
            same = replace(
                footer, number=info.number, size=info.size, base=info.base, companion=info.companion, live=info.live
            )
            moved = info.top - footer.top  # a segment of large values gets its numbers from its commit
            same = replace(same, top=info.top) if info.values else same
            self._expect(
                same == info and (info.values or moved == 0),
                f"{where}: its footer says something else than the directory in {self._thread.key}",
            )
            seen = [0, 0]
            at = 0
            for index, blobs in ((info.blob_index, True), (info.checkpoint_index, False)):
                for run in index.runs:
                    self._expect(at in (0, run.offset), f"{where}: its index has gaps")
                    at = run.offset + run.length
                yield from self._check_index(info, index, blobs, where, seen)
            self._expect(
                seen == [info.rows, info.checkpoints],
                f"{where}: it has {seen[0]} records, {seen[1]} of them checkpoints, where the directory in "
                f"{self._thread.key} says {info.rows} and {info.checkpoints}",
            )
        except NotFound as error:
            raise SegmentGone(info) from error
        except (CorruptionError, FormatVersionError) as error:
            self._problem(str(error))

    def _check_index(self, info: SegmentInfo, index: Index, blobs: bool, where: str, seen: list[int]) -> Steps[None]:
        last: tuple[str, ...] = ()
        namespace = None
        for run in index.runs:
            (pages,) = yield from load_runs(self._process, self._thread, [(info, run)])
            for key, record in rows_of(pages, info, where):
                self._expect(key >= last, f"{where}: its records are out of order at {key}")
                self._expect(isinstance(record, Blob) == blobs, f"{where}: a record is in the wrong index at {key}")
                self._expect(info.base <= record.seq <= info.top, f"{where}: commit {record.seq} has no place in it")
                if key != last:
                    found = run in index.covering(key, key)
                    self._expect(found, f"{where}: the directory does not lead to its record {key}")
                last = key
                seen[0] += 1
                if isinstance(record, Blob):
                    found = record.fresh or has(info.shared, blob_term(*key))
                    self._expect(found, f"{where}: its filter does not know {key}")
                    continue
                if key[0] != namespace:
                    namespace = key[0]
                    found = has(info.terms, namespace_term(namespace))
                    self._expect(found, f"{where}: its filter does not know namespace {namespace!r}")
                if isinstance(record, Checkpoint):
                    seen[1] += not record.flags & HIDDEN
                    terms = record.terms
                    for start in range(0, len(terms), HASH_BYTES):
                        found = has(info.terms, terms[start : start + HASH_BYTES])
                        self._expect(found, f"{where}: its filter does not know the metadata of {key}")

    # Records.

    def _in_batches(self, rows: Rows, check: Callable[[Sequence[_Group]], Steps[None]]) -> Steps[None]:
        """Check the records of all segments, some at a time, and each namespace as a whole at its end."""
        batch: list[_Group] = []
        blocks: dict[tuple[int, int], int] = {}
        namespace: str | None = None
        while True:
            found = yield from rows.group()
            ends = found is None or (batch and found[0][0] != namespace)
            if batch and (ends or len(batch) >= _MOST_ITEMS or sum(blocks.values()) >= _BATCH):
                yield from self._carefully(batch, check)
                batch, blocks = [], {}
            if ends and namespace is not None and self._nodes:
                self._check_namespace(namespace)
            if found is None:
                return
            namespace = found[0][0]
            batch.append(found)
            for record in found[1]:
                if isinstance(record.value, Place):
                    place = record.value
                    key = place.segment, place.offset
                    blocks[key] = max(blocks.get(key, _BLOCK), place.start + place.length)

    def _carefully(self, batch: Sequence[T], check: Callable[[Sequence[T]], Steps[None]]) -> Steps[None]:
        """Check a batch at once; where that fails, its halves, down to what is damaged."""
        try:
            if batch:
                yield from check(batch)
        except (CorruptionError, FormatVersionError) as error:
            if len(batch) == 1:
                self._problem(str(error))
                return
            middle = len(batch) // 2
            yield from self._carefully(batch[:middle], check)
            yield from self._carefully(batch[middle:], check)

    def _check_blobs(self, batch: Sequence[_Group]) -> Steps[None]:
        """Rebuild the values of some keys, and read those that they replaced."""
        materials = Materials(self._process, self._thread, self._view)
        yield from materials.look_up([key for key, _ in batch])
        places = [place for key, _ in batch for place in materials.places(key)]
        yield from materials.collect([*places, *_places(record for _, records in batch for record in records)])
        for key, records in batch:
            materials.channel(key)
            for blob in records:
                materials.value(blob.value)
                self._check_peak(blob)
        self._report.blobs += len(batch)

    def _check_peak(self, blob: Blob) -> None:
        tail = self._view.tail
        if blob.namespace in tail.carried_heads:
            peak = tail.peaks.get((blob.namespace, blob.channel))
            self._expect(
                peak is not None and not is_later(blob.version, peak),
                f"{self._thread.key}: it does not know that channel {blob.channel!r} of namespace {blob.namespace!r} "
                f"has had version {blob.version!r}",
            )

    def _check_rows(self, batch: Sequence[_Group]) -> Steps[None]:
        """Read checkpoints and writes, and see that every channel leads to its value."""
        self._nodes.update(_unread(batch))
        self._nodes.update((yield from self._read_rows(batch)))
        for _, records in batch:
            self._report.writes += sum(isinstance(record, Writes) for record in records)
            self._report.checkpoints += any(isinstance(record, Checkpoint) for record in records)

    def _read_rows(self, batch: Sequence[_Group]) -> Steps[dict[str, _Node]]:
        materials = Materials(self._process, self._thread, self._view)
        newest = [found[-1] for _, records in batch if (found := [r for r in records if isinstance(r, Checkpoint)])]
        keys = {(each.namespace, channel, version_key(v)) for each in newest for channel, v in each.versions.items()}
        yield from materials.look_up(keys)
        yield from materials.collect(_places(record for _, records in batch for record in records))
        for _, records in batch:
            for record in records:
                self._open(materials, record)
        nodes: dict[str, _Node] = {}
        for each in newest:
            stored = set()
            for channel, version in each.versions.items():
                key = each.namespace, channel, version_key(version)
                hint = self._view.pieces(each, channel)
                if hint is not None and hint != materials.pieces[key]:
                    yield from self._compare(each, channel, hint, materials.pieces[key])
                if materials.pieces[key]:
                    stored.add(channel)
            names = frozenset(stored)
            names = self._names.setdefault(names, names)
            nodes[each.id] = _Node(each.seq, each.parent, each.flags, each.deltas or (), names)
        return nodes

    def _open(self, materials: Materials, record: Checkpoint | Writes) -> None:
        value = materials.value(record.value)
        where = materials.where(record.value)
        if isinstance(record, Writes):
            values = unpack_writes(value, where)
            self._expect(
                len(values) == len(record.entries),
                f"{where}: the writes of task {record.task_id!r} on checkpoint {record.id!r} of namespace "
                f"{record.namespace!r} and their values differ in number",
            )
        elif not record.flags & HIDDEN:
            unpack_payload(value, where)

    def _compare(self, checkpoint: Checkpoint, channel: str, hint: Any, pieces: Any) -> Steps[None]:
        """See that a value is the same where a checkpoint says that it is, and where its key leads to."""
        key = checkpoint.namespace, channel, version_key(checkpoint.versions[channel])
        values = []
        for each in (hint, pieces):
            materials = Materials(self._process, self._thread, self._view)
            materials.pieces[key] = each
            yield from materials.collect(materials.places(key))
            values.append(materials.channel(key))
        self._expect(
            values[0] == values[1],
            f"{self._thread.key}: checkpoint {checkpoint.id!r} of namespace {checkpoint.namespace!r} leads to another "
            f"value of channel {channel!r} than version {checkpoint.versions[channel]!r}",
        )

    # The manifest.

    def _check_at_hand(self) -> Steps[None]:
        """Check the records of the manifest itself."""
        tail, seq = self._view.tail, self._header.seq
        blobs: list[_Group] = list(tail.blobs.items())
        yield from self._carefully(blobs, self._check_blobs)
        groups: dict[CheckpointKey, list[Any]] = {}
        for namespace, by_id_ in tail.checkpoints.items():
            for id_, records in by_id_.items():
                groups.setdefault((namespace, id_), []).extend(records)
        for key, calls in tail.writes.items():
            groups.setdefault(key, []).extend(calls)
        for key, records in groups.items():
            nodes = _unread([(key, records)])
            try:
                nodes = yield from self._read_rows([(key, records)])
            except (CorruptionError, FormatVersionError) as error:
                self._problem(str(error))
            added = {id_: node for id_, node in nodes.items() if node.seq > seq}
            self._at_hand.setdefault(key[0], {}).update(added)
            self._report.checkpoints += len(added)
            self._report.writes += sum(isinstance(each, Writes) and each.seq > seq for each in records)
        self._report.blobs = sum(any(blob.seq > seq for blob in records) for records in tail.blobs.values())

    def _check_carried(self) -> Steps[None]:
        """See that what the header carries is what the segments have."""
        for namespace in [*self._at_hand]:
            self._check_namespace(namespace)
        header, thread = self._header, self._thread
        slim = replace(header, carried=(), inline={}, heads=(), peaks=(), partial=())
        flushed = assemble(thread.key, slim, b"", (), None)
        for record in header.carried:
            yield from self._carefully([record], lambda batch: self._check_same(flushed, batch[0]))
        for namespace, id_ in header.heads:
            item = yield from by_id(self._process, thread, flushed, namespace, id_, hidden=True)
            carried = [each for each in header.carried if isinstance(each, Writes)]
            own = {
                entry for each in carried if (each.namespace, each.id) == (namespace, id_) for entry in _entries(each)
            }
            there = {entry for each in (item.writes if item else ()) for entry in _entries(each)}
            self._expect(
                item is not None and (own == there or namespace in header.partial),
                f"{thread.key}: the header does not carry the head of namespace {namespace!r}, {id_!r}, as it is",
            )
        yield from self._carefully(list(header.inline.items()), self._check_inline)

    def _check_same(self, flushed: View, record: Record) -> Steps[None]:
        there: Sequence[Record]
        materials = Materials(self._process, self._thread, flushed)
        if isinstance(record, Blob):
            key = record.namespace, record.channel, version_key(record.version)
            there = list((yield from materials.blobs_at([key])).values())
        else:
            item: Item | None = yield from by_id(
                self._process, self._thread, flushed, record.namespace, record.id, hidden=True
            )
            if isinstance(record, Checkpoint):
                there = [item.checkpoint] if item is not None else []
            else:
                there = yield from self._writes_at(flushed, record)
        yield from materials.collect(_places([record, *there]))
        found = any(
            _described(each) == _described(record) and materials.value(each.value) == materials.value(record.value)
            for each in there
        )
        self._expect(found, f"{self._thread.key}: the header carries a record that no segment has: {_name(record)}")

    def _writes_at(self, flushed: View, record: Writes) -> Steps[list[Writes]]:
        """The writes of a checkpoint in segments; the checkpoint itself need not be there."""
        key = record.namespace, record.id
        found: list[Writes] = []
        for info in flushed.holders(record.namespace):
            for run in info.checkpoint_index.covering(key, key):
                (pages,) = yield from load_runs(self._process, self._thread, [(info, run)])
                where = segment_key(self._thread.id, info.ulid)
                rows = [page.record(row, info, where) for page in pages for row in page.find(key)]
                found += [row for row in rows if isinstance(row, Writes)]
        return found

    def _check_inline(self, batch: Sequence[tuple[Place, bytes]]) -> Steps[None]:
        materials = Materials(self._process, self._thread, self._view)
        yield from materials.collect([place for place, _ in batch])
        for place, value in batch:
            self._expect(
                materials.value(place) == value,
                f"{self._thread.key}: the header carries another value than {materials.where(place)} has",
            )

    # Namespaces.

    def _check_namespace(self, namespace: str) -> None:
        """Check the head of a namespace, and the chains that its checkpoints are rebuilt from."""
        nodes, self._nodes = self._nodes, {}
        head = dict(self._header.heads).get(namespace)
        if head is not None:
            highest = max((id_ for id_, node in nodes.items() if not node.flags & HIDDEN), default=None)
            self._expect(
                highest == head,
                f"{self._thread.key}: the header says that the head of namespace {namespace!r} is {head!r}, but it is "
                f"{highest!r}",
            )
        nodes.update(self._at_hand.pop(namespace, {}))
        whole: set[tuple[str, str]] = set()
        for id_, node in nodes.items():
            if not node.flags & HIDDEN:
                for channel in set(node.deltas) - node.stored:
                    self._check_chain(namespace, nodes, id_, channel, whole)

    def _check_chain(
        self, namespace: str, nodes: dict[str, _Node], start: str, channel: str, whole: set[tuple[str, str]]
    ) -> None:
        """Walk the ancestors of a checkpoint up to a stored value, or to the first of them. A rewrite leaves out those
        before the first contribution; the child of what it left out says so by its flags."""
        at = start
        while (at, channel) not in whole:
            whole.add((at, channel))
            node = nodes[at]
            if node.parent is None or (at != start and channel in node.stored):
                return
            if node.parent not in nodes:
                self._expect(
                    bool(node.flags & (HIDDEN | ORPHAN)),
                    f"{self._thread.key}: channel {channel!r} of namespace {namespace!r} is rebuilt from ancestors, of "
                    f"which {node.parent!r}, the parent of {at!r}, is missing",
                )
                return
            at = node.parent


def _unread(batch: Sequence[_Group]) -> dict[str, _Node]:
    """The nodes of checkpoints that are not read yet: what cannot be read is not missing, too."""
    checkpoints = [record for _, records in batch for record in records if isinstance(record, Checkpoint)]
    return {each.id: _Node(each.seq, None, each.flags, (), frozenset()) for each in checkpoints}


def _places(records: Iterable[Record]) -> list[Place]:
    return [record.value for record in records if isinstance(record.value, Place)]


def _entries(writes: Writes) -> set[tuple[str, int, str]]:
    return {(writes.task_id, index, channel) for index, channel in writes.entries}


def _described(record: Record) -> tuple[Any, ...]:
    """What two copies of a record have in common."""
    if isinstance(record, Checkpoint):
        parts: tuple[Any, ...] = (record.parent, record.root, record.versions, record.terms, record.deltas)
        return (record.namespace, record.id, record.seq, record.time, record.flags, *parts)
    if isinstance(record, Writes):
        return record.namespace, record.id, record.seq, record.task_id, record.task_path, record.time, record.entries
    return record.namespace, record.channel, record.version, record.seq, record.extends, record.empty


def _name(record: Record) -> str:
    if isinstance(record, Blob):
        return f"channel {record.channel!r} of namespace {record.namespace!r} at version {record.version!r}"
    kind = "checkpoint" if isinstance(record, Checkpoint) else f"writes of task {record.task_id!r} on checkpoint"
    return f"{kind} {record.id!r} of namespace {record.namespace!r}"
