"""How a thread ends.

Rules of this module:

- Where a store deletes on a condition, the manifest is removed on the condition that it is the one that was read.
- Elsewhere the end is a *tombstone*: a manifest that says so, written on that condition. Readers take it for no thread.
  Then it is removed, without a condition, with the segments.
- Nobody writes over a tombstone: its removal may be on its way, and would take what was written. Who wants to write
  waits until it is gone.
- Only who wrote a tombstone removes it, and sends that not later than `SENT_WITHIN` afterwards. Where it stays, its
  process has died or was held up: who has seen it unchanged for `TOMBSTONE` puts one of its own in its place, on a
  condition, and removes that.
- What was listed before the manifest went is garbage whoever it was made for: of a later incarnation there was nothing.
"""

from __future__ import annotations

from lsm.errors import Conflict
from lsm.format.manifest import Header, pack_header
from lsm.format.names import MOST_THREAD_ID, segments_prefix
from lsm.limits import SENT_WITHIN, TOMBSTONE
from lsm.process import Process, Thread, Tombstone, refresh
from lsm.steps import All, DeleteIf, Entry, Monotonic, PutIf, Steps, results
from lsm.turn import Patience, ensure_gone, retried
from lsm.view import View
from lsm.walk import delete_all, list_all, told_id

_FIXED = 256  # bytes of a tombstone beside the thread's id
_LARGEST_ID = 4 * MOST_THREAD_ID


def remove(process: Process, thread: Thread, only: View | None = None) -> Steps[bool]:
    """Remove a thread and all of its objects. Two rounds, and the removal of what is without a condition.

    Args:
        process: The process.
        thread: The thread.
        only: Remove nothing but this very state of it.

    Returns:
        Whether it is gone.

    Raises:
        CommitTimeout: If other writers or the store kept it from being removed.
    """
    keys: set[str] = set()
    own: Tombstone | None = None

    def attempt() -> Steps[bool]:
        nonlocal own
        view, listed = results((yield All([refresh(process, thread), list_all(segments_prefix(thread.id))])))
        if view is None:
            if not _is_same(own, thread.tombstone):  # else it was written although its answer was lost
                yield from ensure_gone(process, thread)
                own = None  # where there is another's tombstone, that removes it
            return True
        if only is not None and view.tag != only.tag:
            return False
        keys.update(entry.key for entry in listed)
        if process.conditional_deletes:
            yield DeleteIf(thread.key, view.tag)
        else:
            own = yield from _new(process)
            yield from _write(process, thread, own, view.tag)
        return True

    if not (yield from retried(Patience(process, thread, "a deletion", "delete it again"), attempt)):
        return False
    process.adopt(thread, None)
    if own is not None:
        yield from _take_away(process, thread, own, sorted(keys))
    else:
        yield from delete_all(sorted(keys))
    return True


def make_room(process: Process, thread: Thread) -> Steps[None]:
    """Before a manifest is created where `refresh` has found none: see that no tombstone is in its place.

    Raises:
        Conflict: If one is, and its removal may still come.
    """
    found = thread.tombstone
    if found is not None and not (yield from clear(process, thread, found)):
        raise Conflict(f"{thread.key}: the thread is being deleted, and its tombstone is still there", thread.key)


def clear(process: Process, thread: Thread, found: Tombstone, age: float = TOMBSTONE) -> Steps[bool]:
    """Remove a tombstone that somebody left.

    Args:
        process: The process.
        thread: The thread.
        found: The tombstone.
        age: For how many seconds this process must have seen it.

    Returns:
        Whether it is gone.

    Raises:
        StorageError: If that failed. It may be gone all the same.
    """
    if (yield Monotonic()) - found.since < age:
        return False
    own = yield from _new(process)
    yield from _write(process, thread, own, found.tag)
    return (yield from _take_away(process, thread, own, ()))


def may_be_tombstone(entry: Entry) -> bool:
    """Whether a manifest, as it was listed, is small enough to be a tombstone."""
    return entry.size <= _FIXED + (_LARGEST_ID if told_id(entry.key) is None else len(entry.key))


def _new(process: Process) -> Steps[Tombstone]:
    return Tombstone(None, process.entropy(8), (yield Monotonic()))


def _write(process: Process, thread: Thread, own: Tombstone, tag: object) -> Steps[None]:
    header = Header(thread.id, own.incarnation, deleted=True)
    yield PutIf(thread.key, pack_header(header, process.compression), tag)


def _is_same(own: Tombstone | None, found: Tombstone | None) -> bool:
    return own is not None and found is not None and own.incarnation == found.incarnation


def _take_away(process: Process, thread: Thread, own: Tombstone, keys: list[str] | tuple[str, ...]) -> Steps[bool]:
    """Remove a tombstone that this process has written, if that can be sent soon enough, and other objects."""
    soon: bool = (yield Monotonic()) - own.since <= SENT_WITHIN
    yield from delete_all([*([thread.key] if soon else []), *keys])
    if soon:
        thread.tombstone = None
    return soon
