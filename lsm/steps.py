"""The language between logic and I/O.

Rules of this module:

- Logic is generators ("steps"): they yield the requests defined here and are sent the results. They do no
  I/O, read no clock and never block. They may be run by several threads at once, each its own generator.
- A driver (`lsm.drive`, or the simulator) executes requests. What fails is thrown into the generator as an
  `lsm.errors.StorageError`.
- Keys are relative to the root of the store, with `/` between parts. `Tag`s are opaque, hashable and compared
  for equality only: an ETag, or what identifies one state of a local file.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lsm.errors import CorruptionError

Tag = Hashable
T = TypeVar("T")
Steps = Generator[Any, Any, T]


@dataclass(frozen=True, slots=True)
class Found:
    """One object as it was read."""

    body: bytes
    tag: Tag


@dataclass(frozen=True, slots=True)
class Entry:
    """One object as it was listed. `modified` is in seconds since the epoch, by the store's clock."""

    key: str
    size: int
    tag: Tag
    modified: float


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a listing, in order of keys; `more` says whether to ask again, after the last key."""

    entries: Sequence[Entry]
    more: bool


@dataclass(frozen=True, slots=True)
class Get:
    """Read a whole object. Answer: `Found`, `None` where there is none, or `"unchanged"` where its tag is
    still `unless`. With `start` (a known length of an object that is only appended to, with `unless` the tag
    at that length), a store that can tell that the first `start` bytes are the same may answer
    `Appended`: only the bytes from there on. An object of more than `most` bytes is `CorruptionError`, before any of
    them is read: nothing that is read whole is as large."""

    key: str
    unless: Tag | None = None
    start: int = 0
    most: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Appended:
    """The bytes after `Get.start`, and the tag of the whole."""

    body: bytes
    tag: Tag


@dataclass(frozen=True, slots=True)
class GetRanges:
    """Read byte ranges `[start, end)` of one object, as one round. Answer: a list of `bytes`, shorter than
    asked where the object ends earlier. `NotFound` where there is no object."""

    key: str
    ranges: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Create:
    """Write an object that must not exist yet. Answer: its tag. `Conflict` where it exists."""

    key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class PutIf:
    """Write an object if its tag still is `tag` (`None`: if it does not exist). Answer: the new tag."""

    key: str
    body: bytes
    tag: Tag | None
    lock: Any = None


@dataclass(frozen=True, slots=True)
class Append:
    """Write `old` followed by `new` if the object's tag still is `tag`, when `old` is what is stored there.
    A store that can append sends `new` only, and writes the last `mark` bytes of it once all before is durable: an
    object that does not end with them holds an append that failed, or that nobody confirmed. Answer: the new tag."""

    key: str
    old: Sequence[bytes]
    new: bytes
    tag: Tag
    lock: Any = None
    mark: int = 0


@dataclass(frozen=True, slots=True)
class Ensure:
    """Have the disk know an object's place: every folder entry on the way to it, or, with `tag` `None`, that it is
    gone. Only for stores that append; whoever finds what it tried to write asks for this before it relies on that.
    Answer: `None`. `Conflict` where the tag is not `tag`."""

    key: str
    tag: Tag | None


@dataclass(frozen=True, slots=True)
class Settled:
    """Ask what became of an object since it was read in the state `tag`. Only for stores that append. Answer:
    `"settled"`, it is in that state and nobody appends to it; `"appending"`, what comes from `start` on is being
    appended, and may still fail; `"changed"`, it is in another state."""

    key: str
    tag: Tag
    start: int


@dataclass(frozen=True, slots=True)
class Lock:
    """Have all other writes to an object wait. Only for stores that append, and only for moments: whoever holds a lock
    reads, writes and unlocks. Nothing is safe because of it; it gives a writer its turn whom others keep overtaking
    (see `lsm.turn`). Answer: a handle for `PutIf.lock`, `Append.lock` and `Unlock`; `None` where there is no object.
    `Locked` where another has it for longer than a moment, as for every write to such an object: no request waits."""

    key: str


@dataclass(frozen=True, slots=True)
class Unlock:
    """Let the others go on. Answer: `None`. Never raises. A handle that is dropped unlocks, too."""

    lock: Any


@dataclass(frozen=True, slots=True)
class Holder:
    """Ask who holds the lock on an object, for an error's message: to find it out is slow. Only for stores that append.
    Answer: words such as `process 123 (python, stopped)`; `None` where nobody does, or the system does not tell."""

    key: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove objects; those that are gone already are no error. Answer: `None`."""

    keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class DeleteIf:
    """Remove an object if its tag still is `tag`. Answer: `None`. `Conflict` where it is not. Only for stores that
    have conditional deletes (`Storage.conditional_deletes`)."""

    key: str
    tag: Tag


@dataclass(frozen=True, slots=True)
class List:
    """One page of the objects below `prefix` (which ends in `/`), after the key `after`. Answer: `Page`.
    Objects that are not complete (an upload under way) are not listed; on files, what is left of those that a crash
    interrupted is found under the prefix `tmp/`, and nothing else is."""

    prefix: str
    after: str | None = None


@dataclass(frozen=True, slots=True)
class Enclosing:
    """Ask whether the root lies in one of the folders `folders` of another root, which has the object `mark`. Answer:
    the other's address, or `None`. A store that cannot look above its root answers `None`."""

    mark: str
    folders: Sequence[str]


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """Start to write a large object in parts. Answer: a handle for `UploadPart`, `FinishUpload`,
    `AbortUpload`. Nothing is visible under the key before `FinishUpload`."""

    key: str


@dataclass(frozen=True, slots=True)
class UploadPart:
    """Add bytes to an upload. Answer: `None`."""

    handle: Any
    body: bytes


@dataclass(frozen=True, slots=True)
class FinishUpload:
    """Make the upload's object visible, durably and whole. Answer: `None`."""

    handle: Any


@dataclass(frozen=True, slots=True)
class AbortUpload:
    """Drop an upload and what it has stored. Answer: `None`. Never raises."""

    handle: Any


@dataclass(frozen=True, slots=True)
class All:
    """Requests, or whole steps, that run side by side; storage requests among them count as one round. They must not
    wait for each other: a local storage is asked one after the other.
    Answer: a list with the result of each, or the exception that it failed with (see `results`)."""

    of: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait. Answer: `None`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Now:
    """Answer: the wall clock, in seconds since the epoch (`float`). For ages of objects and records only:
    nothing that decides between writers may rest on it."""


@dataclass(frozen=True, slots=True)
class Monotonic:
    """Answer: seconds (`float`) on a clock that never goes back, and that begins anywhere. For deadlines, and for how
    long something took."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for a future that another caller's steps will complete. Answer: its result, or its exception."""

    future: Future[Any]


Unchanged = Literal["unchanged"]
Settlement = Literal["settled", "appending", "changed"]


def check_size(request: Get, size: int) -> None:
    """See that an object is no larger than a request expects.

    Raises:
        CorruptionError: If it is.

    Example:
        >>> check_size(Get("lsm.json"), 1 << 30)
        Traceback (most recent call last):
        ...
        lsm.errors.CorruptionError: lsm.json has 1,073,741,824 bytes, 1,048,576 is the most; restore it from a backup
    """
    if size > request.most:
        raise CorruptionError(
            f"{request.key} has {size:,} bytes, {request.most:,} is the most; restore it from a backup"
        )


def results(outcomes: list[Any]) -> list[Any]:
    """The results of an `All`, or the first exception among them, raised.

    Example:
        >>> results([1, 2])
        [1, 2]
    """
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes
