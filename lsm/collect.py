"""Removing what nothing refers to.

Rules of this module:

- An object is garbage if no manifest names it and nobody can still be about to use it: a replaced segment once it was
  replaced longer ago than the grace period, anything else once it was written longer ago than that.
- A thread's manifest is read after its objects were listed: what was listed and is not named was not being committed
  by the writer whose manifest was read, unless it is younger than the grace.
- A write may be under way for longer than the grace (a machine that slept). So before anything is removed that was
  never named, the manifest is changed: a write that is still to come, and would name it, then fails its condition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lsm.errors import Conflict, CorruptionError, LSMError, Throttled, Unavailable
from lsm.flush import rebased
from lsm.format.names import MANIFESTS, SEGMENTS, manifest_key, segments_prefix, thread_id_of
from lsm.process import Process, Thread, refresh
from lsm.steps import Delete, Entry, Get, List, Now, PutIf, Steps
from lsm.view import View, open_view

logger = logging.getLogger("lsm")

_STRAYS = ("tmp/", "probe/")


@dataclass(slots=True)
class Collected:
    """What was removed: objects and their bytes.

    Attributes:
        ripe: When the youngest garbage that was left will be old enough, in seconds since the epoch; 0 where none was.
    """

    objects: int = 0
    bytes: int = 0
    ripe: float = 0.0

    def add(self, other: Collected) -> None:
        """Count what was removed elsewhere."""
        self.objects += other.objects
        self.bytes += other.bytes
        self.ripe = max(self.ripe, other.ripe)


def list_all(prefix: str) -> Steps[list[Entry]]:
    """All objects below a prefix."""
    entries: list[Entry] = []
    while True:
        page = yield List(prefix, entries[-1].key if entries else None)
        entries += page.entries
        if not page.more or not page.entries:
            return entries


def collect_thread(process: Process, thread: Thread, grace: float, dry_run: bool = False) -> Steps[Collected]:
    """Remove the garbage of one thread.

    Args:
        process: The process.
        thread: The thread.
        grace: How old garbage must be, in seconds.
        dry_run: Only count.
    """
    entries = yield from list_all(segments_prefix(thread.id))
    view = yield from refresh(process, thread)
    return (yield from _remove(process, entries, view, grace, dry_run))


def collect(
    process: Process,
    grace: float,
    dry_run: bool = False,
    failed: Callable[[str, LSMError], None] | None = None,
) -> Steps[Collected]:
    """Remove the garbage of a whole store, that of threads which exist no more included.

    Args:
        process: The process.
        grace: How old garbage must be, in seconds.
        dry_run: Only count.
        failed: Told the keys of manifests that cannot be read; of their threads nothing is removed.

    Raises:
        LSMError: If a manifest cannot be read and nobody is to be told.
    """
    total = Collected()
    by_folder: dict[str, list[Entry]] = {}
    for entry in (yield from list_all(SEGMENTS)):
        by_folder.setdefault(entry.key.rsplit("/", 1)[0], []).append(entry)
    for folder, entries in by_folder.items():
        manifest = MANIFESTS + folder.removeprefix(SEGMENTS)
        try:
            view = yield from _view_of(process, manifest)
        except LSMError as error:
            if failed is None:
                raise
            failed(manifest, error)
            continue
        total.add((yield from _remove(process, entries, view, grace, dry_run)))
    for prefix in _STRAYS:
        total.add((yield from _remove(process, (yield from list_all(prefix)), None, grace, dry_run)))
    return total


def _view_of(process: Process, manifest: str) -> Steps[View | None]:
    """The view of a manifest, whose thread need not be known."""
    thread_id = thread_id_of(manifest.rsplit("/", 1)[-1])
    if thread_id is not None:
        return (yield from refresh(process, process.thread(thread_id)))
    found = yield Get(manifest)
    if found is None:
        return None
    view = open_view(manifest, found.body, found.tag, None, process.appends)
    if manifest_key(view.header.thread_id) != manifest:  # by another's manifest, all of this thread is garbage
        raise CorruptionError(f"{manifest}: this is the manifest of thread {view.header.thread_id!r}: it was moved")
    return view


def _remove(
    process: Process, entries: Sequence[Entry], view: View | None, grace: float, dry_run: bool
) -> Steps[Collected]:
    now = yield Now()
    named = {info.ulid for info in view.segments()} if view is not None else set()
    retired = dict(view.header.retired) if view is not None else {}
    garbage, ripe = [], 0.0
    for entry in entries:
        name = entry.key.rsplit("/", 1)[-1]
        if name in named:
            continue
        since = max(entry.modified, retired.get(name, 0))
        if since <= now - grace:
            garbage.append(entry)
        else:
            ripe = max(ripe, since + grace)
    orphans = [name for entry in garbage if (name := entry.key.rsplit("/", 1)[-1]) not in retired]
    if view is not None and orphans and not dry_run and not (yield from _fence(process, view, orphans[-1], now)):
        garbage = [entry for entry in garbage if entry.key.rsplit("/", 1)[-1] in retired]  # the others another time
        ripe = max(ripe, now)
    if not dry_run:
        yield from delete_all([entry.key for entry in garbage])
    return Collected(len(garbage), sum(entry.size for entry in garbage), ripe)


def _fence(process: Process, view: View, orphan: str, now: float) -> Steps[bool]:
    """Change a manifest, so that no write that was made for it as it is can succeed any more: an orphan is entered as
    replaced. Answers whether that succeeded for sure; else there is always another time."""
    header = replace(view.header, retired=(*view.header.retired, (orphan, int(now))))
    frames = view.tail.frames[: view.count]
    after = rebased(view, header, process.compression, frames, header.seq)
    try:
        yield PutIf(view.key, b"".join((after.header_bytes, *(raw for _, raw in frames))), view.tag)
    except (Conflict, Throttled, Unavailable):
        return False
    if view.dropped:
        logger.warning("%s ended within a commit that nobody had confirmed: the end is cut off", view.key)
    return True


def delete_all(keys: Sequence[str]) -> Steps[None]:
    """Remove objects, a thousand at a time."""
    for start in range(0, len(keys), 1000):
        yield Delete(keys[start : start + 1000])
