"""How records become durable.

Rules of this module:

- A record is durable once the conditional write that carries it has succeeded; only then is its caller told.
- **Group commit.** Callers of one thread queue. Whoever finds nobody committing leads: it commits what is queued as one
  frame, then hands over to the next in the queue. A caller that is cancelled or interrupted hands over, too.
- A batch keeps its commit id and its members until it is known what became of it: a failed conditional write does not
  tell, for it may have been our own write, answered twice, that made it fail. So before a batch is sent again, the
  manifest is read again and asked for the commit id.
- What is sent is made from the view that it is conditional on (see `lsm.frame`). After a conflict it is made anew.
- A flush is uploaded beside a commit, and lands with the next.
- What was uploaded counts only while the thread's fence is what it was before the upload began (see `lsm.collect`).
- A batch that the manifest has no room for *spills*: with all frames before it, it becomes a segment, which is uploaded
  first and lands with the batch's own commit. What decides is the size of what would be sent.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lsm.errors import ConcurrentRunError, LSMError, Refused
from lsm.find import latest
from lsm.flush import Flush, landed, prepare, rebased, spilled
from lsm.format.manifest import MARK_SIZE, CommitId, Frame, Header, pack_header
from lsm.format.names import segment_key
from lsm.frame import Change, Nothing, Put, ValueSegment, keep_values, make_frame, stub_size
from lsm.limits import HEADER, MANIFEST
from lsm.process import Process, Thread, refresh
from lsm.removal import make_room
from lsm.root import verify_root
from lsm.steps import All, Append, Now, PutIf, Steps, Wait, results
from lsm.turn import confirm, give_way, until_stored
from lsm.upload import upload
from lsm.view import View, assemble

logger = logging.getLogger("lsm")

_LEAD, _STORED, _LEFT = object(), object(), object()
_MOST_VALUES = 8 << 20  # in one batch, in bytes
_MOST_STUBS = 48 << 10
_MOST_SEGMENTS = 16  # of large values, in a tail


@dataclass(eq=False, slots=True)
class Entry:
    """A caller in the queue.

    Attributes:
        change: What it wants stored.
        stub: About how many bytes its record takes beside its value.
        waiter: What it waits for, unless it leads: its outcome, or the sign to lead.
        outcome: What became of it, once that is settled; `None` before.
    """

    change: Change
    stub: int
    waiter: Future[Any] | None = None
    outcome: Any = None


@dataclass(eq=False, slots=True)
class Batch:
    """What is committed as one frame.

    Attributes:
        members: Whose records it holds.
        id: Its commit id.
        sent: Whether it may be stored already.
        uploaded: The segment with its large values, once that is stored.
    """

    members: list[Entry]
    id: CommitId
    sent: bool = False
    uploaded: ValueSegment | None = None


def commit(process: Process, thread: Thread, change: Change) -> Steps[None]:
    """Store a change, together with those that are queued at the time.

    Raises:
        CommitTimeout: If other writers or the store kept it from being stored until the deadline.
        ConcurrentRunError: If it is exclusive and the head is another.
        StorageError: If the store refuses.
    """
    entry = Entry(change, stub_size(change.record) if change.record else 0)
    with thread.lock:
        thread.queue.append(entry)
        lead, thread.leading = not thread.leading, True
        process.busy[thread.id] = thread
        if not lead:
            entry.waiter = Future()
    if entry.waiter is not None:
        try:
            lead = (yield Wait(entry.waiter)) is _LEAD
        except LSMError:
            raise
        except BaseException:
            _leave(process, thread, entry, entry.waiter)
            raise
    if lead:
        yield from _lead(process, thread, entry)


def _leave(process: Process, thread: Thread, entry: Entry, waiter: Future[Any]) -> None:
    """A waiting caller was interrupted: take it out of the queue, and do not keep the lead if it was given it."""
    with thread.lock:
        leads = waiter.done() and not waiter.exception() and waiter.result() is _LEAD
        if entry in thread.queue:
            thread.queue.remove(entry)
        entry.outcome = entry.outcome or _LEFT
    if leads:
        _hand_over(process, thread)


def _hand_over(process: Process, thread: Thread) -> None:
    """Let the next caller lead: one of a batch whose fate is open, or the first in the queue."""
    with thread.lock:
        waiting = (*(thread.batch.members if thread.batch else ()), *thread.queue)
        heirs = (entry.waiter for entry in waiting if entry.outcome is None and entry.waiter is not None)
        heir = next((waiter for waiter in heirs if not waiter.done()), None)
        if heir is not None:
            heir.set_result(_LEAD)
        else:
            thread.leading = False
            thread.batch = None
            process.busy.pop(thread.id, None)


def _settle(entry: Entry, outcome: Any) -> None:
    """Tell a caller what became of its change, unless it has been told already."""
    if entry.outcome is not None:
        return
    entry.outcome = outcome
    if entry.waiter is not None and not entry.waiter.done():
        if isinstance(outcome, BaseException):
            entry.waiter.set_exception(outcome)
        else:
            entry.waiter.set_result(outcome)


def _lead(process: Process, thread: Thread, own: Entry) -> Steps[None]:
    """Commit batches until the own entry is in one, then hand over."""
    try:
        while own.outcome is None:
            yield from give_way(process, thread)
            with thread.lock:
                batch = thread.batch = thread.batch or _next_batch(thread)
            try:
                yield from _commit_batch(process, thread, batch)
            except LSMError as error:
                for entry in batch.members:
                    own_error = copy(error)  # each is raised elsewhere
                    own_error.__cause__ = error.__cause__
                    _settle(entry, own_error)
            with thread.lock:
                thread.batch = None
    finally:
        own.outcome = own.outcome or _LEFT
        _hand_over(process, thread)
    if isinstance(own.outcome, BaseException):
        raise own.outcome


def _next_batch(thread: Thread) -> Batch:
    members: list[Entry] = []
    values = stubs = 0
    while thread.queue and (not members or (values < _MOST_VALUES and stubs + thread.queue[0].stub < _MOST_STUBS)):
        entry = thread.queue.popleft()
        members.append(entry)
        values += entry.change.size
        stubs += entry.stub
    thread.commits += 1
    return Batch(members, (thread.writer, thread.commits))


def _commit_batch(process: Process, thread: Thread, batch: Batch) -> Steps[None]:
    attempt = partial(_attempt, process, thread, batch)
    yield from until_stored(process, thread, attempt, "a commit", "it may be tried again")
    for entry in batch.members:
        _settle(entry, _STORED)


def _attempt(process: Process, thread: Thread, batch: Batch, lock: Any) -> Steps[None]:
    """Commit a batch on top of the view at hand; if it has been sent before, of the newest, unless it is stored."""
    view = thread.view
    if view is None or batch.sent:
        view = yield from _look(process, thread)
        if view is not None and batch.sent and view.committed(batch.id):
            yield from confirm(process, thread, view, lock)
            logger.debug("thread %r: commit %s was stored although its answer was lost", thread.id, batch.id)
            return
    elif not process.root_verified:
        yield from _look(process, thread)
    yield from _send(process, thread, view, batch, lock)


def _look(process: Process, thread: Thread) -> Steps[View | None]:
    """The newest view. Where a manifest may have to be created the root is verified beside: once per process is not
    enough, for somebody may have removed all of it since, and half a store would be written."""
    root = verify_root(process.url, process.entropy)
    if process.root_verified and thread.view is not None:
        view = yield from refresh(process, thread)
        if view is None:
            yield from root
        return view
    view, _ = results((yield All([refresh(process, thread), root])))
    process.root_verified = True
    return view  # type: ignore[no-any-return]


def _send(process: Process, thread: Thread, view: View | None, batch: Batch, lock: Any) -> Steps[None]:
    """One attempt to commit a batch on top of a view."""
    if view is None:
        thread.flush = None
        yield from make_room(process, thread)
        view = _first_view(process, thread)
        if sum(entry.change.size for entry in batch.members) > process.limits.inline:
            # What is uploaded for a thread needs a manifest that the collector can change: see `lsm.collect`.
            view = replace(view, tag=(yield PutIf(thread.key, view.header_bytes, None)))
    flush = thread.flush
    if flush is not None and not flush.fits(view):
        flush = thread.flush = None
    asked = any(isinstance(entry.change, Nothing) for entry in batch.members)
    if flush is not None and asked and flush.view.count < view.count:
        flush = thread.flush = None
    if flush is None and view.count and asked:
        flush = prepare(view, process.compression, (yield Now()), process.entropy(6))
        yield from upload(segment_key(thread.id, flush.info.ulid), flush.body, lock is None)
    yield from _refuse(process, thread, view, batch)
    members = [entry for entry in batch.members if entry.outcome is None]
    base = view
    if flush is not None:
        wanted = {
            (put.checkpoint.namespace, put.checkpoint.parent)
            for put in (entry.change for entry in members)
            if isinstance(put, Put) and put.checkpoint.parent
        }
        base = landed(flush, view, process.limits, process.compression, wanted)
        process.follow(view, base)
    changes = [entry.change for entry in members]
    made = yield from make_frame(process, thread, base, changes, batch.id, batch.uploaded, lock is None)
    batch.uploaded = made.segment
    if made.frame is None and flush is None:
        return
    frames = [(made.frame, made.raw)] if made.frame else []
    spill = None
    if _overflows(process, base, made.raw):
        if view.tag is None:  # see above
            view = replace(view, tag=(yield PutIf(thread.key, view.header_bytes, None)))
        spill = yield from _spill(process, thread, base, frames, lock is None)
        request: Any = PutIf(thread.key, b"".join(spill.after.parts()), view.tag, lock)
    elif flush is not None or view.tag is None or view.loose:
        request = PutIf(thread.key, b"".join((*base.parts(), made.raw)), view.tag, lock)
    else:
        old = () if process.appends else base.parts()
        request = Append(thread.key, old, made.raw, view.tag, lock, MARK_SIZE)
    beside = None
    full = view.tail_size + len(made.raw) > process.limits.tail or len(view.tail.segments) >= _MOST_SEGMENTS
    if flush is None and spill is None and view.count and full:
        beside = prepare(view, process.compression, (yield Now()), process.entropy(6))
    batch.sent = True
    if beside is None:
        outcomes = [(yield request)]
    else:
        outcomes = yield All([request, upload(segment_key(thread.id, beside.info.ulid), beside.body, lock is None)])
        if isinstance(outcomes[0], BaseException):
            raise outcomes[0]
    if spill is not None:
        after = replace(spill.after, tag=outcomes[0])
    else:
        with thread.lock:
            after = base.extended(frames, outcomes[0])
    thread.flush = None
    if view.dropped:
        logger.warning(
            "thread %r: %s ended within a commit that nobody had confirmed, which a crash explains. What came after "
            "commit %d is cut off",
            thread.id,
            thread.key,
            view.seq,
        )
    if flush is not None:
        logger.debug("thread %r: flushed %d records into segment %s", thread.id, flush.info.rows, flush.info.ulid)
    process.adopt(thread, after)
    if beside is not None and not isinstance(outcomes[1], BaseException):
        thread.flush = beside
    keep_values(process, spill.before if spill else after, made)
    if spill is not None:
        _keep_spilled(process, spill, after, members)
    logger.debug("thread %r: commit %d with %d changes", thread.id, after.seq, len(members))


@dataclass(frozen=True, slots=True)
class _Spill:
    """A batch that is stored as a part of a segment, for the manifest has no room for its frame.

    Attributes:
        before: The view with the frame, which is stored nowhere.
        flush: The segment of all that is in that view's frames.
        after: The view in which the segment stands for them.
    """

    before: View
    flush: Flush
    after: View


def _overflows(process: Process, base: View, raw: bytes) -> bool:
    """Whether a view and one more frame are more than a manifest holds, or than one should."""
    largest = process.limits.frame + _MOST_STUBS
    return len(base.header_bytes) > HEADER or len(raw) > largest or base.size + len(raw) > MANIFEST


def _spill(
    process: Process, thread: Thread, base: View, frames: list[tuple[Frame, bytes]], patient: bool
) -> Steps[_Spill]:
    """Store a frame, and those before it, as a segment."""
    seq = base.header.seq
    # Other readers have the base's records at hand, and the frame may never be stored: it goes into a view of its own.
    before = rebased(base, base.header, process.compression, base.tail.frames[: base.count], seq).extended(frames, None)
    flush = prepare(before, process.compression, (yield Now()), process.entropy(6))
    yield from upload(segment_key(thread.id, flush.info.ulid), flush.body, patient)
    after = landed(flush, before, process.limits, process.compression, ())
    if len(after.header_bytes) > HEADER:
        raise Refused(
            f"thread {thread.id!r}: the directory of its segments leaves no room for more in {thread.key}; merge them "
            "(`langgraph-lsm compact`)",
            thread.key,
        )
    return _Spill(before, flush, after)


def _keep_spilled(process: Process, spill: _Spill, after: View, members: list[Entry]) -> None:
    """Keep at hand what children of the checkpoints in a spilled frame will inherit: the header may not carry them."""
    for put in [entry.change for entry in members if isinstance(entry.change, Put)]:
        known = spill.before.checkpoint(put.checkpoint.namespace, put.checkpoint.id)
        moved = spilled(spill.flush, after, put.checkpoint.namespace, put.checkpoint.id)
        if known is None or moved is None:
            continue
        for channel, pieces in moved.table.items():
            old = known.table.get(channel)
            if old and pieces:
                process.cache.rename(process.value_key(spill.before, old[-1]), process.value_key(after, pieces[-1]))
        process.remember(after, moved)


def _first_view(process: Process, thread: Thread) -> View:
    header = Header(thread.id, process.entropy(8))
    return assemble(thread.key, header, pack_header(header, process.compression), (), None)


def _refuse(process: Process, thread: Thread, view: View, batch: Batch) -> Steps[None]:
    """Tell the members that may not be stored on top of a view."""
    heads: dict[str, str | None] = {}
    for entry in batch.members:
        put = entry.change
        if entry.outcome is not None or not isinstance(put, Put) or not put.exclusive:
            continue
        namespace, parent = put.checkpoint.namespace, put.checkpoint.parent
        if namespace not in heads:
            head = yield from latest(process, thread, view, namespace)
            heads[namespace] = head.checkpoint.id if head else None
        if heads[namespace] in (parent, put.checkpoint.id):
            heads[namespace] = put.checkpoint.id
        else:
            _settle(entry, ConcurrentRunError(thread.id, namespace, parent, heads[namespace]))
