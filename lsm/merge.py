"""Segments read front to back: their records merged in order of keys, their values ahead of being asked for.

Rules of this module:

- It streams: a run of pages of each index and a window of the data of each input are held at a time, however large
  they are.
- Records of one key come together, in order of commit. Which of them count is for the caller to say.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lsm.errors import CorruptionError, NotFound
from lsm.fetch import SegmentGone, check_block, load_runs
from lsm.format.envelope import unseal
from lsm.format.names import segment_key
from lsm.format.records import Checkpoint, Place, Record
from lsm.format.segment import Key, SegmentInfo, above, rows_of
from lsm.process import Process, Thread
from lsm.steps import GetRanges, Steps
from lsm.view import View

_WINDOW = 2 << 20
_WINDOWS = 16

Group = tuple[Key, list[Any]]
"""A key, and its records in order of commit."""


class Rows:
    """The records of some segments of one thread, in order of keys; of one namespace, or of all."""

    def __init__(
        self, process: Process, thread: Thread, infos: Sequence[SegmentInfo], blobs: bool, namespace: str | None = None
    ):
        self._process = process
        self._thread = thread
        self._namespace = namespace
        self._inputs = []
        for info in infos:
            index = info.blob_index if blobs else info.checkpoint_index
            runs = index.runs if namespace is None else index.covering((namespace,), above(namespace))
            self._inputs.append((info, iter(runs)))
        self._heap: list[tuple[Key, int, int, Record, Iterator[tuple[Key, Record]]]] | None = None
        self._count = 0

    def peek(self) -> Steps[Key | None]:
        """The next key."""
        if self._heap is None:
            self._heap = []
            for number in range(len(self._inputs)):
                yield from self._advance(number, iter(()))
        return self._heap[0][0] if self._heap else None

    def group(self) -> Steps[Group | None]:
        """The next key with its records, in order of commit, or `None` at the end."""
        key = yield from self.peek()
        if key is None or self._heap is None:
            return None
        records = []
        while self._heap and self._heap[0][0] == key:
            _, number, _, record, rest = heapq.heappop(self._heap)
            records.append(record)
            yield from self._advance(number, rest)
        records.sort(key=lambda record: record.seq)
        return key, records

    def _advance(self, number: int, rows: Iterator[tuple[Key, Record]]) -> Steps[None]:
        info, runs = self._inputs[number]
        while True:
            for key, record in rows:
                if self._namespace is None or key[0] == self._namespace:
                    self._count += 1
                    assert self._heap is not None
                    heapq.heappush(self._heap, (key, number, self._count, record, rows))
                    return
            run = next(runs, None)
            if run is None:
                return
            (pages,) = yield from load_runs(self._process, self._thread, [(info, run)])
            rows = rows_of(pages, info, segment_key(self._thread.id, info.ulid))


def newest(records: Iterable[Record]) -> Checkpoint | None:
    """Of the records of one key, in order of commit, the checkpoint that counts, if one is among them."""
    found = [each for each in records if isinstance(each, Checkpoint)]
    return found[-1] if found else None


class Windows:
    """The values that lie in the segments of a view, read ahead in each of the segments that were read last."""

    def __init__(self, thread: Thread, view: View):
        self._thread = thread
        self._view = view
        self._windows: OrderedDict[int, _Window] = OrderedDict()

    def value(self, place: Place) -> Steps[bytes]:
        """The bytes at a place. Places are best asked for in order.

        Raises:
            CorruptionError: If the place is in no segment of the view, or its block is damaged.
            SegmentGone: If the segment is not there any more.
        """
        block = yield from self.block(place)
        return block[place.start : place.start + place.length]

    def block(self, place: Place) -> Steps[bytes]:
        """The content of the block that a place is in. Raises what `value` raises."""
        window = self._windows.get(place.segment)
        if window is None:
            info = self._view.segment(place.segment)
            if info is None:
                raise CorruptionError(
                    f"thread {self._thread.id!r}: a record lies in segment number {place.segment}, which manifest "
                    f"{self._thread.key} does not name"
                )
            window = self._windows[place.segment] = _Window(self._thread, info)
            if len(self._windows) > _WINDOWS:
                self._windows.popitem(last=False)
        self._windows.move_to_end(place.segment)
        return (yield from window.block(place))


class _Window:
    """The data of one segment, read ahead, and its last blocks."""

    def __init__(self, thread: Thread, info: SegmentInfo):
        self._thread = thread
        self._info = info
        self._start = 0
        self._data = b""
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def block(self, place: Place) -> Steps[bytes]:
        block = self._blocks.get(place.offset)
        if block is None:
            where = segment_key(self._thread.id, self._info.ulid)
            check_block(self._info, place.offset, place.stored, where)
            end = place.offset + place.stored
            if place.offset < self._start or end > self._start + len(self._data):
                yield from self._read(place.offset, max(end, min(place.offset + _WINDOW, self._info.size)))
            at = place.offset - self._start
            block = unseal(self._data[at : at + place.stored], self._info.context, where, self._info.raw)
            self._blocks[place.offset] = block
            if len(self._blocks) > 3:
                self._blocks.popitem(last=False)
        return block

    def _read(self, start: int, end: int) -> Steps[None]:
        try:
            (self._data,) = yield GetRanges(segment_key(self._thread.id, self._info.ulid), ((start, end),))
        except NotFound as error:
            raise SegmentGone(self._info) from error
        self._start = start
