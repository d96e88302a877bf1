"""Removing what nothing refers to.

Rules of this module:

- An object is garbage if no manifest names it and nobody can still be about to use it: a replaced segment once it was
  replaced longer ago than the grace period, for readers of an older manifest; anything else once it was written longer
  ago than that, and *fenced*.
- A fence is a number in the manifest. Before anything is removed that was never named, the manifest is written with the
  next number, on the condition that it still is the one that does not name it. A writer remembers the number that it
  saw before it began to upload, and never names an upload under another one: it uploads anew.
- So no clock decides between collector and writer. What was listed was uploaded under an older number than the new one;
  if it was not named before the fence, it never will be. A thread without a manifest needs none: whoever uploads for a
  thread has seen its manifest, and names nothing in the manifest of another incarnation.
- What needs no write is removed first: on a full disk that is what makes room.
- Only objects are touched whose whole name is one that this store makes (`lsm.format.names.kind_of`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from lsm.errors import Conflict, CorruptionError, Locked, LSMError, Throttled, Unavailable
from lsm.flush import rebased
from lsm.format.names import MANIFESTS, SEGMENTS, manifest_key, segments_prefix, thread_id_of
from lsm.limits import TOMBSTONE, WRITERS_MARGIN
from lsm.process import Process, Thread, refresh
from lsm.removal import clear, may_be_tombstone
from lsm.steps import Delete, Entry, Get, Holder, Now, PutIf, Sleep, Steps
from lsm.view import View, open_view
from lsm.walk import AT_ONCE, Manifests, list_all, thread_id_at

logger = logging.getLogger("lsm")

_STRAYS = ("tmp/", "probe/")


@dataclass(slots=True)
class Collected:
    """What was removed, and what will be: objects and their bytes.

    Attributes:
        objects: How many were removed.
        bytes: Their bytes.
        waiting_objects: How much garbage was left, for it is not old enough yet.
        waiting_bytes: Its bytes.
        ripe: When the youngest of that will be old enough, in seconds since the epoch; 0 where none was left.
    """

    objects: int = 0
    bytes: int = 0
    waiting_objects: int = 0
    waiting_bytes: int = 0
    ripe: float = 0.0

    @property
    def collectable_at(self) -> str | None:
        """When all that waits can be removed, as ISO 8601 text; `None` where nothing waits.

        Example:
            >>> Collected(ripe=1.0).collectable_at
            '1970-01-01T00:00:01+00:00'
        """
        return datetime.fromtimestamp(self.ripe, UTC).isoformat(timespec="seconds") if self.ripe else None

    def add(self, other: Collected) -> None:
        """Count what was removed elsewhere."""
        self.objects += other.objects
        self.bytes += other.bytes
        self.waiting_objects += other.waiting_objects
        self.waiting_bytes += other.waiting_bytes
        self.ripe = max(self.ripe, other.ripe)

    def wait(self, entry: Entry, until: float) -> None:
        """Count an object that must wait."""
        self.waiting_objects += 1
        self.waiting_bytes += entry.size
        self.ripe = max(self.ripe, until)


def check_grace(grace: float, offline: bool) -> None:
    """See that a grace is one that may be asked for.

    Args:
        grace: The grace, in seconds.
        offline: Whether whoever asks says that nobody is writing or reading.

    Raises:
        ValueError: If it is too short for a store in use.
    """
    if grace < WRITERS_MARGIN and not offline:
        raise ValueError(
            f"a grace of {grace:g} s is shorter than what others do may be under way ({WRITERS_MARGIN:g} s): it could "
            "take the probe of a new root, a temporary file, or what a slow reader reads. If nobody uses the store "
            "meanwhile, say so with --offline (offline=True)"
        )


def collect_thread(
    process: Process, thread: Thread, grace: float, dry_run: bool = False, total: Collected | None = None
) -> Steps[Collected]:
    """Remove the garbage of one thread.

    Args:
        process: The process.
        thread: The thread.
        grace: How old garbage must be, in seconds.
        dry_run: Only count.
        total: Where to count; this is what is returned.
    """
    total = Collected() if total is None else total
    entries = yield from list_all(segments_prefix(thread.id))
    view = yield from refresh(process, thread)
    yield from _remove(process, entries, view, grace, dry_run, total)
    return total


def collect(
    process: Process,
    grace: float,
    dry_run: bool = False,
    failed: Callable[[str, LSMError], None] | None = None,
    total: Collected | None = None,
) -> Steps[Collected]:
    """Remove the garbage of a whole store, that of threads which exist no more included.

    Args:
        process: The process.
        grace: How old garbage must be, in seconds.
        dry_run: Only count.
        failed: Told the keys of manifests that cannot be read, or not be written, and why: the others go on.
        total: Where to count, which tells what was done of a collection that is stopped; this is what is returned.

    Raises:
        LSMError: If a manifest cannot be read or written, and nobody is to be told.
    """
    total = Collected() if total is None else total
    for prefix in _STRAYS:
        yield from _remove(process, (yield from list_all(prefix)), None, grace, dry_run, total)
    by_folder: dict[str, list[Entry]] = {}
    for entry in (yield from list_all(SEGMENTS)):
        by_folder.setdefault(entry.key.rsplit("/", 1)[0], []).append(entry)
    for folder, entries in by_folder.items():
        manifest = MANIFESTS + folder.removeprefix(SEGMENTS)
        try:
            view = yield from _view_of(process, manifest)
            yield from _remove(process, entries, view, grace, dry_run, total)
        except LSMError as error:
            if failed is None:
                raise
            failed(manifest, error)
    if not process.conditional_deletes:
        yield from _clear_tombstones(process, grace, dry_run, total)
    return total


def _clear_tombstones(process: Process, grace: float, dry_run: bool, total: Collected) -> Steps[None]:
    """Remove the tombstones that processes left which died while they removed a thread. No wall clock tells that they
    did, only that this process has watched a tombstone for long enough: where there are any, that takes two minutes."""
    left: list[tuple[Entry, Thread]] = []
    now = yield Now()
    manifests = Manifests()
    while not manifests.done:
        for entry in (yield from manifests.next()):
            thread = (yield from _ended(process, entry)) if may_be_tombstone(entry) else None
            if thread is None:
                continue
            if entry.modified > now - grace:
                total.wait(entry, entry.modified + grace)
            elif dry_run:
                total.add(Collected(1, entry.size))
            else:
                left.append((entry, thread))
    if left:
        yield Sleep(TOMBSTONE)
    for entry, thread in left:
        try:
            if (yield from _ended(process, entry)) and thread.tombstone is not None:
                cleared = yield from clear(process, thread, thread.tombstone)
                if cleared:
                    total.add(Collected(1, entry.size))
                else:
                    total.wait(entry, now + grace)
        except (Conflict, Throttled, Unavailable):
            total.wait(entry, now + grace)


def _ended(process: Process, entry: Entry) -> Steps[Thread | None]:
    """The thread of a manifest that is a tombstone."""
    try:
        thread_id = yield from thread_id_at(process, entry.key)
        if thread_id is None:
            return None
        thread = process.thread(thread_id)
        view = yield from refresh(process, thread)
    except LSMError:  # it is told where its segments are looked at
        return None
    return thread if view is None and thread.tombstone is not None else None


def _view_of(process: Process, manifest: str) -> Steps[View | None]:
    """The view of a manifest, whose thread need not be known."""
    thread_id = thread_id_of(manifest.rsplit("/", 1)[-1])
    if thread_id is not None:
        return (yield from refresh(process, process.thread(thread_id)))
    found = yield Get(manifest)
    if found is None:
        return None
    view = open_view(manifest, found.body, found.tag, None, process.appends)
    if view.header.deleted:
        return None
    if manifest_key(view.header.thread_id) != manifest:  # by another's manifest, all of this thread is garbage
        raise CorruptionError(f"{manifest}: this is the manifest of thread {view.header.thread_id!r}: it was moved")
    return view


def _remove(
    process: Process, entries: Sequence[Entry], view: View | None, grace: float, dry_run: bool, total: Collected
) -> Steps[None]:
    """Remove the garbage among the objects of one thread, which were listed before its view was read."""
    now = yield Now()
    named = {info.ulid for info in view.segments()} if view is not None else set()
    retired = dict(view.header.retired) if view is not None else {}
    free: list[Entry] = []  # what nobody can name any more
    orphans: list[Entry] = []
    for entry in entries:
        name = entry.key.rsplit("/", 1)[-1]
        if name in named:
            continue
        since = max(entry.modified, retired.get(name, 0))
        if since <= now - grace:
            (free if view is None or name in retired else orphans).append(entry)
        else:
            total.wait(entry, since + grace)
    yield from _take(free, dry_run, total)
    if view is not None and orphans and not dry_run and not (yield from _fence(process, view)):
        for entry in orphans:
            total.wait(entry, now)
        return
    yield from _take(orphans, dry_run, total)


def _take(garbage: Sequence[Entry], dry_run: bool, total: Collected) -> Steps[None]:
    for start in range(0, len(garbage), AT_ONCE):
        some = garbage[start : start + AT_ONCE]
        if not dry_run:
            yield Delete([entry.key for entry in some])
        total.add(Collected(len(some), sum(entry.size for entry in some)))


def _fence(process: Process, view: View) -> Steps[bool]:
    """Have no writer name what this view does not name and what was uploaded before now. Answers whether that is so for
    sure; else there is always another time."""
    header = replace(view.header, fence=view.header.fence + 1)
    frames = view.tail.frames[: view.count]
    after = rebased(view, header, process.compression, frames, header.seq)
    try:
        yield PutIf(view.key, b"".join(after.parts()), view.tag)
    except Locked:
        holder = (yield Holder(view.key)) or "another process"
        logger.warning("%s is locked by %s: what nothing refers to there is left for another time", view.key, holder)
        return False
    except (Conflict, Throttled, Unavailable):
        return False
    if view.dropped:
        logger.warning("%s ended within a commit that nobody had confirmed: the end is cut off", view.key)
    return True
