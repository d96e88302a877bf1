"""When segments are rewritten, and the operations that rewrite them.

Rules of this module:

- Compaction is size-tiered with a fan-in of eight: eight neighbouring segments of one size class become one of the
  next. What is merged are always the newest segments, back to the oldest of the class, so that a record is copied once
  per class and places only ever point to what is older.
- Segments of large values are emptied only while they are small beside all others together, or when most of what they
  hold is garbage. Many such are a reason to merge, too: a commit of a large value makes one. Nobody reads them but by
  place, so that they may be more than others: what counts is their room in the header.
- Operations with a keep-rule see everything: they flush first and rewrite all segments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import TypeVar

from lsm.commit import commit
from lsm.fetch import SegmentGone
from lsm.find import Scan
from lsm.format.manifest import Header, pack_header
from lsm.format.records import Typed
from lsm.format.segment import SegmentInfo
from lsm.frame import Nothing
from lsm.limits import Limits
from lsm.lineage import KeepLatest, KeepRule, Without
from lsm.listing import all_threads
from lsm.process import Process, Thread, refresh
from lsm.read import materialise, reading
from lsm.removal import make_room
from lsm.rewrite import Plan, rewrite
from lsm.steps import All, PutIf, Steps, results
from lsm.swap import Crowded, Outdated, graft, swap
from lsm.turn import PASSING, Patience, retried
from lsm.view import CheckpointKey, View

T = TypeVar("T")
logger = logging.getLogger("lsm")

FAN_IN = 8
VALUES_FAN_IN = 32
_SMALLEST_CLASS = 32 << 10
_LEAST = 20  # attempts; a rewrite may take longer than the deadline of a commit
_SIDE_BY_SIDE = 16


def size_class(info: SegmentInfo) -> int:
    """The size class of a segment: each is eight times the one before.

    A segment of up to 32 KiB is of class 0.
    """
    return _class_of(info.size)


def due(view: View, limits: Limits) -> tuple[SegmentInfo, ...]:
    """The segments of a thread that should be merged now, newest data last; none where all is well.

    Args:
        view: The thread.
        limits: Sizes that suit the store.
    """
    logs = all_logs(view)
    chosen, at_hand = 0, size_class(logs[-1]) if logs else 0
    while True:
        # The newest run of segments that are no larger than what is merged so far.
        run = 0
        while chosen + run < len(logs) and size_class(logs[-1 - chosen - run]) <= at_hand:
            run += 1
        if run + (chosen > 0) < FAN_IN:
            break
        chosen += run
        at_hand = max(at_hand + 1, _class_of(sum(info.size for info in logs[len(logs) - chosen :])))
    # Or as many as it takes to merge some small segments of large values.
    for count in range(max(chosen, 1), len(logs) + 1):
        if len(drained(view, logs[-count:], limits)) >= VALUES_FAN_IN:
            chosen = count
            break
    return logs[len(logs) - chosen :]


def _class_of(size: int) -> int:
    found = 0
    while size > _SMALLEST_CLASS:
        size, found = size // FAN_IN, found + 1
    return found


def drained(view: View, inputs: Sequence[SegmentInfo], limits: Limits) -> tuple[SegmentInfo, ...]:
    """The segments of large values that a rewrite should empty: those that only its inputs refer to, and that are small
    or mostly garbage."""
    if not inputs:
        return ()
    oldest = -inf if len(inputs) == len(all_logs(view)) else min(info.base for info in inputs)
    values = [info for info in view.header.segments if info.values]
    enough = max(limits.lasting, sum(info.size for info in values) // FAN_IN)
    return tuple(info for info in values if info.base > oldest and (info.size < enough or info.live * 2 < info.raw))


def all_logs(view: View) -> tuple[SegmentInfo, ...]:
    """All segments that have records."""
    return tuple(info for info in view.header.segments if not info.values)


def compact(process: Process, thread: Thread, choose: Callable[[View], tuple[SegmentInfo, ...]]) -> Steps[bool]:
    """Merge segments of a thread.

    Args:
        process: The process.
        thread: The thread.
        choose: Given a view, what to merge (`due`, or `all_logs`).

    Returns:
        Whether anything was merged.
    """

    def attempt() -> Steps[bool]:
        view = yield from refresh(process, thread)
        if view is None or not (inputs := choose(view)):
            return False
        plan = Plan(view, inputs, drained(view, inputs, process.limits), thread.id, view.incarnation, view.header.fence)
        try:
            yield from swap(process, thread, (yield from rewrite(process, thread, plan)))
        except Crowded:
            yield from commit(process, thread, Nothing())
            raise
        return True

    return (yield from _again(process, thread, "a compaction", attempt))


def _again(process: Process, thread: Thread, what: str, attempt: Callable[[], Steps[T]]) -> Steps[T]:
    """Rewrite until nothing has come between: others write, rewrite and collect meanwhile."""
    patience = Patience(process, thread, what, "try again when the thread is quieter", _LEAST)
    return (yield from retried(patience, attempt, (*PASSING, Outdated, SegmentGone)))


def keep(process: Process, thread: Thread, make_rule: Callable[[], KeepRule]) -> Steps[None]:
    """Reduce a thread to what a keep-rule keeps.

    Args:
        process: The process.
        thread: The thread.
        make_rule: Makes the rule, for each attempt anew.

    Raises:
        CommitTimeout: If the thread never stood still for long enough.
    """

    def attempt() -> Steps[bool]:
        view = yield from _flushed(process, thread)
        if view is None or not (inputs := all_logs(view)):
            return False
        plan = Plan(
            view,
            inputs,
            drained(view, inputs, process.limits),
            thread.id,
            view.incarnation,
            view.header.fence,
            make_rule(),
        )
        yield from swap(process, thread, (yield from rewrite(process, thread, plan)))
        return True

    if (yield from _again(process, thread, "a rewrite", attempt)):
        yield from compact(process, thread, partial(_if_garbage, process.limits))


def _if_garbage(limits: Limits, view: View) -> tuple[SegmentInfo, ...]:
    inputs = all_logs(view)
    wasteful = [info for info in drained(view, inputs, limits) if info.live * 2 < info.raw]
    return inputs if wasteful else ()


def _flushed(process: Process, thread: Thread) -> Steps[View | None]:
    """A view of a thread of which all is in segments."""
    patience = Patience(process, thread, "a flush", "try again when the thread is quieter", _LEAST)
    while True:
        view = yield from refresh(process, thread)
        if view is None or not view.count:
            return view
        yield from commit(process, thread, Nothing())
        yield from patience.check(Outdated("others commit all the time"))


def prune(process: Process, thread_ids: Iterable[str]) -> Steps[None]:
    """Reduce threads to the latest checkpoint of every namespace."""
    yield from _each(process, thread_ids, lambda thread: keep(process, thread, KeepLatest))


def delete_runs(process: Process, terms: Sequence[bytes], doomed: Callable[[Typed], bool]) -> Steps[None]:
    """Remove the checkpoints that some runs made.

    Args:
        process: The process.
        terms: Hashes of metadata of which every such checkpoint has one.
        doomed: Whether metadata is that of such a checkpoint.
    """
    if terms:
        thread_ids = yield from all_threads(process)
        yield from _each(process, thread_ids, lambda thread: _delete_runs(process, thread, terms, doomed))


def _delete_runs(
    process: Process, thread: Thread, terms: Sequence[bytes], doomed: Callable[[Typed], bool]
) -> Steps[None]:
    def find(view: View) -> Steps[set[CheckpointKey]]:
        keys: set[CheckpointKey] = set()
        scan = Scan(process, thread, view, terms=[terms])
        while items := (yield from scan.next(64)):
            stored = yield from materialise(process, thread, view, items)
            keys.update((each.namespace, each.id) for each in stored if doomed(each.metadata))
        return keys

    nothing: set[CheckpointKey] = set()
    keys = yield from reading(process, thread, find, nothing)
    if keys:
        yield from keep(process, thread, lambda: Without(keys))


def copy(process: Process, source: Thread, target: Thread) -> Steps[None]:
    """Copy all that a thread has to another.

    Raises:
        CommitTimeout: If other writers or the store kept it from being copied.
    """

    def attempt() -> Steps[None]:
        view = yield from _flushed(process, source)
        if view is None or not (inputs := all_logs(view)):
            return
        there = yield from refresh(process, target)
        if there is None:
            yield from make_room(process, target)
            # What is uploaded for a thread needs a manifest that the collector can change: see `lsm.collect`.
            header = pack_header(Header(target.id, process.entropy(8)), process.compression)
            yield PutIf(target.key, header, None)
            there = yield from refresh(process, target)
            if there is None:
                raise Outdated(f"thread {target.id!r} was deleted")
        # What the target has, be it by an earlier copy, is the newer.
        older = min((info.base for info in there.header.segments), default=1) - 1
        fence = there.header.fence
        plan = Plan(view, inputs, (), target.id, there.incarnation, fence, copying=True, older=min(older, 0))
        try:
            yield from graft(process, target, (yield from rewrite(process, source, plan)))
        except Crowded:
            yield from commit(process, target, Nothing())
            raise

    yield from _again(process, source, f"a copy to thread {target.id!r}", attempt)


def _each(process: Process, thread_ids: Iterable[str], do: Callable[[Thread], Steps[None]]) -> Steps[None]:
    threads = [process.thread(thread_id) for thread_id in dict.fromkeys(thread_ids)]
    for start in range(0, len(threads), _SIDE_BY_SIDE):
        results((yield All([do(thread) for thread in threads[start : start + _SIDE_BY_SIDE]])))
