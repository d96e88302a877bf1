"""How a writer that was overtaken gets its turn.

Rules of this module:

- Writers of one manifest do not wait for each other: whoever is faster wins, and the others look again. Where many
  write all the time, one that is slow to look would always find itself overtaken. On a store that appends it locks the
  manifest before it looks again, so that the next write is its own. Locks are granted in order of arrival, or nearly.
- A lock is held for one attempt, in which nothing is waited for but the store.
- Object stores have no such locks. There, a writer tries again at short intervals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lsm.process import Process
from lsm.steps import Lock, Steps, Unlock


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
