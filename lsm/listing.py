"""Checkpoints, newest first, a batch at a time.

Rules of this module:

- A `Listing` answers from the views that its threads had when it began; abandoning it costs nothing.
- Over several threads it is a merge of sorted sequences: by id, then namespace, the highest first, then thread.
- Where a segment has gone meanwhile (a listing that took longer than the collector's grace), the thread is read anew:
  what was chosen is found by its key, and the rest is what comes after the last checkpoint that was chosen of any
  thread. So whatever is still there is given, once and in order, or the listing ends in an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from lsm.errors import CorruptionError, ReadTimeout
from lsm.fetch import SegmentGone
from lsm.find import Item, Scan, Terms, by_id
from lsm.format.manifest import MAGIC
from lsm.format.names import MANIFESTS, kind_of, manifest_key, thread_id_of
from lsm.process import Process, Thread, refresh
from lsm.read import Stored, materialise
from lsm.retention import Horizon, Retention
from lsm.steps import All, Get, List, Now, Steps, results
from lsm.turn import Patience, look_again
from lsm.view import View, open_view
from lsm.walk import own

_BATCH = 16


class _Newest(tuple[str, str]):
    """The id and namespace of a checkpoint; the highest comes first."""

    __slots__ = ()

    def __lt__(self, other: tuple[str, ...]) -> bool:
        return tuple.__gt__(self, other)


_Turn = tuple[_Newest, int]
"""Where a checkpoint comes in the merge: by its id and namespace, then by the number of its thread."""


class _Snapshot:
    """One view of a thread, and what of it has not expired."""

    def __init__(self, process: Process, thread: Thread, view: View, horizon: Horizon | None):
        self._process = process
        self._thread = thread
        self.view = view
        self._horizon = horizon

    def visible(self, items: Sequence[Item]) -> Steps[Sequence[Item]]:
        return items if self._horizon is None else (yield from self._horizon.visible(items))

    def materialise(self, items: Sequence[Item]) -> Steps[list[Stored]]:
        return (yield from materialise(self._process, self._thread, self.view, items))

    def find(self, items: Sequence[Item]) -> Steps[Sequence[Item]]:
        """What this view has in the place of another view's items."""
        keys = [(item.checkpoint.namespace, item.checkpoint.id) for item in items]
        lookups = [by_id(self._process, self._thread, self.view, *key) for key in keys]
        found = results((yield All(lookups)))
        return (yield from self.visible([item for item in found if item is not None]))


class _One:
    """The checkpoints of one thread, as a listing goes through them.

    Attributes:
        thread: The thread.
        found: The next of them, each with the snapshot that it was found in.
    """

    def __init__(
        self,
        process: Process,
        thread: Thread,
        number: int,
        make: Callable[[Thread, View, str | None], Scan],
        retention: Retention | None,
    ):
        self.thread = thread
        self.found: deque[tuple[_Snapshot, Item]] = deque()
        self._process = process
        self._number = number
        self._make = make
        self._retention = retention
        self._snapshot: _Snapshot | None = None
        self._scan: Scan | None = None

    @property
    def turn(self) -> _Turn:
        """Where the next checkpoint comes in the merge."""
        return self._turn_of(self.found[0][1])

    def _turn_of(self, item: Item) -> _Turn:
        return _Newest((item.checkpoint.id, item.checkpoint.namespace)), self._number

    def open(self, count: int) -> Steps[None]:
        """Take the view, and have something to give."""
        view = yield from refresh(self._process, self.thread)
        self._begin((yield from self._snapshot_of(view)), None)
        yield from self.fill(count, None)

    def fill(self, count: int, last: _Turn | None) -> Steps[None]:
        """Have something to give, unless this is the end.

        Args:
            count: About how much is wanted.
            last: What the listing has chosen last.
        """
        patience = self._patience()
        while not self.found and self._snapshot is not None and self._scan is not None:
            try:
                items = yield from self._scan.next(count)
                shown = yield from self._snapshot.visible(items)
            except SegmentGone as gone:
                self._begin((yield from self._renewed(gone, patience)), last)
                continue
            patience = self._patience()
            ahead = [item for item in shown if last is None or last < self._turn_of(item)]
            self.found.extend((self._snapshot, item) for item in ahead)
            if not items:
                self._scan = None

    def _begin(self, snapshot: _Snapshot | None, last: _Turn | None) -> None:
        """Go through a snapshot, from where the listing is."""
        self._snapshot = snapshot
        self._scan = None
        if snapshot is not None:
            self._scan = self._make(self.thread, snapshot.view, last[0][0] if last is not None else None)

    def _patience(self) -> Patience:
        return Patience(self._process, self.thread, "a listing", "list again when it is quieter", 3, ReadTimeout)

    def _renewed(self, gone: SegmentGone, patience: Patience) -> Steps[_Snapshot | None]:
        """The thread as it is now."""
        yield from patience.check(gone)
        yield from patience.wait(gone)
        return (yield from self._snapshot_of((yield from look_again(self._process, self.thread, gone))))

    def _snapshot_of(self, view: View | None) -> Steps[_Snapshot | None]:
        if view is None:
            return None
        horizon = None
        if self._retention is not None:
            horizon = Horizon(self._process, self.thread, view, self._retention, (yield Now()))
        return _Snapshot(self._process, self.thread, view, horizon)

    def materialise(self, chosen: Sequence[tuple[_Snapshot, Item]]) -> Steps[list[Stored]]:
        """What was chosen, with its values; what has been removed meanwhile is left out."""
        by_snapshot: dict[_Snapshot, list[Item]] = {}
        for snapshot, item in chosen:
            by_snapshot.setdefault(snapshot, []).append(item)
        stored: list[Stored] = []
        for snapshot, items in by_snapshot.items():
            stored += yield from self._materialise(snapshot, items)
        return stored

    def _materialise(self, snapshot: _Snapshot | None, items: Sequence[Item]) -> Steps[list[Stored]]:
        found: Sequence[Item] | None = items
        patience = self._patience()
        while snapshot is not None:
            try:
                found = found if found is not None else (yield from snapshot.find(items))
                return (yield from snapshot.materialise(found))
            except SegmentGone as gone:
                found = None
                snapshot = yield from self._renewed(gone, patience)
        return []


