"""What one process knows: its cache, and for every thread it touches the manifest as last seen.

Rules of this module:

- All state of the engine that outlives a call hangs on a `Process`. The simulator makes several.
- What is known of a thread is a cache too: it is revalidated by every call (`refresh`), and losing it costs a request.
- Locks are held for moments in memory, never across a request.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lsm.cache import Cache
from lsm.errors import CorruptionError
from lsm.format.envelope import Compression
from lsm.format.manifest import Header, unpack_frames
from lsm.format.names import manifest_key
from lsm.format.patch import Link
from lsm.format.records import Blob, Checkpoint, Piece, Typed
from lsm.format.segment import SegmentInfo
from lsm.limits import Limits
from lsm.steps import Appended, Found, Get, Steps
from lsm.view import View, cut, open_view

if TYPE_CHECKING:
    from lsm.commit import Batch, Entry
    from lsm.flush import Flush


_MOST_ADDRESSED = 4096

Address = tuple[str, str, str | None]
"""Thread id, namespace and checkpoint id; without the last, the beginning of the namespace."""


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
        root_verified: Whether the store is known to enforce conditional writes.
        busy: The threads in which a caller is committing: they are not forgotten meanwhile.
        failed: Writes that could not be stored, by thread, as (namespace, checkpoint id, task id).
        addressed: The checkpoints that runs go on from on purpose, as (thread id, namespace, checkpoint id), oldest
            first. Not in the cache, which may be small: without them, what is meant would be refused.
    """

    url: str
    limits: Limits
    appends: bool
    compression: Compression
    cache: Cache
    entropy: Callable[[int], bytes]
    root_verified: bool = False
    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    busy: dict[str, Thread] = field(default_factory=dict)
    failed: dict[str, set[tuple[str, str, str]]] = field(default_factory=dict)
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

    def adopt(self, thread: Thread, view: View | None) -> View | None:
        """Take in a newer view of a thread, and answer the newest that is known.

        Two callers may have read at once; of one incarnation the view with more commits is the newer, or, with as
        many, the one that was read later.
        """
        with thread.lock:
            old = thread.view
            if old is not None and view is not None and old.incarnation == view.incarnation and old.seq > view.seq:
                return view
            thread.view = view
        if view is None:
            self.cache.put(("thread", thread.id), thread, 2000)
        elif old is None or old.header is not view.header:
            self.cache.put(("thread", thread.id), thread, 4000 + 6 * view.size)
            if old is not None and old.incarnation == view.incarnation:
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

    def value_key(self, view: View, piece: Piece) -> tuple[Any, ...]:
        """The key, in the cache, of the value that ends in a piece."""
        if isinstance(piece, Blob):
            return ("value", view.incarnation, piece.namespace, piece.channel, piece.version, piece.seq)
        info = view.segment(piece.segment)
        return ("value", info and info.ulid, piece.offset, piece.start)


Known = tuple[Typed, tuple[Link, ...]]
"""What is kept at hand of a value: itself, and its chain of pieces."""


def refresh(process: Process, thread: Thread) -> Steps[View | None]:
    """Read a thread's manifest, if it has changed.

    Returns:
        The view of the manifest as it is now, or `None` where the thread does not exist.
    """
    view = thread.view
    if view is None:
        found = yield Get(thread.key)
    else:
        found = yield Get(thread.key, unless=view.tag, start=0 if view.torn else view.size)
    if found == "unchanged":
        return view
    if found is None:
        return process.adopt(thread, None)
    if isinstance(found, Appended):
        assert view is not None
        return process.adopt(thread, _extend(process, thread, view, found.body, found.tag))
    assert isinstance(found, Found)
    body = found.body
    if view is not None and len(body) >= view.size and body.startswith(view.header_bytes):
        raws = b"".join([raw for _, raw in view.tail.frames[: view.count]])
        if body.startswith(raws, len(view.header_bytes)):
            return process.adopt(thread, _extend(process, thread, view, body[view.size :], found.tag))
    return process.adopt(thread, open_view(thread.key, body, found.tag, thread.id, process.appends))


def _extend(process: Process, thread: Thread, view: View, more: bytes, tag: Any) -> View:
    frames, whole = unpack_frames(more, 0, view.seq, view.incarnation, process.appends, thread.key)
    with thread.lock:
        return view.extended(list(zip(frames, cut(more, 0, frames), strict=True)), tag, whole < len(more))


def missing(process: Process, thread: Thread, info: SegmentInfo) -> CorruptionError:
    """The error for a segment that the manifest names and the store does not have."""
    return CorruptionError(
        f"thread {thread.id!r} in {process.url}: segment {info.ulid} is gone, although manifest {thread.key} names it; "
        "restore it from a backup, or delete the thread"
    )
