"""What can go wrong, in the words of the person who has to do something about it.

Rules of this module:

- Every error that the project raises derives from `LSMError`; wrong calls are `ValueError` / `TypeError`.
- Every error can be copied and pickled, with its attributes.
- A message says what happened, to which thread and object, and what to do.
- `StorageError` and below are what a storage backend reports of one request; `lsm.commit` turns a
  conflict into a retry, so that callers see the other errors only.
"""

from __future__ import annotations

from copyreg import __newobj__  # type: ignore[attr-defined]
from typing import Any


class LSMError(Exception):
    """Base of all errors that this project raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """One error is given to several callers, and to other processes: a copy is as it was, without asking the class,
        whose arguments may be others, to make it anew."""
        return __newobj__, (type(self), *self.args), self.__dict__


class CommitTimeout(LSMError):
    """A commit kept losing against other writers, or met only failures, until its deadline; it is not known to be
    stored. It may be tried again: records are keyed, so that storing them twice changes nothing."""


class ReadTimeout(LSMError):
    """A thread changed again and again while it was read, until the deadline. It may be read again."""


class ConcurrentRunError(LSMError):
    """Another run moved this thread on (only with `concurrent_runs="refuse"`).

    Attributes:
        thread_id: The thread.
        namespace: The checkpoint namespace.
        expected: The head that the refused run started from, or `None` for an empty namespace.
        found: The head that is stored.
    """

    def __init__(self, thread_id: str, namespace: str, expected: str | None, found: str | None):
        super().__init__(
            f"thread {thread_id!r}, namespace {namespace!r}: this run continues from checkpoint {expected!r}, "
            f"but another run has meanwhile moved the thread on to {found!r}. Nothing of the refused checkpoint is "
            "stored. Read the thread again and start the run anew, or tell the user that the thread is busy."
        )
        self.thread_id = thread_id
        self.namespace = namespace
        self.expected = expected
        self.found = found


class IncompleteWritesError(LSMError):
    """A checkpoint was refused because writes of its parent failed to be stored in this process."""


class ConditionalWritesUnsupported(LSMError):
    """The store accepted a write that its condition forbids, or sends nothing that a write could be conditional on:
    commits would be lost silently."""


class CorruptionError(LSMError):
    """Stored bytes are not what was written; the message names the object."""


class FormatVersionError(LSMError):
    """The object was written by a newer version of the format than this code knows."""


class ForkedProcessError(LSMError):
    """The saver was used before `os.fork()`, and its object-store client does not survive in the child."""


class StorageError(LSMError):
    """The storage could not do what was asked.

    Attributes:
        key: The object concerned, relative to the root, or `None` where no single object is.
    """

    def __init__(self, message: str, key: str | None = None):
        super().__init__(message)
        self.key = key


class NotFound(StorageError):
    """The object is not there."""


class Conflict(StorageError):
    """The condition of a write did not hold. It may have been our own write that made it fail
    (an answer was lost and the client retried), so this alone proves nothing."""


class Throttled(StorageError):
    """The storage asks to slow down (429, 503)."""


class Locked(Throttled):
    """Somebody else holds the object's lock, and did for longer than a moment: busy, or stopped."""


class Unavailable(StorageError):
    """The storage did not answer, or answered with a fault of its own. A write may or may not have happened."""


class Refused(StorageError):
    """The storage will not do this until somebody changes something: credentials, permission, a missing
    bucket, a full disk, a read-only directory."""


class NestedStoreError(LSMError):
    """One store lies in the folders of another, which would take its objects for its own, or for garbage."""
