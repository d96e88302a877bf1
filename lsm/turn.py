"""How a writer that was overtaken gets its turn.

Rules of this module:

- Writers of one manifest do not wait for each other: whoever is faster wins, and the others look again. Where many
  write all the time, one that is slow to look would always find itself overtaken. On a store that appends it locks the
  manifest before it looks again, so that the next write is its own. Locks are granted in order of arrival, or nearly.
- A lock is held for one attempt, in which nothing is waited for but the store.
- Object stores have no such locks. There, whoever was overtaken tries again at short intervals; and it knows from then
  on, for a while, that there are others, and gives way to them between its own commits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lsm.process import Process, Thread
from lsm.steps import Lock, Now, Sleep, Steps, Unlock

_REMEMBERED = 10.0  # seconds
_LONGEST_LAG = 2.0


def in_turn(process: Process, key: str, overtaken: bool, attempt: Callable[[Any], Steps[None]]) -> Steps[None]:
    """Make an attempt to write a manifest.

    Args:
        process: Whose attempt it is.
        key: The manifest.
        overtaken: Whether the last attempt failed because others wrote.
        attempt: Makes the attempt's steps, given the lock that its writes go with, or `None`.
    """
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


def note_overtaken(thread: Thread, now: float, took: float) -> None:
    """Remember that others write to a thread.

    Args:
        thread: The thread.
        now: The time.
        took: How long the attempt took that failed, in seconds.
    """
    thread.contended, thread.lag = now, min(took, _LONGEST_LAG)


def give_way(process: Process, thread: Thread) -> Steps[None]:
    """Where others write, too, and there are no locks: wait before the next commit, so that one of them comes in
    between. Without it, whoever has just won would win again, for it need not look before it writes. Callers of this
    process that come meanwhile are in the next commit."""
    if thread.contended is not None and not process.appends:
        if 0 <= (yield Now()) - thread.contended <= _REMEMBERED:
            yield Sleep(2 * thread.lag * int.from_bytes(process.entropy(2), "big") / 65536)
        else:
            thread.contended = None
