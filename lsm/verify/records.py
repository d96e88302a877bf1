"""Checking every record and value: that it can be read, and that whatever leads to a value leads to the same.

Rules of this module:

- Values are read and put together by `values`, as readers do. Those that were replaced are read, too.
- Records come some at a time, so that their values are read in few rounds and little memory. Where a batch fails, its
  halves are tried, down to what is damaged.
- What a checkpoint is to others is handed on to `chains`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from lsm.errors import CorruptionError, FormatVersionError
from lsm.format.records import (
    HIDDEN,
    Blob,
    Checkpoint,
    Place,
    Record,
    Writes,
    unpack_payload,
    unpack_writes,
    version_key,
)
from lsm.format.segment import SegmentInfo
from lsm.merge import Rows, newest
from lsm.process import Process, Thread
from lsm.steps import Steps
from lsm.values import Materials
from lsm.verify.chains import Chains, Node
from lsm.verify.report import Report
from lsm.view import CheckpointKey, View, is_later

T = TypeVar("T")

_BATCH = 8 << 20
_MOST_ITEMS = 512
_BLOCK = 64 << 10

_Group = tuple[Any, list[Any]]
"""A key of any kind, and its records in order of commit."""


class Records:
    """The records of one view of a thread.

    Args:
        process: The process.
        thread: The thread.
        view: The view, without the values that its header carries.
        chains: Takes in the checkpoints.
        report: Takes down what is wrong, and counts.
    """

    def __init__(self, process: Process, thread: Thread, view: View, chains: Chains, report: Report):
        self._process = process
        self._thread = thread
        self._view = view
        self._chains = chains
        self._report = report
        self._names: dict[frozenset[str], frozenset[str]] = {}

    def check_at_hand(self) -> Steps[None]:
        """Check the records of the manifest itself."""
        tail, seq = self._view.tail, self._view.header.seq
        blobs: list[_Group] = list(tail.blobs.items())
        yield from carefully(self._report, blobs, self._check_blobs)
        groups: dict[CheckpointKey, list[Any]] = {}
        for namespace, by_id in tail.checkpoints.items():
            for id_, records in by_id.items():
                groups.setdefault((namespace, id_), []).extend(records)
        for key, calls in tail.writes.items():
            groups.setdefault(key, []).extend(calls)
        for key, records in groups.items():
            nodes = _unread([(key, records)])
            try:
                nodes = yield from self._read_rows([(key, records)])
            except (CorruptionError, FormatVersionError) as error:
                self._report.note(str(error))
            added = {id_: node for id_, node in nodes.items() if node.seq > seq}
            self._chains.add_at_hand(key[0], added)
            self._report.checkpoints += len(added)
            self._report.writes += sum(isinstance(each, Writes) and each.seq > seq for each in records)
        # Those that the header carries are counted where they are: in segments.
        self._report.blobs = sum(any(blob.seq > seq for blob in records) for records in tail.blobs.values())

    def check_segments(self, infos: Sequence[SegmentInfo]) -> Steps[None]:
        """Check the records of some segments. Those of the manifest have been checked before."""
        yield from self._in_batches(Rows(self._process, self._thread, infos, blobs=True), self._check_blobs)
        yield from self._in_batches(Rows(self._process, self._thread, infos, blobs=False), self._check_rows)

    def _in_batches(self, rows: Rows, check: Callable[[Sequence[_Group]], Steps[None]]) -> Steps[None]:
        """Check the records of all segments, some at a time, and each namespace as a whole at its end."""
        batch: list[_Group] = []
        blocks: dict[tuple[int, int], int] = {}
        namespace: str | None = None
        while True:
            found = yield from rows.group()
            ends = found is None or (batch and found[0][0] != namespace)
            if batch and (ends or len(batch) >= _MOST_ITEMS or sum(blocks.values()) >= _BATCH):
                yield from carefully(self._report, batch, check)
                batch, blocks = [], {}
            if ends and namespace is not None:
                self._chains.end(namespace)
            if found is None:
                return
            namespace = found[0][0]
            batch.append(found)
            for record in found[1]:
                if isinstance(record.value, Place):
                    place = record.value
                    key = place.segment, place.offset
                    blocks[key] = max(blocks.get(key, _BLOCK), place.start + place.length)

    def _check_blobs(self, batch: Sequence[_Group]) -> Steps[None]:
        """Rebuild the values of some keys, and read those that they replaced."""
        materials = Materials(self._process, self._thread, self._view)
        yield from materials.look_up([key for key, _ in batch])
        places = [place for key, _ in batch for place in materials.places(key)]
        yield from materials.collect([*places, *places_of(record for _, records in batch for record in records)])
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
            self._report.expect(
                peak is not None and not is_later(blob.version, peak),
                f"{self._thread.key}: it does not know that channel {blob.channel!r} of namespace {blob.namespace!r} "
                f"has had version {blob.version!r}",
            )

    def _check_rows(self, batch: Sequence[_Group]) -> Steps[None]:
        """Read checkpoints and writes, and see that every channel leads to its value."""
        self._chains.add(_unread(batch))
        self._chains.add((yield from self._read_rows(batch)))
        for _, records in batch:
            self._report.writes += sum(isinstance(record, Writes) for record in records)
            self._report.checkpoints += any(isinstance(record, Checkpoint) for record in records)

    def _read_rows(self, batch: Sequence[_Group]) -> Steps[dict[str, Node]]:
        materials = Materials(self._process, self._thread, self._view)
        checkpoints = [each for _, records in batch if (each := newest(records)) is not None]
        keys = {
            (each.namespace, channel, version_key(v)) for each in checkpoints for channel, v in each.versions.items()
        }
        yield from materials.look_up(keys)
        yield from materials.collect(places_of(record for _, records in batch for record in records))
        for _, records in batch:
            for record in records:
                self._open(materials, record)
        nodes: dict[str, Node] = {}
        for each in checkpoints:
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
            nodes[each.id] = Node(each.seq, each.parent, each.flags, each.deltas or (), names)
        return nodes

    def _open(self, materials: Materials, record: Checkpoint | Writes) -> None:
        value = materials.value(record.value)
        where = materials.where(record.value)
        if isinstance(record, Writes):
            values = unpack_writes(value, where)
            self._report.expect(
                len(values) == record.count,
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
        self._report.expect(
            values[0] == values[1],
            f"{self._thread.key}: checkpoint {checkpoint.id!r} of namespace {checkpoint.namespace!r} leads to another "
            f"value of channel {channel!r} than version {checkpoint.versions[channel]!r}",
        )


def carefully(report: Report, batch: Sequence[T], check: Callable[[Sequence[T]], Steps[None]]) -> Steps[None]:
    """Check a batch at once; where that fails, its halves, down to what is damaged."""
    try:
        if batch:
            yield from check(batch)
    except (CorruptionError, FormatVersionError) as error:
        if len(batch) == 1:
            report.note(str(error))
            return
        middle = len(batch) // 2
        yield from carefully(report, batch[:middle], check)
        yield from carefully(report, batch[middle:], check)


def _unread(batch: Sequence[_Group]) -> dict[str, Node]:
    """The nodes of checkpoints that are not read yet: what cannot be read is not missing, too."""
    checkpoints = [record for _, records in batch for record in records if isinstance(record, Checkpoint)]
    return {each.id: Node(each.seq, None, each.flags, (), frozenset()) for each in checkpoints}


def places_of(records: Iterable[Record]) -> list[Place]:
    """Where the values of records are, and what these borrow, as far as it lies in segments."""
    return [
        place
        for record in records
        for place in (record.value, *(record.borrowed if isinstance(record, Blob) else ()))
        if isinstance(place, Place)
    ]
