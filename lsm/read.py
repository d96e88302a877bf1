"""What a reader is given: checkpoints with their values and writes.

Rules of this module:

- A call answers from one view of the manifest, and begins again where a segment has gone since that was read.
- It takes as few rounds as the view allows: one for the manifest, one for pages of indexes (`find`; none where the view
  knows), one for the data of all that was found (`values`).
- Which of repeated writes counts is decided here, by the order of commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lsm.errors import CorruptionError, ReadTimeout
from lsm.fetch import SegmentGone
from lsm.find import Item
from lsm.format.records import ORPHAN, Place, Typed, Version, Writes, unpack_payload, unpack_writes, version_key
from lsm.process import Process, Thread, refresh
from lsm.steps import Steps
from lsm.turn import Patience, look_again
from lsm.values import Materials
from lsm.view import View

T = TypeVar("T")


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
    """Run steps on a fresh view of a thread, and again where a segment has gone meanwhile.

    Args:
        process: The process.
        thread: The thread to read.
        answer: Makes the steps.
        absent: The answer for a thread that does not exist.

    Raises:
        CorruptionError: If a segment is missing that the current manifest names.
        ReadTimeout: If the thread changed faster than it could be read.
    """
    patience: Patience | None = None
    view = yield from refresh(process, thread)
    while view is not None:
        try:
            return (yield from answer(view))
        except SegmentGone as gone:
            problem = gone
        view = yield from look_again(process, thread, problem)
        patience = patience or Patience(process, thread, "reading", "try again later", 3, ReadTimeout)
        yield from patience.check(problem)
        yield from patience.wait(problem)
    return absent


def materialise(process: Process, thread: Thread, view: View, items: Sequence[Item]) -> Steps[list[Stored]]:
    """Items with their values, in one round of data (and one of indexes where hints lead nowhere)."""
    materials = Materials(process, thread, view)
    yield from materials.settle((item.checkpoint, list(item.checkpoint.versions)) for item in items)
    places: list[Place] = []
    for item in items:
        own: list[Place] = []
        values = (item.checkpoint.value, *(writes.value for writes in item.writes))
        own += [value for value in values if isinstance(value, Place)]
        for channel, version in item.checkpoint.versions.items():
            own += materials.places((item.checkpoint.namespace, channel, version_key(version)))
        materials.admit(own)
        places += own
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
    winners: dict[tuple[str, int], tuple[Writes, int, str]] = {}
    for call in calls:
        for position, (index, channel) in enumerate(call.entries):
            key = call.task_id, index
            if index < 0 or key not in winners:
                winners[key] = call, position, channel
    ordered = sorted(winners.items(), key=lambda each: (each[1][0].task_path, *each[0]))
    values: dict[int, list[Typed]] = {}
    pending = []
    for (task_id, index), (call, position, channel) in ordered:
        if channels is not None and channel not in channels:
            continue
        if id(call) not in values:
            values[id(call)] = unpack_writes(materials.value(call.value), materials.where(call.value))
            if len(values[id(call)]) != call.count:
                raise CorruptionError(f"{materials.where(call.value)}: writes and their values differ in number")
        pending.append(PendingWrite(task_id, channel, values[id(call)][position], call.task_path, index))
    return pending
