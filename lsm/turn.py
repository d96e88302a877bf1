"""How a manifest is written although others write it, too: again and again, until it is one's turn.

Rules of this module:

- Writers of one manifest do not wait for each other: whoever is faster wins, and the others look again. Where many
  write all the time, one that is slow to look would always find itself overtaken. On a store that appends it locks the
  manifest before it looks again, so that the next write is its own. Locks are granted in order of arrival, or nearly.
- A lock is held for one attempt, in which nothing is waited for but the store.
- Object stores have no such locks. There, whoever was overtaken tries again at short intervals; and it knows from then
  on, for a while, that there are others, and gives way to them between its own commits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from lsm.errors import CommitTimeout, Conflict, Throttled, Unavailable
from lsm.process import Process, Thread
from lsm.steps import Ensure, Lock, Now, PutIf, Sleep, Steps, Unlock
from lsm.view import View

logger = logging.getLogger("lsm")

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 2.0
_LONGEST_TURN = 0.5  # a conflict is another's progress: who waited long because of it would only be overtaken again
_REMEMBERED = 10.0
_LONGEST_LAG = 2.0


def until_stored(
    process: Process, thread: Thread, attempt: Callable[[float, Any], Steps[None]], what: str, advice: str
) -> Steps[None]:
    """Make attempts to write a thread's manifest, until one succeeds.

    Args:
        process: Whose attempts they are.
        thread: The thread.
        attempt: Makes an attempt's steps, given a time that is not later than it is, and the lock that its writes go
            with, or `None`. One that follows a conflict looks at the manifest first.
        what: What is attempted, for the error.
        advice: What to do if it fails, for the error.

    Raises:
        CommitTimeout: If other writers or the store kept it from succeeding.
    """
    now = yield Now()
    elapsed, pause, overtaken = 0.0, _FIRST_PAUSE, False
    while True:
        known = thread.view
        try:
            yield from _in_turn(process, thread.key, overtaken, partial(attempt, now))
            return
        except (Conflict, Throttled, Unavailable) as error:
            problem, overtaken = error, isinstance(error, Conflict)
        last, now = now, (yield Now())
        took = max(0.0, now - last)  # a clock that is set back does not end the patience
        elapsed += took
        if overtaken and thread.view is known:  # else it may have been a rewrite of this very process
            thread.contended, thread.lag = now, min(took, _LONGEST_LAG)
        if elapsed > process.limits.commit_deadline:
            raise CommitTimeout(
                f"thread {thread.id!r} in {process.url}: {what} to {thread.key} did not succeed within "
                f"{process.limits.commit_deadline:g} s ({problem}); {advice}"
            ) from problem
        logger.debug("thread %r: %s is tried again (%s)", thread.id, what, problem)
        if not overtaken or (pause > _FIRST_PAUSE and not process.appends):
            seconds = pause * (0.5 + int.from_bytes(process.entropy(2), "big") / 65536)
            yield Sleep(seconds)
            now, elapsed = (yield Now()), elapsed + seconds
        pause = min(pause * 2, _LONGEST_TURN if overtaken else _LONGEST_PAUSE)


def _in_turn(process: Process, key: str, overtaken: bool, attempt: Callable[[Any], Steps[None]]) -> Steps[None]:
    """Make an attempt; one that follows a conflict has the manifest for itself, where the store can lock."""
    lock = (yield Lock(key)) if overtaken and process.appends else None
    if lock is None:
        yield from attempt(None)
        return
    try:
        yield from attempt(lock)
    except GeneratorExit:  # nobody is left to be asked; the handle goes with this frame
        raise
    except BaseException:
        yield Unlock(lock)
        raise
    yield Unlock(lock)


def give_way(process: Process, thread: Thread) -> Steps[None]:
    """Where others write, too, and there are no locks: wait before the next commit, so that one of them comes in
    between. Without it, whoever has just won would win again, for it need not look before it writes. Callers of this
    process that come meanwhile are in the next commit."""
    if thread.contended is not None and not process.appends:
        if 0 <= (yield Now()) - thread.contended <= _REMEMBERED:
            yield Sleep(2 * thread.lag * int.from_bytes(process.entropy(2), "big") / 65536)
        else:
            thread.contended = None


def confirm(process: Process, thread: Thread, view: View, lock: Any) -> Steps[None]:
    """Before a write is acknowledged because it was found: have what was found survive a power cut. To find bytes does
    not tell that they were ever synced, and to sync them after a sync that failed does not write them.

    Args:
        process: The process.
        thread: The thread.
        view: The view that the write was found in.
        lock: The lock that the caller holds on the manifest, if any.

    Raises:
        Conflict: If the manifest has changed since.
        StorageError: If the store could not do it.
    """
    if not process.appends:
        return
    if view.loose:
        tag = yield PutIf(thread.key, b"".join(view.parts()), view.tag, lock)
        process.adopt(thread, replace(view, tag=tag, loose=False, dropped=0))
    else:
        yield Ensure(thread.key, view.tag)


def ensure_gone(process: Process, thread: Thread) -> Steps[None]:
    """Before a removal is acknowledged because nothing was found: have that survive a power cut. Raises what `confirm`
    does."""
    if process.appends:
        yield Ensure(thread.key, None)
