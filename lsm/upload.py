"""Storing objects that nothing refers to yet.

Rules of this module:

- Their names are made for them alone, so that an object of that name is this object: a `Conflict` means that an earlier
  attempt was stored and its answer lost; a look at the object proves it.
- A failure that may pass is met with patience here; whoever uploads is not yet in anybody's way.
"""

from __future__ import annotations

from lsm.errors import Conflict, NotFound, Throttled, Unavailable
from lsm.steps import Create, GetRanges, Sleep, Steps

_ATTEMPTS = 6
_FIRST_PAUSE = 0.1


def upload(key: str, body: bytes, patient: bool = True) -> Steps[None]:
    """Store an object.

    Args:
        key: A name that nothing else will ever have.
        body: Its bytes.
        patient: Whether to wait and try again. Whoever holds a lock does not.

    Raises:
        StorageError: If it could not be stored.
    """
    attempts = _ATTEMPTS if patient else 1
    for attempt in range(attempts):
        try:
            try:
                yield Create(key, body)
            except Conflict as conflict:
                yield from _see(key, conflict)
        except (Throttled, Unavailable):
            if attempt == attempts - 1:
                raise
            yield Sleep(_FIRST_PAUSE * 2**attempt)
            continue
        return


def _see(key: str, conflict: Conflict) -> Steps[None]:
    """See that an object is there that the store would not create."""
    try:
        yield GetRanges(key, ((0, 1),))
    except NotFound as error:
        raise Unavailable(f"{key}: by one answer the store has it ({conflict}), by the next it has not") from error
