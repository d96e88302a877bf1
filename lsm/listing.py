"""Checkpoints, newest first, a batch at a time.

Rules of this module:

- A `Listing` answers from the views that its threads had when it began; abandoning it costs nothing.
- Over several threads, the next checkpoint is always the one with the highest id: a merge of sorted sequences.
- Where a segment has gone meanwhile (a listing that took longer than the collector's grace), the thread is read anew,
  from below what was given already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from lsm.errors import CorruptionError
from lsm.fetch import SegmentGone
from lsm.find import Item, Scan, Terms
from lsm.format.manifest import MAGIC
from lsm.format.names import MANIFESTS, kind_of, manifest_key, thread_id_of
from lsm.process import Process, Thread, missing, refresh
from lsm.read import Stored, materialise
from lsm.retention import Horizon, Retention
from lsm.steps import All, Get, List, Now, Steps, results
from lsm.view import CheckpointKey, View, open_view
from lsm.walk import own

_BATCH = 16


class _Order(str):
    """Text that sorts the other way round."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return str.__gt__(self, other)


class _One:
    """The checkpoints of one thread, as a listing goes through them."""

    def __init__(
        self,
        process: Process,
        thread: Thread,
        make: Callable[[View, set[CheckpointKey]], Scan],
        retention: Retention | None,
    ):
        self._process = process
        self.thread = thread
        self.view: View | None = None
        self.found: deque[Item] = deque()
        self._make = make
        self._scan: Scan | None = None
        self._retention = retention
        self._horizon: Horizon | None = None
        self._given: set[CheckpointKey] = set()

    def open(self, count: int) -> Steps[None]:
        """Take the view."""
        yield from self._begin((yield from refresh(self._process, self.thread)))
        yield from self.fill(count)

    def _begin(self, view: View | None) -> Steps[None]:
        self.view = view
        self._scan = self._make(view, self._given) if view is not None else None
        if view is not None and self._retention is not None:
            self._horizon = Horizon(self._process, self.thread, view, self._retention, (yield Now()))

    def fill(self, count: int) -> Steps[None]:
        """Have something to give, unless this is the end."""
        while not self.found and self._scan is not None:
            try:
                items = yield from self._scan.next(count)
                shown = items if self._horizon is None else (yield from self._horizon.visible(items))
            except SegmentGone as gone:
                yield from self.reopen(gone)
                continue
            self.found.extend(shown)
            if not items:
                self._scan = None

    def take(self) -> Item:
        item = self.found.popleft()
        self._given.add((item.checkpoint.namespace, item.checkpoint.id))
        return item

    def reopen(self, gone: SegmentGone) -> Steps[None]:
        """Go on with a newer view."""
        view = yield from refresh(self._process, self.thread)
        if view is not None and any(info.ulid == gone.info.ulid for info in view.segments()):
            raise missing(self._process, self.thread, gone.info) from gone
        self.found.clear()
        yield from self._begin(view)

    def materialise(self, items: Sequence[Item]) -> Steps[list[Stored]]:
        """The items with their values; those that have been removed meanwhile are left out."""
        while True:
            try:
                return (yield from materialise(self._process, self.thread, self.view, items)) if self.view else []
            except SegmentGone as gone:
                keys = {(item.checkpoint.namespace, item.checkpoint.id) for item in items}
                yield from self.reopen(gone)
                if self.view is None:
                    return []
                scan = self._make(self.view, self._given - keys)
                found = yield from scan.next(len(keys))
                items = [each for each in found if (each.checkpoint.namespace, each.checkpoint.id) in keys]


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
        self._heap: list[tuple[_Order, str, int, _One]] | None = None

        def make(thread: Thread) -> _One:
            def scan(view: View, given: set[CheckpointKey]) -> Scan:
                return Scan(process, thread, view, namespace, before, terms, id_, given)

            return _One(process, thread, scan, retention)

        self._make = make

    def next(self, count: int) -> Steps[list[tuple[str, Stored]]]:
        """Up to `count` more checkpoints, each with its thread id; none at the end."""
        if self._heap is None:
            self._heap = yield from self._open(count)
        chosen: list[tuple[_One, Item]] = []
        while self._heap and len(chosen) < count:
            *_, number, one = heappop(self._heap)
            chosen.append((one, one.take()))
            if not one.found:
                yield from one.fill(count - len(chosen) or 1)
            _push(self._heap, number, one)
        by_thread: dict[_One, list[Item]] = {}
        for one, item in chosen:
            by_thread.setdefault(one, []).append(item)
        groups = results((yield All([one.materialise(items) for one, items in by_thread.items()]))) if chosen else []
        stored = {
            (one.thread.id, each.namespace, each.id): each
            for one, group in zip(by_thread, groups, strict=True)
            for each in group
        }
        keys = [(one.thread.id, item.checkpoint.namespace, item.checkpoint.id) for one, item in chosen]
        return [(key[0], stored[key]) for key in keys if key in stored]

    def _open(self, count: int) -> Steps[list[tuple[_Order, str, int, _One]]]:
        thread_ids = self._thread_ids
        if thread_ids is None:
            thread_ids = yield from all_threads(self._process)
        ones = [self._make(self._process.thread(thread_id)) for thread_id in thread_ids]
        share = count if len(ones) == 1 else 1
        for start in range(0, len(ones), _BATCH):
            results((yield All([one.open(share) for one in ones[start : start + _BATCH]])))
        heap: list[tuple[_Order, str, int, _One]] = []
        for number, one in enumerate(ones):
            _push(heap, number, one)
        heapify(heap)
        return heap


def _push(heap: list[tuple[_Order, str, int, _One]], number: int, one: _One) -> None:
    if one.found:
        checkpoint = one.found[0].checkpoint
        heappush(heap, (_Order(checkpoint.id), checkpoint.namespace, number, one))


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
