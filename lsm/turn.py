"""Trying again: the one loop for whatever may fail and pass, and how writers of one manifest come by their turn.

Rules of this module:

- All that is tried again is tried again here: after a pause that grows and has chance in it, until it succeeds or its
  deadline is over; then it ends in an error that says what happened. Time is the monotonic clock's.
- Writers of one manifest do not wait for each other: whoever is faster wins, and the others look again. Where many
  write all the time, one that is slow to look would always find itself overtaken. On a store that appends it locks the
  manifest before it looks again, so that the next write is its own.
- A lock is held for one attempt, in which nothing is waited for but the store. Nobody waits for a lock but by trying
  again: whoever holds it may be stopped.
- Object stores have no such locks. There, whoever was overtaken tries again at short intervals; and it knows from then
  on, for a while, that there are others, and gives way to them between its own commits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from lsm.errors import CommitTimeout, Conflict, Locked, LSMError, Throttled, Unavailable
from lsm.fetch import SegmentGone
from lsm.process import Process, Thread, missing, refresh
from lsm.steps import Ensure, Holder, Lock, Monotonic, PutIf, Sleep, Steps, Unlock
from lsm.view import View

T = TypeVar("T")
logger = logging.getLogger("lsm")

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 2.0
_LONGEST_TURN = 0.5  # a conflict is another's progress: who waited long because of it would only be overtaken again
_FIRST_POLL = 0.001
_LONGEST_POLL = 0.05  # a lock is let go of at any moment, and whoever looks then has it
_REMEMBERED = 10.0
_LONGEST_LAG = 2.0
PASSING = (Conflict, Throttled, Unavailable)
"""Failures that may pass, or say that somebody else was faster."""


class Patience:
    """How long something is tried again, and when next. Time counts from `begin`, or else from the first failure.

    Args:
        process: Who tries; its deadline counts.
        thread: The thread that it is about.
        what: What is tried, for the error.
        advice: What to do if it fails, for the error.
        least: How many attempts are made in any case: some take longer than the deadline.
        timeout: The error that it ends in.
    """

    def __init__(
        self,
        process: Process,
        thread: Thread,
        what: str,
        advice: str,
        least: int = 1,
        timeout: type[LSMError] = CommitTimeout,
    ):
        self.process = process
        self.thread = thread
        self._what = what
        self._advice = advice
        self._least = least
        self._timeout = timeout
        self._attempts = 0
        self._begun: float | None = None
        self._pause = _FIRST_PAUSE
        self._poll = _FIRST_POLL

    def begin(self) -> Steps[float]:
        """The first attempt is made. Answers when."""
        begun: float = yield Monotonic()
        self._begun = begun
        return begun

    def check(self, problem: Exception) -> Steps[None]:
        """An attempt has failed.

        Raises:
            LSMError: If it was the last.
        """
        process, thread, now = self.process, self.thread, (yield Monotonic())
        self._attempts += 1
        self._begun = now if self._begun is None else self._begun
        if self._attempts < self._least or now - self._begun <= process.limits.commit_deadline:
            logger.debug("thread %r: %s is tried again (%s)", thread.id, self._what, problem)
            return
        holder = (yield Holder(problem.key or thread.key)) if isinstance(problem, Locked) else None
        raise self._timeout(
            f"thread {thread.id!r} in {process.url}: {self._what} ({thread.key}) did not succeed within "
            f"{process.limits.commit_deadline:g} s ({problem}{f' It is held by {holder}.' if holder else ''}); "
            f"{self._advice}"
        ) from problem

    def wait(self, problem: Exception) -> Steps[None]:
        """Pause before the next attempt."""
        longest = _LONGEST_TURN if isinstance(problem, Conflict) else _LONGEST_PAUSE
        if isinstance(problem, Locked):
            pause, self._poll = self._poll, min(self._poll * 2, _LONGEST_POLL)
        else:
            pause, self._pause = min(self._pause, longest), min(self._pause * 2, longest)
        yield Sleep(pause * (0.5 + int.from_bytes(self.process.entropy(2), "big") / 65536))


def retried(
    patience: Patience, attempt: Callable[[], Steps[T]], passing: tuple[type[Exception], ...] = PASSING
) -> Steps[T]:
    """Make attempts until one succeeds.

    Args:
        patience: How long.
        attempt: Makes an attempt's steps.
        passing: The failures after which another is made.

    Returns:
        What the attempt that succeeded returned.

    Raises:
        LSMError: The patience's error, if none succeeded.
        CorruptionError: If a segment is missing that the manifest names.
    """
    while True:
        try:
            return (yield from attempt())
        except passing as error:
            problem = error
        if isinstance(problem, SegmentGone):
            yield from look_again(patience.process, patience.thread, problem)
        yield from patience.check(problem)
        yield from patience.wait(problem)


def until_stored(
    process: Process, thread: Thread, attempt: Callable[[Any], Steps[None]], what: str, advice: str
) -> Steps[None]:
    """Make attempts to write a thread's manifest, until one succeeds.

    Args:
        process: Whose attempts they are.
        thread: The thread.
        attempt: Makes an attempt's steps, given the lock that its writes go with, or `None`. One that follows a
            conflict looks at the manifest first.
        what: What is attempted, for the error.
        advice: What to do if it fails, for the error.

    Raises:
        CommitTimeout: If other writers or the store kept it from succeeding.
        CorruptionError: If a segment is missing that the manifest names.
    """
    patience = Patience(process, thread, what, advice)
    began = yield from patience.begin()
    overtaken, times = False, 0
    while True:
        known = thread.view
        try:
            yield from _in_turn(process, thread.key, overtaken, attempt)
            return
        except SegmentGone as gone:
            problem: Exception = gone
            yield from look_again(process, thread, gone)
        except PASSING as error:
            problem = error
        now = yield Monotonic()
        if isinstance(problem, Conflict):
            overtaken, times = True, times + 1
            if thread.view is known:  # else it may have been a rewrite of this very process
                thread.contended, thread.lag = now, min(now - began, _LONGEST_LAG)
        elif not isinstance(problem, Locked):
            overtaken = False
        yield from patience.check(problem)
        if not isinstance(problem, Conflict) or (times > 1 and not process.appends):
            yield from patience.wait(problem)
        began = yield Monotonic()


def look_again(process: Process, thread: Thread, gone: SegmentGone) -> Steps[View | None]:
    """After a segment was found gone: the view of the manifest as it is now.

    Raises:
        CorruptionError: If the manifest still names it.
    """
    view = yield from refresh(process, thread)
    if view is not None and any(info.ulid == gone.info.ulid for info in view.segments()):
        raise missing(process, thread, gone.info) from gone
    return view


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
        if (yield Monotonic()) - thread.contended <= _REMEMBERED:
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
