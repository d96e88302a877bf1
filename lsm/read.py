"""How a thread is read.

Rules of this module:

- Every operation works on one view of the manifest, and in as few rounds as the view allows: one for the manifest, one
  for pages of indexes (none where the view knows), one for the data of all that was found.
- The newest record of a key is the truth. A checkpoint's table is a hint: it is followed while its segments are there.
  Where something newer may have replaced the value, the indexes that tell are read beside the data.
- Bytes that fail their checksum are an error, also where something else could have answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lsm.errors import CorruptionError, LSMError, NotFound
from lsm.format.bloom import HASH_BYTES, has
from lsm.format.envelope import unseal
from lsm.format.names import segment_key
from lsm.format.records import (
    HIDDEN,
    ORPHAN,
    Blob,
    Checkpoint,
    Piece,
    Pieces,
    Place,
    Record,
    Typed,
    Version,
    Writes,
    unpack_payload,
    unpack_pieces,
    unpack_writes,
    version_key,
)
from lsm.format.segment import Key, Page, Run, SegmentInfo, above, guest_term, open_run
from lsm.process import Known, Process, Thread, missing, refresh
from lsm.steps import All, GetRanges, Steps, results
from lsm.view import BlobKey, CheckpointKey, View

T = TypeVar("T")
Terms = Sequence[bytes]
_TOP = (True, "")  # above all ids


class SegmentGone(LSMError):
    """A segment of the view is not there any more: the view is old, or the store is damaged."""

    def __init__(self, info: SegmentInfo):
        super().__init__(info.ulid)
        self.info = info


@dataclass(slots=True, eq=False)
class Item:
    """A checkpoint that was found, and the calls of `put_writes` on it, in order of commit."""

    checkpoint: Checkpoint
    writes: list[Writes] = field(default_factory=list)


@dataclass(slots=True)
class PendingWrite:
    """One write of a task."""

    task_id: str
    channel: str
    value: Typed
    task_path: str
    index: int


@dataclass(slots=True)
class Stored:
    """A checkpoint as the engine gives it back.

    Attributes:
        values: The value of every channel that has one.
        writes: Its writes, in the order in which a run applies them: by task path, task id and index.
    """

    namespace: str
    id: str
    parent: str | None
    checkpoint: Typed
    metadata: Typed
    versions: dict[str, Version]
    values: dict[str, Typed]
    writes: list[PendingWrite]


def reading(process: Process, thread: Thread, answer: Callable[[View], Steps[T]], absent: T) -> Steps[T]:
    """Run steps on a fresh view of a thread, and once more where a segment has gone meanwhile.

    Args:
        process: The process.
        thread: The thread to read.
        answer: Makes the steps.
        absent: The answer for a thread that does not exist.

    Raises:
        CorruptionError: If a segment is missing that the current manifest names.
    """
    view = yield from refresh(process, thread)
    while view is not None:
        try:
            return (yield from answer(view))
        except SegmentGone as gone:
            again = yield from refresh(process, thread)
            if again is not None and any(info.ulid == gone.info.ulid for info in again.segments()):
                raise missing(process, thread, gone.info) from gone
            view = again
    return absent


# Indexes.


def load_runs(process: Process, thread: Thread, wanted: Sequence[tuple[SegmentInfo, Run]]) -> Steps[list[list[Page]]]:
    """The pages of some runs, in one round for all that are not cached."""
    keys = [("run", info.ulid, run.offset) for info, run in wanted]
    found: list[list[Page] | None] = [process.cache.get(key) for key in keys]
    lacking: dict[str, list[int]] = {}
    for at, pages in enumerate(found):
        if pages is None:
            lacking.setdefault(wanted[at][0].ulid, []).append(at)
    groups = list(lacking.values())
    requests = [
        GetRanges(
            segment_key(thread.id, wanted[group[0]][0].ulid),
            tuple((wanted[at][1].offset, wanted[at][1].offset + wanted[at][1].length) for at in group),
        )
        for group in groups
    ]
    bodies = yield from fetch(thread, requests, [wanted[group[0]][0] for group in groups])
    for group, parts in zip(groups, bodies, strict=True):
        for at, part in zip(group, parts, strict=True):
            info, run = wanted[at]
            where = segment_key(thread.id, info.ulid)
            if len(part) != run.length:
                raise CorruptionError(f"{where}: the segment ends within its index; restore it from a backup")
            pages = open_run(part, info, where)
            process.cache.put(keys[at], pages, sum(page.cost for page in pages))
            found[at] = pages
    return [pages for pages in found if pages is not None]


def fetch(thread: Thread, requests: Sequence[GetRanges], infos: Sequence[SegmentInfo]) -> Steps[list[list[bytes]]]:
    """Ranges of several segments, in one round."""
    if not requests:
        return []
    outcomes = yield All(requests)
    for outcome, info in zip(outcomes, infos, strict=True):
        if isinstance(outcome, NotFound):
            raise SegmentGone(info) from outcome
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[no-any-return]


class Gathering:
    """Records by checkpoint, from the view and from pages; the newest wins."""

    def __init__(self, thread: Thread, view: View):
        self.thread = thread
        self.view = view
        self.items: dict[CheckpointKey, Item] = {}
        self._writes: dict[CheckpointKey, list[Writes]] = {}

    def add_page(self, info: SegmentInfo, page: Page, rows: Iterable[int]) -> None:
        where = segment_key(self.thread.id, info.ulid)
        for row in rows:
            self.add(page.record(row, info, where))

    def add(self, record: Record) -> None:
        if isinstance(record, Blob):
            return
        key = record.namespace, record.id
        if isinstance(record, Writes):
            self._writes.setdefault(key, []).append(record)
            return
        item = self.items.get(key)
        if item is None or item.checkpoint.seq < record.seq:
            self.items[key] = Item(record)

    def add_at_hand(self, namespace: str | None, id_: str | None = None) -> None:
        if namespace is not None and id_ is not None:
            record = self.view.checkpoint(namespace, id_)
            if record is not None:
                self.add(record)
            return
        for record in self.view.checkpoints(namespace):
            self.add(record)

    def get(self, key: CheckpointKey) -> Item | None:
        """A checkpoint that may be shown, with its writes."""
        item = self.items.get(key)
        if item is None or item.checkpoint.flags & HIDDEN:
            return None
        return self.walked(key)

    def walked(self, key: CheckpointKey) -> Item | None:
        """A checkpoint, be it hidden, with its writes in order of commit."""
        item = self.items.get(key)
        if item is not None:
            known = {(each.seq, each.task_id, each.entries) for each in self._writes.get(key, ())}
            at_hand = [each for each in self.view.writes(*key) if (each.seq, each.task_id, each.entries) not in known]
            item.writes = sorted([*self._writes.get(key, ()), *at_hand], key=lambda each: each.seq)
        return item


def latest(process: Process, thread: Thread, view: View, namespace: str) -> Steps[Item | None]:
    """The checkpoint of a namespace with the highest id."""
    if view.knows_head(namespace):
        head = view.head_at_hand(namespace)
        if head is None:
            return None
        if view.is_complete(namespace, head.id):
            return Item(head, view.writes(namespace, head.id))
        return (yield from by_id(process, thread, view, namespace, head.id))
    scan = Scan(process, thread, view, namespace)
    found = yield from scan.next(1)
    return found[0] if found else None


def by_id(
    process: Process, thread: Thread, view: View, namespace: str, id_: str, hidden: bool = False
) -> Steps[Item | None]:
    """One checkpoint."""
    key = namespace, id_
    gathering = Gathering(thread, view)
    gathering.add_at_hand(namespace, id_)
    if not view.is_complete(namespace, id_):
        wanted = [(info, run) for info in view.holders(namespace) for run in info.checkpoint_index.covering(key, key)]
        loaded = yield from load_runs(process, thread, wanted)
        for (info, _), pages in zip(wanted, loaded, strict=True):
            for page in pages:
                gathering.add_page(info, page, page.find(key))
    return gathering.walked(key) if hidden else gathering.get(key)


class Scan:
    """The checkpoints of a thread, newest first, read no further than needed.

    Args:
        process: The process.
        thread: The thread.
        view: The view to read.
        namespace: One namespace, or `None` for all.
        before: Only ids below this.
        terms: Hashes of metadata: only checkpoints that have one of each group.
        only: Only this id.
        given: Keys to leave out.
    """

    def __init__(
        self,
        process: Process,
        thread: Thread,
        view: View,
        namespace: str | None = None,
        before: str | None = None,
        terms: Sequence[Terms] = (),
        only: str | None = None,
        given: Iterable[CheckpointKey] = (),
    ):
        self._process = process
        self._thread = thread
        self._view = view
        self._before = before
        self._terms = terms
        self._only = only
        self._gathering = Gathering(thread, view)
        self._gathering.add_at_hand(namespace)
        self._space = namespace
        self._unread: list[tuple[tuple[bool, str], SegmentInfo, Run]] = []
        for info in view.segments() if namespace is None else view.holders(namespace):
            if all(any(has(info.terms, term) for term in group) for group in terms):
                runs: Sequence[Run] = info.checkpoint_index.runs
                if namespace is not None:
                    high = (namespace, before) if before is not None else above(namespace)
                    runs = info.checkpoint_index.covering((namespace,), high)
                self._unread += [(self._bound(info, run), info, run) for run in runs]
        self._unread.sort(key=lambda each: each[0])
        self._limit = _TOP if before is None else (False, before)
        self._given: set[CheckpointKey] = set(given)
        self._passed: dict[Key, list[tuple[SegmentInfo, Page]]] = {}
        self._ready = self._sorted()

    def _bound(self, info: SegmentInfo, run: Run) -> tuple[bool, str]:
        """No id of the run that this scan wants is above."""
        upper = info.checkpoint_index.upper(run)
        return (False, upper[1]) if len(upper) > 1 and upper[0] == self._space else _TOP

    def next(self, count: int) -> Steps[list[Item]]:
        """Up to `count` more checkpoints; none at all at the end."""
        while len(self._ready) < count and self._unread:
            yield from self._read_more(count - len(self._ready))
            self._ready = self._sorted()
        found = [self._ready.pop() for _ in range(min(count, len(self._ready)))]
        self._given.update((item.checkpoint.namespace, item.checkpoint.id) for item in found)
        if self._terms:
            for item in found:
                key = item.checkpoint.namespace, item.checkpoint.id
                for info, page in self._passed.get(key, ()):
                    self._gathering.add_page(info, page, page.find(key))
            yield from invite(self._process, self._thread, self._view, self._gathering, found)
        return found

    def _sorted(self) -> list[Item]:
        """What is not below anything that may still be unread, the newest last."""
        bound = self._unread[-1][0] if self._unread else (False, "")
        ready = [
            item
            for key in self._gathering.items
            if (False, key[1]) > bound
            and self._wants(key)
            and (item := self._gathering.get(key))
            and self._matches(item)
        ]
        ready.sort(key=lambda item: (item.checkpoint.id, item.checkpoint.namespace))
        return ready

    def _wants(self, key: CheckpointKey) -> bool:
        return (
            key not in self._given
            and (self._space is None or key[0] == self._space)
            and (self._before is None or key[1] < self._before)
            and (self._only is None or key[1] == self._only)
        )

    def _matches(self, item: Item) -> bool:
        terms = item.checkpoint.terms
        own = {terms[at : at + HASH_BYTES] for at in range(0, len(terms), HASH_BYTES)} if self._terms else ()
        return all(any(term in own for term in group) for group in self._terms)

    def _read_more(self, count: int) -> Steps[None]:
        wanted, expected = [], 0.0
        while self._unread and (expected < 2 * count or self._terms):
            bound, info, run = self._unread.pop()
            wanted.append((info, run))
            if bound < self._limit:  # else nobody knows how much of it is wanted
                index = info.checkpoint_index
                expected += run.rows * info.checkpoints / sum(each.rows for each in index.runs)
        loaded = yield from load_runs(self._process, self._thread, wanted)
        for (info, _), pages in zip(wanted, loaded, strict=True):
            for page in pages:
                if not all(any(page.has_term(term) for term in group) for group in self._terms):
                    # It may begin with the last writes of a checkpoint of the page before.
                    self._passed.setdefault((*page.groups[0], page.tails[0]), []).append((info, page))
                    continue
                keys = zip(page.groups, page.tails, strict=True)
                rows_ = [row for row, (group, id_) in enumerate(keys) if self._wants((group[0], id_))]
                self._gathering.add_page(info, page, rows_)


def invite(process: Process, thread: Thread, view: View, gathering: Gathering, items: list[Item]) -> Steps[None]:
    """Add to items what segments hold of checkpoints that lie elsewhere."""
    wanted = []
    for item in items:
        key = item.checkpoint.namespace, item.checkpoint.id
        for info in view.segments():
            if has(info.shared, guest_term(*key)):
                wanted += [(info, run, key) for run in info.checkpoint_index.covering(key, key)]
    loaded = yield from load_runs(process, thread, [(info, run) for info, run, _ in wanted])
    for (info, _, key), pages in zip(wanted, loaded, strict=True):
        for page in pages:
            gathering.add_page(info, page, page.find(key))
    for at, item in enumerate(items):
        items[at] = gathering.walked((item.checkpoint.namespace, item.checkpoint.id)) or item


# Values.


class Materials:
    """All that some items need: where it is is settled first, then it is read in one round."""

    def __init__(self, process: Process, thread: Thread, view: View):
        self.process = process
        self.thread = thread
        self.view = view
        self.pieces: dict[BlobKey, Pieces] = {}
        self._blocks: dict[tuple[int, int], bytes] = {}
        self._known: dict[BlobKey, Known] = {}
        self._doubts: dict[BlobKey, tuple[int, list[SegmentInfo]]] = {}

    def settle(self, wanted: Iterable[tuple[Checkpoint, Sequence[str]]]) -> Steps[None]:
        """Find out where the values of channels are. Hints that are in doubt stay so until `collect`."""
        unknown = set()
        for checkpoint, channels in wanted:
            for channel in channels:
                key = checkpoint.namespace, channel, version_key(checkpoint.versions[channel])
                if key in self.pieces:
                    continue
                pieces, doubts = self.view.hint(checkpoint, channel)
                if pieces is None or (doubts and not pieces):
                    unknown.add(key)
                    continue
                self.pieces[key] = pieces
                if doubts:
                    self._doubts[key] = checkpoint.seq, doubts
        if unknown:
            yield from self.look_up(unknown)

    def look_up(self, keys: Iterable[BlobKey]) -> Steps[None]:
        """Find blobs by their keys; a patch whose base has moved needs its base, and so on."""
        blobs: dict[BlobKey, list[Blob]] = {}
        wanted = set(keys)
        while wanted:
            yield from self._find_blobs(dict.fromkeys(wanted, self.view.segments()), blobs)
            wanted = {
                base
                for found in list(blobs.values())
                for blob in found
                if (base := self._base(blob)) is not None and base not in blobs
            }
        for key in keys:
            self.pieces[key] = self._chain(key, blobs)

    def blobs_at(self, keys: Iterable[BlobKey]) -> Steps[dict[BlobKey, Blob]]:
        """The newest blobs of some keys, as far as there are any, each with its base."""
        keys = set(keys)
        yield from self.look_up(keys)
        found: dict[BlobKey, list[Blob]] = {}
        yield from self._find_blobs(dict.fromkeys(keys, self.view.segments()), found)
        return {key: replace(blobs[-1], base=self.pieces[key][:-1]) for key, blobs in found.items() if blobs}

    def _find_blobs(
        self, keys: Mapping[BlobKey, Sequence[SegmentInfo]], blobs: dict[BlobKey, list[Blob]]
    ) -> Steps[None]:
        """Add all records of some keys that are at hand or in some segments, in order of commit."""
        wanted = [
            (info, run, key)
            for key, infos in sorted(keys.items(), key=lambda each: each[0])
            for info in infos
            for run in info.blob_index.covering(key, key)
        ]
        runs = list(dict.fromkeys((info, run) for info, run, _ in wanted))
        loaded = yield from load_runs(self.process, self.thread, runs)
        pages_of = {(info.ulid, run.offset): pages for (info, run), pages in zip(runs, loaded, strict=True)}
        for key in keys:
            at_hand = self.view.blob(key)
            blobs[key] = [] if at_hand is None else [at_hand]
        for info, run, key in wanted:
            where = segment_key(self.thread.id, info.ulid)
            for page in pages_of[info.ulid, run.offset]:
                found = [page.record(row, info, where) for row in page.find(key)]
                blobs[key] += [blob for blob in found if isinstance(blob, Blob)]
        for key in keys:
            blobs[key].sort(key=lambda blob: blob.seq)

    def _base(self, blob: Blob) -> BlobKey | None:
        """The key of what a patch is applied to, if it takes a look-up to know where that is."""
        if blob.extends is None or (blob.pieces is not None and self.view.alive(blob.pieces)):
            return None
        return blob.namespace, blob.channel, version_key(blob.extends)

    def _chain(self, key: BlobKey, blobs: dict[BlobKey, list[Blob]], seq: int | None = None) -> Pieces:
        """The pieces of a value: of the newest blob of its key, or of the one that was the newest at a commit."""
        found = [blob for blob in blobs[key] if seq is None or blob.seq <= seq]
        blob = found[-1] if found else None
        if blob is None or blob.empty:
            return ()
        base = self._base(blob)
        if base is None:
            return blob.pieces or ()
        pieces = self._chain(base, blobs, blob.seq)
        if not pieces:
            raise CorruptionError(
                f"thread {self.thread.id!r}: channel {blob.channel!r} of namespace {blob.namespace!r} at version "
                f"{blob.version!r} is a patch on version {blob.extends!r}, which is missing in {self.thread.key}"
            )
        return (*pieces, blob.value if isinstance(blob.value, Place) else blob)

    def collect(self, places: Iterable[Place]) -> Steps[None]:
        """Read the blocks of some places, in one round for all that are not cached; hints in doubt are checked beside.
        What takes the place of one that was wrong takes another round."""
        doubts, self._doubts = self._doubts, {}
        if not doubts:
            yield from self._read(places)
            return
        _, replaced = results((yield All([self._read(places), self._check(doubts)])))
        yield from self._read([place for key in replaced for place in self.places(key)])

    def _check(self, doubts: Mapping[BlobKey, tuple[int, list[SegmentInfo]]]) -> Steps[list[BlobKey]]:
        """Put what is newer in the place of hints. Returns the keys for which there was something."""
        blobs: dict[BlobKey, list[Blob]] = {}
        yield from self._find_blobs({key: infos for key, (_, infos) in doubts.items()}, blobs)
        replaced = [key for key, (seq, _) in doubts.items() if blobs[key] and blobs[key][-1].seq > seq]
        moved = [key for key in replaced if self._base(blobs[key][-1]) is not None]
        for key in replaced:
            self._known.pop(key, None)
            if key not in moved:
                self.pieces[key] = self._chain(key, blobs)
        if moved:
            yield from self.look_up(moved)
        return replaced

    def _read(self, places: Iterable[Place]) -> Steps[None]:
        lacking: dict[int, dict[int, int]] = {}
        for place in places:
            at = place.segment, place.offset
            if at in self._blocks or place in self.view.header.inline:
                continue
            block = self.process.cache.get(self._block_key(place))
            if block is None:
                lacking.setdefault(place.segment, {})[place.offset] = place.stored
            else:
                self._blocks[at] = block
        groups = [(self._info(number), sorted(ranges.items())) for number, ranges in lacking.items()]
        requests = [
            GetRanges(
                segment_key(self.thread.id, info.ulid), tuple((start, start + stored) for start, stored in ranges)
            )
            for info, ranges in groups
        ]
        bodies = yield from fetch(self.thread, requests, [info for info, _ in groups])
        for (info, ranges), parts in zip(groups, bodies, strict=True):
            for (start, stored), part in zip(ranges, parts, strict=True):
                where = segment_key(self.thread.id, info.ulid)
                if len(part) != stored:
                    raise CorruptionError(f"{where}: the segment ends within its data; restore it from a backup")
                block = unseal(part, info.context, where)
                self._blocks[info.number, start] = block
                self.process.cache.put(("block", info.ulid, start), block, len(block) + 200)

    def _info(self, number: int) -> SegmentInfo:
        info = self.view.segment(number)
        if info is None:
            raise CorruptionError(
                f"thread {self.thread.id!r}: manifest {self.thread.key} refers to segment number {number}, "
                "which its directory does not have"
            )
        return info

    def _block_key(self, place: Place) -> tuple[str, str, int]:
        return "block", self._info(place.segment).ulid, place.offset

    def value(self, value: bytes | Place) -> bytes:
        """A value that is at hand or was collected."""
        if isinstance(value, bytes):
            return value
        if (inline := self.view.header.inline.get(value)) is not None:
            return inline
        block = self._blocks[value.segment, value.offset]
        if value.start + value.length > len(block):
            raise CorruptionError(f"{self.where(value)}: a value lies outside of its block")
        return block[value.start : value.start + value.length]

    def where(self, value: bytes | Place | Blob) -> str:
        """The object that a value lies in, for errors."""
        if isinstance(value, Place):
            return segment_key(self.thread.id, self._info(value.segment).ulid)
        return self.thread.key

    def channel(self, key: BlobKey) -> Typed | None:
        """The value of a channel, or `None` where it has none."""
        known = self.known(key)
        if known is not None:
            return known[0]
        pieces = self.pieces[key]
        if not pieces:
            return None
        parts = [self.value(piece.value if isinstance(piece, Blob) else piece) for piece in pieces]
        value, links = unpack_pieces(parts, self.where(pieces[-1]))
        cost = len(value[1]) + 100 * len(links) + 300
        self.process.cache.put(self.process.value_key(self.view, pieces[-1]), (value, links), cost)
        return value

    def known(self, key: BlobKey) -> Known | None:
        """The value of a channel and its chain, if they are cached, or were when this was asked before."""
        pieces = self.pieces[key]
        if not pieces or key in self._known:
            return self._known.get(key)
        found: Known | None = self.process.cache.get(self.process.value_key(self.view, pieces[-1]))
        if found is not None:
            self._known[key] = found
        return found

    def places(self, key: BlobKey) -> list[Place]:
        """What must be collected before `channel` can answer."""
        if self.known(key) is not None:
            return []
        return [place for piece in self.pieces[key] if (place := _place_of(piece)) is not None]


def _place_of(piece: Piece) -> Place | None:
    if isinstance(piece, Place):
        return piece
    return piece.value if isinstance(piece.value, Place) else None


def materialise(process: Process, thread: Thread, view: View, items: Sequence[Item]) -> Steps[list[Stored]]:
    """Items with their values, in one round of data (and one of indexes where hints lead nowhere)."""
    materials = Materials(process, thread, view)
    yield from materials.settle((item.checkpoint, list(item.checkpoint.versions)) for item in items)
    places: list[Place] = []
    for item in items:
        values = (item.checkpoint.value, *(writes.value for writes in item.writes))
        places += [value for value in values if isinstance(value, Place)]
        for channel, version in item.checkpoint.versions.items():
            places += materials.places((item.checkpoint.namespace, channel, version_key(version)))
    yield from materials.collect(places)
    return [_stored(materials, item) for item in items]


def _stored(materials: Materials, item: Item) -> Stored:
    checkpoint = item.checkpoint
    payload, metadata = unpack_payload(materials.value(checkpoint.value), materials.where(checkpoint.value))
    values = {}
    for channel, version in checkpoint.versions.items():
        value = materials.channel((checkpoint.namespace, channel, version_key(version)))
        if value is not None:
            values[channel] = value
    return Stored(
        checkpoint.namespace,
        checkpoint.id,
        None if checkpoint.flags & ORPHAN else checkpoint.parent,
        payload,
        metadata,
        checkpoint.versions,
        values,
        settled(materials, item.writes),
    )


def settled(materials: Materials, calls: Sequence[Writes], channels: Iterable[str] | None = None) -> list[PendingWrite]:
    """The writes that count, in the order in which a run applies them.

    Of a task's regular writes of one index the first wins, of its special ones the last (LangGraph's
    `WRITES_IDX_MAP`).

    Args:
        materials: Has their values.
        calls: The calls that stored them, in order of commit.
        channels: Only writes to these.
    """
    winners: dict[tuple[str, int], tuple[Writes, int]] = {}
    for call in calls:
        for position, (index, _) in enumerate(call.entries):
            key = call.task_id, index
            if index < 0 or key not in winners:
                winners[key] = call, position
    ordered = sorted(winners.items(), key=lambda each: (each[1][0].task_path, *each[0]))
    values: dict[int, list[Typed]] = {}
    pending = []
    for (task_id, index), (call, position) in ordered:
        channel = call.entries[position][1]
        if channels is not None and channel not in channels:
            continue
        if id(call) not in values:
            values[id(call)] = unpack_writes(materials.value(call.value), materials.where(call.value))
            if len(values[id(call)]) != len(call.entries):
                raise CorruptionError(f"{materials.where(call.value)}: writes and their values differ in number")
        pending.append(PendingWrite(task_id, channel, values[id(call)][position], call.task_path, index))
    return pending
