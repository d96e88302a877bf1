"""What one process knows: its cache, and for every thread it touches the manifest as last seen.

Rules of this module:

- All state of the engine that outlives a call hangs on a `Process`. The simulator makes several.
- What is known of a thread is a cache too: it is revalidated by every call (`refresh`), and losing it costs a request.
- Locks are held for moments in memory, never across a request.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lsm.cache import Cache
from lsm.errors import CorruptionError, ReadTimeout
from lsm.format.envelope import Compression
from lsm.format.manifest import Frames, Header
from lsm.format.names import manifest_key
from lsm.format.patch import Link
from lsm.format.records import Blob, Checkpoint, Piece, Place, Typed
from lsm.format.segment import SegmentInfo
from lsm.limits import Limits
from lsm.steps import Appended, Found, Get, Monotonic, Settled, Sleep, Steps
from lsm.view import View, frames_after, header_view, with_frames

if TYPE_CHECKING:
    from lsm.commit import Batch, Entry
    from lsm.flush import Flush


_MOST_ADDRESSED = 4096
_LOOKS = 100
_PAUSE = 0.001
"""How often, and after how many seconds, a manifest is read again whose end changes while it is looked at."""

Address = tuple[str, str, str | None]
"""Thread id, namespace and checkpoint id; without the last, the beginning of the namespace."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A manifest that says that its thread has ended.

    Attributes:
        tag: Its tag, where that is known.
        incarnation: What tells it from others.
        since: When this process saw it first, or began to write it, on the monotonic clock.
    """

    tag: Any
    incarnation: bytes
    since: float


@dataclass(eq=False)
class Thread:
    """One thread, as this process knows it.

    Attributes:
        id: The thread id.
        key: The key of its manifest.
        writer: 8 random bytes, the first half of this process's commit ids here.
        view: The manifest as last seen, or `None`.
        queue: Callers whose records wait for a commit.
        leading: Whether a caller is committing.
        batch: What is being committed, until it is known what became of it.
        commits: How many commits this process has tried here.
        flush: A segment that is ready to take the place of the frames in it.
        judged: The header for which it was last decided whether segments should be merged.
        contended: When a commit was last overtaken by another process's, if that is not long ago.
        lag: How long the attempt took that was overtaken, in seconds.
        reads: Numbers for reads of the manifest, in the order in which they began.
        adopted: The number of the read that `view` comes from.
        tombstone: What was in the manifest's place when it was last read, where that was a tombstone.
    """

    id: str
    key: str
    writer: bytes
    lock: threading.Lock = field(default_factory=threading.Lock)
    view: View | None = None
    queue: deque[Entry] = field(default_factory=deque)
    leading: bool = False
    batch: Batch | None = None
    commits: int = 0
    flush: Flush | None = None
    judged: Header | None = None
    contended: float | None = None
    lag: float = 0.0
    reads: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    adopted: int = 0
    tombstone: Tombstone | None = None


@dataclass(eq=False)
class Process:
    """The state of one engine.

    Attributes:
        url: The store, for messages.
        limits: Sizes that suit it.
        appends: Whether the store appends, so that torn frames are possible.
        compression: How new blocks are compressed.
        cache: Everything that is kept at hand.
        entropy: Makes random bytes.
        conditional_deletes: Whether the store deletes on a condition.
        root_verified: Whether the store is known to enforce conditional writes.
        busy: The threads in which a caller is committing: they are not forgotten meanwhile.
        failed: Writes that could not be stored, by thread: (namespace, checkpoint id, task id), a mark of the failure.
        addressed: The checkpoints that runs go on from on purpose, as (thread id, namespace, checkpoint id), oldest
            first. Not in the cache, which may be small: without them, what is meant would be refused.
    """

    url: str
    limits: Limits
    appends: bool
    compression: Compression
    cache: Cache
    entropy: Callable[[int], bytes]
    conditional_deletes: bool = False
    root_verified: bool = False
    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    busy: dict[str, Thread] = field(default_factory=dict)
    failed: dict[str, dict[tuple[str, str, str], object]] = field(default_factory=dict)
    addressed: dict[Address, None] = field(default_factory=dict)

    def thread(self, thread_id: str) -> Thread:
        """What is known of a thread."""
        if self.pid != os.getpid():
            self._begin_anew()
        thread: Thread | None = self.cache.get(("thread", thread_id))
        if thread is not None:
            return thread
        with self.lock:
            thread = self.cache.get(("thread", thread_id)) or self.busy.get(thread_id)
            if thread is None:
                thread = Thread(thread_id, manifest_key(thread_id), self.entropy(8))
            self.cache.put(("thread", thread_id), thread, 2000)
            return thread

    def _begin_anew(self) -> None:
        """In a forked child: locks may be held by threads that are not here, and commit ids are the parent's."""
        self.pid, self.lock = os.getpid(), threading.Lock()
        self.cache = Cache(self.cache.limit)
        self.busy, self.failed = {}, {}

    def note_address(self, address: Address) -> None:
        """Remember that a checkpoint is gone on from on purpose; the last few thousand are known."""
        with self.lock:
            self.addressed.pop(address, None)
            self.addressed[address] = None
            if len(self.addressed) > _MOST_ADDRESSED:
                del self.addressed[next(iter(self.addressed))]

    def adopt(self, thread: Thread, view: View | None, read: int | None = None) -> View | None:
        """Take in a view of a thread.

        Two callers may have read at once: what counts is the read that began later, for a manifest may also go back to
        what it was (a backup was restored).

        Args:
            thread: The thread.
            view: The view.
            read: The number that the read was given before it began; the next one for what this process has written.

        Returns:
            The view.
        """
        with thread.lock:
            old = thread.view
            read = next(thread.reads) if read is None else read
            if read < thread.adopted:
                return view
            thread.view, thread.adopted = view, read
        if view is None:
            self.cache.put(("thread", thread.id), thread, 2000)
        elif old is None or old.header is not view.header:
            self.cache.put(("thread", thread.id), thread, 4000 + 6 * view.size)
            if old is not None and view.follows(old):
                self.follow(old, view)
        return view

    def follow(self, old: View, new: View) -> None:
        """Values that a new header has in other places are still the same values: keep them at hand.

        Only where the old view knew every commit that the header stands for: a version may have been stored again.
        """
        if new.header.seq > old.seq:
            return
        for record in new.header.carried:
            if not isinstance(record, Checkpoint):
                continue
            before = old.checkpoint(record.namespace, record.id)
            if before is None or before.seq != record.seq:
                continue
            for channel, pieces in record.table.items():
                known = before.table.get(channel)
                if not known or not pieces or len(known) != len(pieces) or known[-1] == pieces[-1]:
                    continue
                if old.pieces(before, channel) == known and new.pieces(record, channel) == pieces:
                    self.cache.rename(self.value_key(old, known[-1]), self.value_key(new, pieces[-1]))

    def remember(self, view: View, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint that was read at hand: a child inherits the places of its values."""
        numbers = {
            piece.segment for pieces in checkpoint.table.values() for piece in pieces if isinstance(piece, Place)
        }
        names = {number: _ulid(view, number) for number in numbers}
        key = "checkpoint", view.incarnation, checkpoint.namespace, checkpoint.id
        self.cache.put(key, (checkpoint, names), 1000 + 300 * len(checkpoint.versions))

    def recall(self, view: View, namespace: str, id_: str) -> Checkpoint | None:
        """A checkpoint that was remembered, if the segments that it refers to are the same in a view: in another
        history of the thread (a backup was restored) their numbers may be others'."""
        found = self.cache.get(("checkpoint", view.incarnation, namespace, id_))
        if found is None:
            return None
        checkpoint: Checkpoint = found[0]
        return checkpoint if all(_ulid(view, number) in (ulid, None) for number, ulid in found[1].items()) else None

    def value_key(self, view: View, piece: Piece) -> tuple[Any, ...]:
        """The key, in the cache, of the value that ends in a piece."""
        if isinstance(piece, Blob):
            return ("value", view.commit_of(piece.seq), piece.namespace, piece.channel, piece.version)
        info = view.segment(piece.segment)
        return ("value", info and info.ulid, piece.offset, piece.start)


def _ulid(view: View, number: int) -> str | None:
    info = view.segment(number)
    return info.ulid if info is not None else None


Known = tuple[Typed, tuple[Link, ...]]
"""What is kept at hand of a value: itself, and its chain of pieces."""


def refresh(process: Process, thread: Thread) -> Steps[View | None]:
    """Read a thread's manifest, if it has changed.

    Args:
        process: The process.
        thread: The thread.

    Returns:
        The view of the manifest as it is now, or `None` where the thread does not exist, or has ended.

    Raises:
        ReadTimeout: If its end changed whenever it was looked at.
    """
    for _ in range(_LOOKS):
        view, read = thread.view, next(thread.reads)
        if view is None:
            found = yield Get(thread.key)
        else:
            found = yield Get(thread.key, unless=view.tag, start=0 if view.loose else view.size)
        if found == "unchanged":
            return view
        opened = None
        if isinstance(found, Appended) and view is not None:
            opened = _appended(process, view, found)
            if opened is None:
                found = yield Get(thread.key)
        if found is None:
            thread.tombstone = None
            return process.adopt(thread, None, read)
        base, start, frames = opened or _opened(process, thread, view, found)
        if frames.open:  # its writer may be about to confirm it, or to cut it off
            last = base.size + sum([frame.size for frame in frames.frames[:-1]])
            state = yield Settled(thread.key, found.tag, last)
            if state == "changed":
                yield Sleep(_PAUSE)
                continue
            if state == "appending":
                frames = frames.without_last()
        with thread.lock:
            newer = with_frames(base, frames, found.body, start, found.tag)
        if newer.header.deleted:
            if thread.tombstone is None or thread.tombstone.tag != newer.tag:
                thread.tombstone = Tombstone(newer.tag, newer.incarnation, (yield Monotonic()))
            return process.adopt(thread, None, read)
        thread.tombstone = None
        return process.adopt(thread, newer, read)
    raise ReadTimeout(
        f"thread {thread.id!r} in {process.url}: {thread.key} changed {_LOOKS} times while its end was looked at; "
        "try again when the thread is quieter"
    )


_Opened = tuple[View, int, Frames]
"""The view that a manifest's frames follow, where in the bytes they begin, and the frames."""


def _appended(process: Process, view: View, found: Appended) -> _Opened | None:
    """What was appended since a view; `None` where it does not follow: it was appended to something else, then. What
    looks torn may be the last bytes of another frame."""
    try:
        frames = frames_after(view, found.body, 0, process.appends)
    except CorruptionError:
        return None
    return (view, 0, frames) if frames.marked or frames.open else None


def _opened(process: Process, thread: Thread, view: View | None, found: Found) -> _Opened:
    """A whole manifest; only the frames that are new, where it begins as the view at hand does."""
    body = found.body
    if view is not None and not view.loose and len(body) >= view.size and body.startswith(view.header_bytes):
        raws = b"".join([raw for _, raw in view.tail.frames[: view.count]])
        if body.startswith(raws, len(view.header_bytes)):
            return view, view.size, frames_after(view, body, view.size, process.appends)
    base = header_view(thread.key, body, found.tag, thread.id, process.appends)
    start = len(base.header_bytes)
    return base, start, frames_after(base, body, start, process.appends)


def missing(process: Process, thread: Thread, info: SegmentInfo) -> CorruptionError:
    """The error for a segment that the manifest names and the store does not have."""
    return CorruptionError(
        f"thread {thread.id!r} in {process.url}: segment {info.ulid} is gone, although manifest {thread.key} names it; "
        "restore it from a backup, or delete the thread"
    )
