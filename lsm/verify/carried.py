"""Checking what a header carries: copies of records that segments have.

Rules of this module:

- The segments are read as if the header carried nothing; then the two must agree, records and values.
- A head is carried with all of its writes, or the header says that it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lsm.fetch import load_runs
from lsm.find import Item, by_id
from lsm.format.manifest import Header
from lsm.format.names import segment_key
from lsm.format.records import Blob, Checkpoint, Place, Record, Writes, version_key
from lsm.process import Process, Thread
from lsm.steps import Steps
from lsm.values import Materials
from lsm.verify.records import carefully, places_of
from lsm.verify.report import Report
from lsm.view import View, assemble


class Carried:
    """What the header of a view carries.

    Args:
        process: The process.
        thread: The thread.
        view: The view, without the values that its header carries.
        header: The header, with them.
        report: Takes down what is wrong.
    """

    def __init__(self, process: Process, thread: Thread, view: View, header: Header, report: Report):
        self._process = process
        self._thread = thread
        self._view = view
        self._header = header
        self._report = report

    def check(self) -> Steps[None]:
        """See that what the header carries is what the segments have."""
        header, thread = self._header, self._thread
        slim = replace(header, carried=(), inline={}, heads=(), peaks=(), partial=())
        flushed = assemble(thread.key, slim, b"", (), None)
        for record in header.carried:
            yield from carefully(self._report, [record], lambda batch: self._check_same(flushed, batch[0]))
        for namespace, id_ in header.heads:
            item = yield from by_id(self._process, thread, flushed, namespace, id_, hidden=True)
            carried = [each for each in header.carried if isinstance(each, Writes)]
            own = {
                entry for each in carried if (each.namespace, each.id) == (namespace, id_) for entry in _entries(each)
            }
            there = {entry for each in (item.writes if item else ()) for entry in _entries(each)}
            self._report.expect(
                item is not None and (own == there or namespace in header.partial),
                f"{thread.key}: the header does not carry the head of namespace {namespace!r}, {id_!r}, as it is",
            )
        yield from carefully(self._report, list(header.inline.items()), self._check_inline)

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
        yield from materials.collect(places_of([record, *there]))
        found = any(
            _described(each) == _described(record) and materials.value(each.value) == materials.value(record.value)
            for each in there
        )
        self._report.expect(
            found, f"{self._thread.key}: the header carries a record that no segment has: {_name(record)}"
        )

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
            self._report.expect(
                materials.value(place) == value,
                f"{self._thread.key}: the header carries another value than {materials.where(place)} has",
            )


def _entries(writes: Writes) -> set[tuple[str, int, str]]:
    return {(writes.task_id, index, channel) for index, channel in writes.entries}


def _described(record: Record) -> tuple[Any, ...]:
    """What two copies of a record have in common."""
    if isinstance(record, Checkpoint):
        parts: tuple[Any, ...] = (record.parent, record.root, record.versions, record.terms, record.deltas)
        return (record.namespace, record.id, record.seq, record.time, record.flags, *parts)
    if isinstance(record, Writes):
        return record.namespace, record.id, record.seq, record.task_id, record.task_path, record.time, record.runs
    return record.namespace, record.channel, record.version, record.seq, record.extends, record.empty


def _name(record: Record) -> str:
    if isinstance(record, Blob):
        return f"channel {record.channel!r} of namespace {record.namespace!r} at version {record.version!r}"
    kind = "checkpoint" if isinstance(record, Checkpoint) else f"writes of task {record.task_id!r} on checkpoint"
    return f"{kind} {record.id!r} of namespace {record.namespace!r}"
