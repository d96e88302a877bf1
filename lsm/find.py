"""Which checkpoints there are: the latest, one by its id, those that a listing or a filter wants.

Rules of this module:

- Checkpoints and writes are found as stubs, in the view and in pages of indexes; no value is read here.
- Where the view knows the answer, no request is made. Else filters leave out the segments that cannot have it, and what
  is read is read in one round; a `Scan` reads no further than its caller wants.
- The newest record of a key is the truth. Hidden checkpoints are walked, not shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lsm.fetch import load_runs
from lsm.format.bloom import HASH_BYTES, has
from lsm.format.names import segment_key
from lsm.format.records import HIDDEN, Blob, Checkpoint, Record, Writes
from lsm.format.segment import Key, Page, Run, SegmentInfo, above, guest_term
from lsm.process import Process, Thread
from lsm.steps import Steps
from lsm.view import CheckpointKey, View

Terms = Sequence[bytes]
_TOP = (True, "")  # above all ids


@dataclass(slots=True, eq=False)
class Item:
    """A checkpoint that was found, and the calls of `put_writes` on it, in order of commit."""

    checkpoint: Checkpoint
    writes: list[Writes] = field(default_factory=list)


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
            known = {(each.seq, each.task_id, each.runs) for each in self._writes.get(key, ())}
            at_hand = [each for each in self.view.writes(*key) if (each.seq, each.task_id, each.runs) not in known]
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
        self._given: set[CheckpointKey] = set()
        self._passed: dict[Key, list[tuple[SegmentInfo, Page]]] = {}
        self._ready = self._sorted()

    def _bound(self, info: SegmentInfo, run: Run) -> tuple[bool, str]:
        """No id of the run that this scan wants is above."""
        upper = info.checkpoint_index.upper(run)
        return (False, upper[1]) if upper is not None and len(upper) > 1 and upper[0] == self._space else _TOP

    def next(self, count: int) -> Steps[list[Item]]:
        """Up to `count` more checkpoints; none at all at the end."""
        while True:
            while len(self._ready) < count and self._unread:
                yield from self._read_more(count - len(self._ready))
                self._ready = self._sorted()
            found = [self._ready.pop() for _ in range(min(count, len(self._ready)))]
            keys = [(item.checkpoint.namespace, item.checkpoint.id) for item in found]
            self._given.update(keys)
            if not self._terms:
                return found
            whole = yield from self._completed(keys)
            if whole or not found:
                return whole

    def _completed(self, keys: Sequence[CheckpointKey]) -> Steps[list[Item]]:
        """What a filter has found, with all that is stored of it: the newest record may be hidden, or not match."""
        for key in keys:
            for info, page in self._passed.get(key, ()):
                self._gathering.add_page(info, page, page.find(key))
        yield from invite(self._process, self._thread, self._view, self._gathering, keys)
        return [item for key in keys if (item := self._gathering.get(key)) and self._matches(item)]

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


def invite(
    process: Process, thread: Thread, view: View, gathering: Gathering, keys: Sequence[CheckpointKey]
) -> Steps[None]:
    """Add to gathered checkpoints what other segments hold of the same ones: writes that came before them, or, of one
    that was put again or copied, what is older or newer."""
    wanted = []
    for key in keys:
        again = gathering.items[key].checkpoint.seq > view.header.seq and not view.is_complete(*key)
        if again or any(has(info.shared, guest_term(*key)) for info in view.segments()):
            holders = view.holders(key[0])
            wanted += [(info, run, key) for info in holders for run in info.checkpoint_index.covering(key, key)]
    loaded = yield from load_runs(process, thread, [(info, run) for info, run, _ in wanted])
    for (info, _, key), pages in zip(wanted, loaded, strict=True):
        for page in pages:
            gathering.add_page(info, page, page.find(key))
