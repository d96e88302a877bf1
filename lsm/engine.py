"""The engine: what a saver calls.

Rules of this module:

- Every method makes steps; who runs them, and how, is the caller's business (`lsm.drive.Runtime`).
- It knows which module answers which call, and no more: no bytes, no policy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from lsm.cache import Cache
from lsm.collect import Collected, collect, collect_thread
from lsm.commit import commit
from lsm.compact import all_logs, compact, copy, delete_runs, due, keep, prune
from lsm.errors import IncompleteWritesError, LSMError
from lsm.find import Item, Scan, Terms, by_id, latest
from lsm.format.envelope import Compression
from lsm.format.manifest import pack_header
from lsm.format.names import check_thread_id
from lsm.format.records import (
    Checkpoint,
    Typed,
    Version,
    Writes,
    check,
    check_put,
    check_typed,
    pack_payload,
    pack_writes,
    runs_of,
)
from lsm.frame import Change, Nothing, Put, PutWrites
from lsm.history import ChannelHistory, history
from lsm.limits import FILES, HEADER, OBJECTS, Limits
from lsm.listing import Listing
from lsm.process import Process, Thread, refresh
from lsm.read import Stored, materialise, reading
from lsm.removal import remove
from lsm.retention import Expire, Horizon, Retention
from lsm.root import verify_root
from lsm.steps import All, Now, Steps, results
from lsm.view import View

logger = logging.getLogger("lsm")

ConcurrentRuns = Literal["fork", "refuse"]

_SIDE_BY_SIDE = 16
_WORTH_EXPIRING = 0.25


class Engine:
    """The operations of one process on one store.

    Args:
        url: The store, for messages.
        appends: Whether the store appends.
        entropy: Makes random bytes.
        compression: How new blocks are compressed.
        cache_bytes: How much is kept at hand, in bytes.
        limits: Sizes; by default those that suit the kind of store.
        conditional_deletes: Whether the store deletes on a condition. Where it does not, deletions leave tombstones.
        retention: How long checkpoints stay.
        concurrent_runs: With `"refuse"`, a checkpoint must go on from its namespace's head, unless it is meant not to.

    Attributes:
        on_due: Told the id of a thread whose segments should be merged.

    Example:
        >>> import os
        >>> from lsm.drive import run
        >>> from lsm.storage import open_storage
        >>> storage = open_storage("memory://")
        >>> engine = Engine(storage.url, storage.appends, os.urandom)
        >>> value = ("msgpack", b"hello")
        >>> empty = ("msgpack", b"{}")
        >>> run(engine.put("t", "", "1", None, empty, empty, {"c": "v1"}, {"c": ("v1", value)}), storage)
        >>> run(engine.get("t", ""), storage).values
        {'c': ('msgpack', b'hello')}
    """

    def __init__(
        self,
        url: str,
        appends: bool,
        entropy: Callable[[int], bytes],
        *,
        compression: Compression = "zstd",
        cache_bytes: int = 256 << 20,
        limits: Limits | None = None,
        conditional_deletes: bool = False,
        retention: Retention | None = None,
        concurrent_runs: ConcurrentRuns = "fork",
    ):
        limits = limits or (FILES if appends else OBJECTS)
        self.on_due: Callable[[str], None] | None = None
        self.retention = retention
        self._exclusive = concurrent_runs == "refuse"
        self.process = Process(url, limits, appends, compression, Cache(cache_bytes), entropy, conditional_deletes)

    def setup(self) -> Steps[None]:
        """Prove that the store is there and enforces conditional writes."""
        yield from verify_root(self.process.url, self.process.entropy)
        self.process.root_verified = True

    # Writing.

    def put(
        self,
        thread_id: str,
        namespace: str,
        id_: str,
        parent: str | None,
        checkpoint: Typed,
        metadata: Typed,
        versions: Mapping[str, Version],
        values: Mapping[str, tuple[Version, Typed | None]],
        *,
        root: str | None = None,
        terms: Sequence[bytes] = (),
        deltas: Sequence[str] | None = None,
        intended: bool = False,
    ) -> Steps[None]:
        """Store a checkpoint.

        Args:
            thread_id: The thread.
            namespace: The namespace.
            id_: The checkpoint.
            parent: Its parent.
            checkpoint: Opaque.
            metadata: Opaque.
            versions: The version of every channel.
            values: The version and value of every channel that has a new one; `None` for a channel that is empty.
            root: The root checkpoint that a subgraph's one belongs to.
            terms: Hashes of the metadata, for filters.
            deltas: The channels that are rebuilt from ancestors' writes, where that is known.
            intended: That the parent need not be the namespace's head.

        Raises:
            ConcurrentRunError: If concurrent runs are refused and another has moved the thread on.
            IncompleteWritesError: If writes of the parent failed in this process and the thread was not read since.
            TypeError: If a part is of a type that no record may have.
            ValueError: If a part is out of range, or too large.
        """
        check_thread_id(thread_id)
        for typed in (checkpoint, metadata):
            check_typed(typed)
        if any(failed[:2] == (namespace, parent) for failed in self.process.failed.get(thread_id, ())):
            raise IncompleteWritesError(
                f"thread {thread_id!r}, namespace {namespace!r}: writes of checkpoint {parent!r} could not be stored, "
                f"so its child {id_!r} is refused: it would hide the loss. Start the run again from what is stored"
            )
        now = yield Now()
        record = Checkpoint(
            namespace,
            id_,
            parent,
            root,
            int(now * 1000),
            dict(versions),
            {},
            b"".join(terms),
            None if deltas is None else tuple(deltas),
            pack_payload(checkpoint, metadata),
        )
        check_put(record, values)
        exclusive = self._exclusive and not intended and (thread_id, namespace, parent) not in self.process.addressed
        yield from self._commit(thread_id, Put(record, values, exclusive))

    def put_writes(
        self,
        thread_id: str,
        namespace: str,
        id_: str,
        task_id: str,
        task_path: str,
        writes: Sequence[tuple[int, str, Typed]],
    ) -> Steps[None]:
        """Store the writes of a task on a checkpoint.

        Args:
            thread_id: The thread.
            namespace: The namespace.
            id_: The checkpoint.
            task_id: The task.
            task_path: Its path.
            writes: (index, channel, value) of each.

        Raises:
            TypeError: If a part is of a type that no record may have.
            ValueError: If a part is out of range, or too large.
        """
        check_thread_id(thread_id)
        for _, _, typed in writes:
            check_typed(typed)
        now = yield Now()
        value = pack_writes(typed for _, _, typed in writes)
        runs = runs_of((index, channel) for index, channel, _ in writes)
        record = Writes(namespace, id_, task_id, task_path, int(now * 1000), runs, value)
        check(record)
        failed = self.process.failed
        try:
            yield from self._commit(thread_id, PutWrites(record))
        except BaseException:
            failed.setdefault(thread_id, {})[namespace, id_, task_id] = object()
            raise
        if thread_id in failed:
            failed[thread_id].pop((namespace, id_, task_id), None)

    def flush(self, thread_id: str) -> Steps[None]:
        """Put what is in the manifest's frames into a segment."""
        thread = self.process.thread(thread_id)
        view = yield from refresh(self.process, thread)
        if view is not None and view.count:
            yield from commit(self.process, thread, Nothing())

    def _commit(self, thread_id: str, change: Change) -> Steps[None]:
        thread, limits = self.process.thread(thread_id), self.process.limits
        yield from commit(self.process, thread, change)
        view = thread.view
        if view is not None and view.header is not thread.judged:
            thread.judged = view.header
            if len(view.header.segments) > limits.directory or _crowds(self.process, view):
                try:
                    yield from compact(self.process, thread, lambda view: due(view, limits) or all_logs(view))
                except LSMError as error:  # the commit is stored, and that is what its caller asked for
                    logger.warning("thread %r: its segments could not be merged (%s)", thread_id, error)
            elif self.on_due is not None and due(view, limits):
                self.on_due(thread_id)

    # Reading.

    def get(self, thread_id: str, namespace: str, id_: str | None = None) -> Steps[Stored | None]:
        """A checkpoint by its id, or the one with the highest id.

        Returns:
            The checkpoint with its values and writes, or `None`.
        """
        before = dict(self.process.failed.get(thread_id, {}))
        thread = self.process.thread(thread_id)

        def answer(view: View) -> Steps[Stored | None]:
            item: Item | None
            if id_ is None:
                item = yield from latest(self.process, thread, view, namespace)
            else:
                item = yield from by_id(self.process, thread, view, namespace, id_)
            if item is None or not (yield from self._shows(thread, view, item)):
                return None
            if id_ is not None and self._exclusive:
                yield from self._note_address(thread, view, namespace, id_)
            self._remember(view, item.checkpoint)
            return (yield from materialise(self.process, thread, view, [item]))[0]

        found = yield from reading(self.process, thread, answer, None)
        failed = self.process.failed.get(thread_id, {})
        for key, failure in before.items():  # whoever has read what is stored goes on from that
            if failed.get(key) is failure:  # else the same writes failed again meanwhile
                failed.pop(key, None)
        return found

    def _shows(self, thread: Thread, view: View, item: Item) -> Steps[bool]:
        if self.retention is None:
            return True
        horizon = Horizon(self.process, thread, view, self.retention, (yield Now()))
        return (yield from horizon.shows(item.checkpoint))

    def address(self, thread_id: str, namespace: str, id_: str | None) -> Steps[None]:
        """Say that a run will go on from a checkpoint on purpose, though it is not the namespace's head.

        To read a checkpoint by its id says so, too.

        Args:
            thread_id: The thread.
            namespace: The namespace.
            id_: The checkpoint; `None` to begin anew.
        """
        thread = self.process.thread(thread_id)
        if self._exclusive:
            yield from reading(
                self.process, thread, lambda view: self._note_address(thread, view, namespace, id_), None
            )

    def _note_address(self, thread: Thread, view: View, namespace: str, id_: str | None) -> Steps[None]:
        head = yield from latest(self.process, thread, view, namespace)
        if head is not None and head.checkpoint.id != id_:
            self.process.note_address((thread.id, namespace, id_))

    def _remember(self, view: View, checkpoint: Checkpoint) -> None:
        """Keep what a child of a checkpoint will inherit."""
        if not view.has(checkpoint):
            self.process.remember(view, checkpoint)

    def list(
        self,
        thread_ids: Sequence[str] | None,
        namespace: str | None = None,
        id_: str | None = None,
        before: str | None = None,
        terms: Sequence[Terms] = (),
    ) -> Listing:
        """Checkpoints, newest first. Takes what `Listing` takes."""
        return Listing(self.process, thread_ids, namespace, id_, before, terms, self.retention)

    def history(
        self, thread_id: str, namespace: str, id_: str | None, channels: Sequence[str]
    ) -> Steps[dict[str, ChannelHistory]]:
        """What the ancestors of a checkpoint contributed to some channels."""
        thread = self.process.thread(thread_id)

        def answer(view: View) -> Steps[dict[str, ChannelHistory]]:
            if id_ is not None and self.retention is not None:
                item = yield from by_id(self.process, thread, view, namespace, id_)
                if item is None or not (yield from self._shows(thread, view, item)):
                    return absent
            return (yield from history(self.process, thread, view, namespace, id_, channels))

        absent = {channel: ChannelHistory() for channel in channels}
        return (yield from reading(self.process, thread, answer, absent))

    # Removing.

    def delete(self, thread_id: str) -> Steps[None]:
        """Remove a thread and all of its objects. Two rounds, and the removal of what is without a condition."""
        yield from remove(self.process, self.process.thread(thread_id))

    def delete_all(self, thread_ids: Sequence[str]) -> Steps[None]:
        """Remove some threads."""
        for start in range(0, len(thread_ids), _SIDE_BY_SIDE):
            batch = thread_ids[start : start + _SIDE_BY_SIDE]
            results((yield All([self.delete(thread_id) for thread_id in batch])))

    def prune(self, thread_ids: Sequence[str]) -> Steps[None]:
        """Reduce threads to the latest checkpoint of every namespace, and what that is rebuilt from."""
        return prune(self.process, thread_ids)

    def delete_runs(self, terms: Sequence[bytes], doomed: Callable[[Typed], bool]) -> Steps[None]:
        """Remove the checkpoints that some runs made: those that have one of the terms and whose metadata is doomed."""
        return delete_runs(self.process, terms, doomed)

    def copy(self, source_id: str, target_id: str) -> Steps[None]:
        """Copy a thread to another. Raises `ValueError` if that cannot be a thread's id."""
        check_thread_id(target_id)
        return copy(self.process, self.process.thread(source_id), self.process.thread(target_id))

    # Housekeeping.

    def compact(self, thread_id: str) -> Steps[None]:
        """Merge all segments of a thread into one."""
        yield from self.flush(thread_id)
        yield from compact(self.process, self.process.thread(thread_id), all_logs)

    def compact_due(self, thread_id: str) -> Steps[bool]:
        """Merge the segments of a thread that should be merged now."""
        return compact(self.process, self.process.thread(thread_id), lambda view: due(view, self.process.limits))

    def expire(self, thread_id: str, least: float = 0.0) -> Steps[bool]:
        """Remove what has expired in a thread, or the thread where it is idle.

        Args:
            thread_id: The thread.
            least: Only if more than this part of its checkpoints has expired.

        Returns:
            Whether anything was removed.
        """
        thread = self.process.thread(thread_id)
        view = yield from refresh(self.process, thread)
        if view is None or self.retention is None:
            return False
        now = yield Now()
        if self.retention.is_idle(view, now):
            return (yield from remove(self.process, thread, only=view))
        expired, count = yield from self.expired(thread_id)
        if expired <= least * count:
            return False
        retention = self.retention
        yield from keep(self.process, thread, lambda: Expire(retention, now))
        return True

    def expired(self, thread_id: str) -> Steps[tuple[int, int]]:
        """How many checkpoints of a thread have expired, and how many there are that no rewrite has hidden."""
        thread, retention = self.process.thread(thread_id), self.retention
        now = yield Now()

        def answer(view: View) -> Steps[tuple[int, int]]:
            if retention is None:
                return 0, 0
            horizon = Horizon(self.process, thread, view, retention, now)
            scan, expired, count = Scan(self.process, thread, view), 0, 0
            while items := (yield from scan.next(256)):
                count += len(items)
                expired += len(items) - len((yield from horizon.visible(items)))
            return expired, count

        return (yield from reading(self.process, thread, answer, (0, 0)))

    def maintain(self, thread_id: str) -> Steps[None]:
        """What the background owes a thread that is written to: merge, expire, collect."""
        if self.retention is not None:
            yield from self.expire(thread_id, _WORTH_EXPIRING)
        while (yield from self.compact_due(thread_id)):
            pass
        yield from self.collect_thread(thread_id, self.process.limits.grace)

    def collect(
        self,
        grace: float,
        dry_run: bool = False,
        failed: Callable[[str, LSMError], None] | None = None,
        total: Collected | None = None,
    ) -> Steps[Collected]:
        """Remove what nothing refers to, once it is older than `grace` seconds. `failed` is told the keys of manifests
        that cannot be read, whose threads are left alone; without it, the first of them ends the collection. What is
        removed is counted in `total`, if that is given."""
        return collect(self.process, grace, dry_run, failed, total)

    def collect_thread(
        self, thread_id: str, grace: float, dry_run: bool = False, total: Collected | None = None
    ) -> Steps[Collected]:
        """The same for one thread."""
        return collect_thread(self.process, self.process.thread(thread_id), grace, dry_run, total)


def _crowds(process: Process, view: View) -> bool:
    """Whether the directory leaves the header too little room for anything else."""
    if len(view.header_bytes) <= HEADER // 2 or len(view.header.segments) < 2:
        return False
    bare = replace(view.header, carried=(), inline={}, heads=(), peaks=(), partial=())
    return len(pack_header(bare, process.compression)) > HEADER // 2
