"""What the directories of a store's threads tell about it.

Rules of this module:

- Manifests and listings only: no segment is read. What they cannot tell is estimated, and said to be.
- Bytes are *live* where a record that counts refers to them, as far as the last rewrite knew; *dead* where they were
  replaced or removed since; *garbage* where no manifest names their object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lsm.compact import size_class
from lsm.errors import LSMError
from lsm.format.names import MANIFESTS, SEGMENTS, segments_prefix
from lsm.format.records import HIDDEN
from lsm.process import Process, Thread, refresh
from lsm.steps import Entry, Steps
from lsm.view import View
from lsm.walk import Manifests, list_all, side_by_side, thread_id_at


@dataclass(slots=True)
class Stats:
    """The numbers of a thread, or the sums of many.

    Attributes:
        threads: How many threads.
        checkpoints: Checkpoints that can be listed, those that were put again and not merged yet counted twice.
        manifest_bytes: The bytes of manifests.
        live_bytes: The bytes of segments that are needed, about.
        dead_bytes: The bytes of segments that are not.
        garbage_objects: Objects that no manifest names.
        garbage_bytes: Their bytes.
        segments: How many segments there are, by size class; those of large values under `"values"`.
        written_bytes: How much was written for what is in the segments, about: once in a commit, once in a flush, and
            once for each size class that it has risen through.
        failures: What could not be read, by manifest.
    """

    threads: int = 0
    checkpoints: int = 0
    manifest_bytes: int = 0
    live_bytes: int = 0
    dead_bytes: int = 0
    garbage_objects: int = 0
    garbage_bytes: int = 0
    segments: dict[str, int] = field(default_factory=dict)
    written_bytes: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        """All bytes on storage."""
        return self.manifest_bytes + self.live_bytes + self.dead_bytes + self.garbage_bytes

    @property
    def space_amplification(self) -> float:
        """Bytes stored for each byte that is needed.

        Example:
            >>> Stats(live_bytes=100, dead_bytes=50).space_amplification
            1.5
        """
        needed = self.manifest_bytes + self.live_bytes
        return self.stored_bytes / needed if needed else 1.0

    @property
    def write_amplification(self) -> float:
        """Bytes written for each byte that lies in segments, about."""
        stored = self.live_bytes + self.dead_bytes
        return self.written_bytes / stored if stored else 1.0

    def add(self, other: Stats) -> None:
        """Add the numbers of others."""
        self.threads += other.threads
        self.checkpoints += other.checkpoints
        self.manifest_bytes += other.manifest_bytes
        self.live_bytes += other.live_bytes
        self.dead_bytes += other.dead_bytes
        self.garbage_objects += other.garbage_objects
        self.garbage_bytes += other.garbage_bytes
        self.written_bytes += other.written_bytes
        self.failures.update(other.failures)
        for name, count in other.segments.items():
            self.segments[name] = self.segments.get(name, 0) + count


def of_view(view: View) -> Stats:
    """The numbers of one view of a thread, without garbage."""
    seq = view.header.seq
    stats = Stats(threads=1, manifest_bytes=view.size)
    at_hand = [each for each in view.checkpoints() if each.seq > seq and not each.flags & HIDDEN]
    stats.checkpoints = len(at_hand) + sum(info.checkpoints for info in view.segments())
    for info in view.segments():
        live = info.size * info.live // info.raw if info.values and info.raw else info.size
        stats.live_bytes += live
        stats.dead_bytes += info.size - live
        name = "values" if info.values else f"class {size_class(info)}"
        stats.segments[name] = stats.segments.get(name, 0) + 1
        stats.written_bytes += info.size if info.values else info.size * (2 + size_class(info))
    return stats


def thread_stats(process: Process, thread: Thread) -> Steps[Stats]:
    """The numbers of one thread; of none, where it does not exist. Two rounds."""
    listed = yield from list_all(segments_prefix(thread.id))
    view = yield from refresh(process, thread)
    stats = of_view(view) if view is not None else Stats()
    _count_garbage(stats, view, listed)
    return stats


def store_stats(process: Process, each: Callable[[str, Stats], None] | None = None, width: int = 8) -> Steps[Stats]:
    """The numbers of a whole store. One request for each thread, and one for each thousand objects.

    Args:
        process: The process.
        each: Told the id and the numbers of each thread.
        width: How many threads at once.
    """
    total = Stats()
    folders: dict[str, list[Entry]] = {}
    for entry in (yield from list_all(SEGMENTS)):
        folders.setdefault(entry.key.rsplit("/", 1)[0].removeprefix(SEGMENTS), []).append(entry)

    def count(entry: Entry) -> Steps[None]:
        listed = folders.pop(entry.key.removeprefix(MANIFESTS), [])
        try:
            thread_id = yield from thread_id_at(process, entry.key)
            view = None
            if thread_id is not None:
                view = yield from refresh(process, process.thread(thread_id))
        except LSMError as error:
            total.failures[entry.key] = str(error)
            return
        stats = of_view(view) if view is not None else Stats()
        _count_garbage(stats, view, listed)
        total.add(stats)
        if each is not None and thread_id is not None:
            each(thread_id, stats)

    manifests = Manifests()
    while not manifests.done:
        yield from side_by_side(deque((yield from manifests.next())), count, width)
    for listed in folders.values():
        _count_garbage(total, None, listed)
    return total


def _count_garbage(stats: Stats, view: View | None, listed: list[Entry]) -> None:
    named = {info.ulid for info in view.segments()} if view is not None else set()
    garbage = [entry.size for entry in listed if entry.key.rsplit("/", 1)[-1] not in named]
    stats.garbage_objects += len(garbage)
    stats.garbage_bytes += sum(garbage)