class Listing:
    """The checkpoints of some threads.

    Args:
        process: The process.
        thread_ids: The threads, or `None` for all.
        namespace: Only this namespace.
        id_: Only this checkpoint.
        before: Only ids below this.
        terms: For every condition, the hashes of which a checkpoint has one.
        retention: What has expired by it is left out.
    """

    def __init__(
        self,
        process: Process,
        thread_ids: Sequence[str] | None,
        namespace: str | None = None,
        id_: str | None = None,
        before: str | None = None,
        terms: Sequence[Terms] = (),
        retention: Retention | None = None,
    ):
        self._process = process
        self._thread_ids = thread_ids
        self._retention = retention
        self._heap: list[tuple[_Turn, _One]] | None = None

        def scan(thread: Thread, view: View, last: str | None) -> Scan:
            """From an id on, or from the beginning."""
            bounds = [each for each in (before, last and last + "\0") if each is not None]
            return Scan(process, thread, view, namespace, min(bounds, default=None), terms, id_)

        self._scan = scan

    def next(self, count: int) -> Steps[list[tuple[str, Stored]]]:
        """Up to `count` more checkpoints, each with its thread id; none at the end.

        Raises:
            CorruptionError: If a segment is missing that the manifest names.
            ReadTimeout: If a thread changed faster than it could be read.
        """
        if self._heap is None:
            self._heap = yield from self._open(count)
        given: list[tuple[str, Stored]] = []
        while self._heap and count and not given:  # all that was chosen may have been removed
            given = yield from self._materialised((yield from self._choose(self._heap, count)))
        return given

    def _choose(self, heap: list[tuple[_Turn, _One]], count: int) -> Steps[list[tuple[_One, _Snapshot, Item]]]:
        """The next checkpoints in the merge."""
        chosen: list[tuple[_One, _Snapshot, Item]] = []
        while heap and len(chosen) < count:
            turn, one = heappop(heap)
            chosen.append((one, *one.found.popleft()))
            if not one.found:
                yield from one.fill(count - len(chosen) or 1, turn)
            _push(heap, one)
        return chosen

    def _materialised(self, chosen: Sequence[tuple[_One, _Snapshot, Item]]) -> Steps[list[tuple[str, Stored]]]:
        """What was chosen and is still there, in one round for all threads."""
        by_thread: dict[_One, list[tuple[_Snapshot, Item]]] = {}
        for one, snapshot, item in chosen:
            by_thread.setdefault(one, []).append((snapshot, item))
        groups = results((yield All([one.materialise(items) for one, items in by_thread.items()])))
        stored = {
            (one, each.namespace, each.id): each for one, group in zip(by_thread, groups, strict=True) for each in group
        }
        keys = [(one, item.checkpoint.namespace, item.checkpoint.id) for one, _, item in chosen]
        return [(key[0].thread.id, stored[key]) for key in keys if key in stored]

    def _open(self, count: int) -> Steps[list[tuple[_Turn, _One]]]:
        thread_ids = self._thread_ids
        if thread_ids is None:
            thread_ids = yield from all_threads(self._process)
        ones = [
            _One(self._process, self._process.thread(thread_id), number, self._scan, self._retention)
            for number, thread_id in enumerate(thread_ids)
        ]
        share = count if len(ones) == 1 else 1
        for start in range(0, len(ones), _BATCH):
            results((yield All([one.open(share) for one in ones[start : start + _BATCH]])))
        heap: list[tuple[_Turn, _One]] = []
        for one in ones:
            _push(heap, one)
        return heap


def _push(heap: list[tuple[_Turn, _One]], one: _One) -> None:
    if one.found:
        heappush(heap, (one.turn, one))


def all_threads(process: Process) -> Steps[list[str]]:
    """The ids of all threads, in order of their keys.

    Raises:
        CorruptionError: If a manifest is damaged, or another thread's.
        NestedStoreError: If another store lies among the manifests.
    """
    found: list[str] = []
    untold: list[str] = []  # keys that do not tell the thread: its manifest does
    after = None
    while True:
        page = yield List(MANIFESTS, after)
        ours = {entry.key for entry in own(page.entries)}
        for entry in page.entries:
            thread_id = thread_id_of(entry.key.rsplit("/", 1)[-1]) if entry.key in ours else None
            if thread_id is not None:
                found.append(thread_id)
            else:
                untold.append(entry.key)
        if not page.more or not page.entries:
            break
        after = page.entries[-1].key
    for start in range(0, len(untold), _BATCH):
        keys = untold[start : start + _BATCH]
        for key, body in zip(keys, results((yield All([Get(key) for key in keys]))), strict=True):
            if body is None or (kind_of(key) is None and not body.body.startswith(MAGIC)):
                continue  # it is somebody else's, unless it is a manifest that was moved
            thread_id = open_view(key, body.body, body.tag, None, process.appends).header.thread_id
            if manifest_key(thread_id) != key:
                raise CorruptionError(f"{key}: this is the manifest of thread {thread_id!r}: an object was moved")
            found.append(thread_id)
    return found
