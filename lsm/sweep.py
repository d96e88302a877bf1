"""Going through a store to bring its threads into shape: what a scheduled job does.

Rules of this module:

- A thread is *in shape* when nothing in it is to be merged, has expired or is ripe for collection. What is in shape
  stays so until its manifest changes, or until a time that is known when it is looked at. Both are remembered, so that
  the next sweep passes it by without a request of its own: a sweep of idle threads is a listing.
- What is remembered is a hint, in one small object for each shard. Where it is missing, damaged, or of other settings,
  threads are looked at that need not have been.
- Whatever is done for one thread is idempotent, and fails alone. Sweeps, writers and readers may all run at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import blake2b
from struct import Struct

from lsm.collect import Collected
from lsm.compact import due
from lsm.engine import Engine
from lsm.errors import CorruptionError, FormatVersionError, LSMError, StorageError
from lsm.format.envelope import seal, unseal
from lsm.format.names import sweep_key
from lsm.process import refresh
from lsm.retention import Retention
from lsm.steps import Found, Get, Now, PutIf, Steps, Tag
from lsm.stop import Stop, Stopped
from lsm.view import View
from lsm.walk import Manifests, side_by_side, thread_id_at, told_id

logger = logging.getLogger("lsm")

_MARK = Struct("<8sI")
_MOST_MARKS = 1 << 20
_CONTEXT = b"sweep"
_LOOKS = 8
"""How often, within `max_age`, a thread that rests is looked at for what has expired."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a sweep is to do.

    Args:
        shard: Of how many parts of the store this is which one, as (number from 0, count). Threads are spread over the
            parts by a hash of the manifest's key.
        threads: Only threads whose id matches this pattern (`fnmatch`: `*`, `?`, `[...]`).
        grace: How old garbage must be, in seconds.
        dry_run: Change nothing, and say what would be done.
        most: Begin no thread after so many seconds.

    Raises:
        ValueError: If a number makes no sense.

    Example:
        >>> Options(shard=(0, 4), threads="user-*").shard
        (0, 4)
    """

    shard: tuple[int, int] = (0, 1)
    threads: str | None = None
    grace: float = 3600.0
    dry_run: bool = False
    most: float | None = None

    def __post_init__(self) -> None:
        number, count = self.shard
        if not 0 <= number < count:
            raise ValueError(f"there is no shard {number} of {count}: shards are numbered from 0 to {count - 1}")
        if self.grace < 0:
            raise ValueError(f"the grace must not be negative, as {self.grace!r} is")
        if self.most is not None and self.most <= 0:
            raise ValueError(f"the most time to take must be above 0 s, not {self.most!r}")


@dataclass(slots=True)
class Outcome:
    """What was done for one thread; with a dry run, what would have been.

    Attributes:
        key: The key of its manifest.
        thread_id: Its id, or `None` where the manifest has gone or cannot be read.
        passed: Whether it is not among those that were asked for, or has ended.
        merged: How many segments were merged.
        rewritten: Their bytes.
        expired: How many checkpoints had expired.
        removed: Whether the thread was idle for too long and is gone.
        freed: The garbage that was removed.
        tag: That of the manifest that was found in shape.
        again: When it is to be looked at again though it has not changed, in seconds since the epoch; 0 for never.
        stopped: Whether the work on it was ended before it was in shape.
        failure: What went wrong.
    """

    key: str
    thread_id: str | None = None
    passed: bool = False
    merged: int = 0
    rewritten: int = 0
    expired: int = 0
    removed: bool = False
    freed: Collected = field(default_factory=Collected)
    tag: Tag | None = None
    again: float = 0.0
    stopped: bool = False
    failure: str | None = None


@dataclass(slots=True)
class Summary:
    """What a sweep has done; with a dry run, what it would do.

    Attributes:
        threads: The threads of this shard that match.
        unchanged: Those that were passed by, since they were found in shape before.
        looked_at: Those that were looked at.
        compacted: Those in which segments were merged.
        merged: How many segments that were.
        rewritten_bytes: Their bytes.
        expired: Checkpoints that had expired.
        removed: Threads that were idle for too long.
        freed_objects: Objects that were garbage.
        freed_bytes: Their bytes.
        waiting_objects: Objects that are garbage, in the threads that were looked at, and too young to be removed.
        waiting_bytes: Their bytes.
        collectable_at: When they are all old enough, as ISO 8601 text; `None` where there are none.
        left: Threads that were not looked at, or not to the end, for lack of time or since the sweep was stopped.
        stopped: Whether it was stopped.
        failures: What went wrong, by thread id (or manifest, where that cannot be read).
        seconds: How long it took.
    """

    threads: int = 0
    unchanged: int = 0
    looked_at: int = 0
    compacted: int = 0
    merged: int = 0
    rewritten_bytes: int = 0
    expired: int = 0
    removed: int = 0
    freed_objects: int = 0
    freed_bytes: int = 0
    waiting_objects: int = 0
    waiting_bytes: int = 0
    collectable_at: str | None = None
    left: int = 0
    stopped: bool = False
    failures: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count one thread."""
        if outcome.passed:
            self.threads -= 1
            return
        if outcome.stopped:
            self.stop(1)
        else:
            self.looked_at += 1
        self.compacted += outcome.merged > 0
        self.merged += outcome.merged
        self.rewritten_bytes += outcome.rewritten
        self.expired += outcome.expired
        self.removed += outcome.removed
        self.freed_objects += outcome.freed.objects
        self.freed_bytes += outcome.freed.bytes
        self.waiting_objects += outcome.freed.waiting_objects
        self.waiting_bytes += outcome.freed.waiting_bytes
        self.collectable_at = max(self.collectable_at or "", outcome.freed.collectable_at or "") or None
        if outcome.failure is not None:
            self.failures[outcome.thread_id or outcome.key] = outcome.failure

    def stop(self, left: int) -> None:
        """Note that the sweep was stopped, and how many threads that leaves."""
        self.stopped = True
        self.left += left


class Sweep:
    """One sweep: what is to be done (`plan`), what was done (`settle`), and the end (`close`). Between, `tend` is run
    for each key of the plan, by whoever and wherever.

    Args:
        options: What to do.
        retention: The retention of the engine that does it.
        stop: Asks the sweep to end early: it begins no other thread, and says what it has done.
    """

    def __init__(self, options: Options, retention: Retention | None = None, stop: Stop | None = None):
        self.summary = Summary()
        self._options = options
        self._stop = stop or Stop()
        self._key = sweep_key(*options.shard)
        self._settings = f"{retention!r} {options.grace!r}".encode()
        self._tag: Tag | None = None
        self._known: dict[bytes, int] = {}
        self._marks: dict[bytes, int] = {}
        self._begun = 0.0
        self._planned = False

    def plan(self) -> Steps[list[str]]:
        """The manifests of the threads that are to be looked at. One request, and one for each thousand threads."""
        self._begun = yield Now()
        keys: list[str] = []
        try:
            yield from self._stop.unless_asked(self._list(keys))
        except Stopped:
            self.summary.stop(len(keys))
            return []
        self._planned = True
        return keys

    def _list(self, keys: list[str]) -> Steps[None]:
        yield from self._recall()
        manifests = Manifests()
        while not manifests.done:
            for entry in (yield from manifests.next()):
                if not in_shard(entry.key, self._options.shard):
                    continue
                mark = self._mark(entry.key, entry.tag)
                again = self._known.get(mark)
                rests = again is not None and not 0 < again <= self._begun
                if again is not None and rests:
                    self._marks[mark] = again
                if not _may_match(entry.key, self._options.threads):
                    continue
                self.summary.threads += 1
                if rests:
                    self.summary.unchanged += 1
                else:
                    keys.append(entry.key)

    def may_begin(self) -> Steps[bool]:
        """Whether another thread may be begun. Where not, that is counted."""
        if self._stop.asked:
            self.summary.stop(1)
            return False
        if self._options.most is None or (yield Now()) < self._begun + self._options.most:
            return True
        self.summary.left += 1
        return False

    def settle(self, outcome: Outcome) -> None:
        """Take note of what was done for a thread."""
        self.summary.add(outcome)
        if outcome.tag is not None and len(self._marks) < _MOST_MARKS:
            again = 0 if not outcome.again else max(1, min(int(outcome.again) + 1, 2**32 - 1))
            self._marks[self._mark(outcome.key, outcome.tag)] = again

    def close(self) -> Steps[Summary]:
        """Remember what is in shape. At most one request."""
        if self._planned and not self._options.dry_run and self._marks != self._known:
            body = b"".join(_MARK.pack(mark, again) for mark, again in sorted(self._marks.items()))
            try:
                yield PutIf(self._key, seal(body, "none", _CONTEXT), self._tag)
            except StorageError as error:  # another sweep was faster, or the store is busy: it is only a hint
                logger.info("what the sweep has found is not remembered (%s)", error)
        self.summary.seconds = round((yield Now()) - self._begun, 3)
        return self.summary

    def _recall(self) -> Steps[None]:
        try:
            found = yield Get(self._key, most=2 * _MOST_MARKS * _MARK.size)
            if not isinstance(found, Found):
                return
            self._tag = found.tag
            body = unseal(found.body, _CONTEXT, self._key, _MOST_MARKS * _MARK.size)
        except (CorruptionError, FormatVersionError) as error:
            logger.warning("all threads are looked at: %s", error)
            return
        whole = len(body) - len(body) % _MARK.size
        self._known = dict(_MARK.iter_unpack(memoryview(body)[:whole]))

    def _mark(self, key: str, tag: Tag) -> bytes:
        """What is remembered of a manifest in one state. Equal tags have one `repr`."""
        return blake2b(f"{key} {tag!r} ".encode() + self._settings, digest_size=8).digest()


def in_shard(key: str, shard: tuple[int, int]) -> bool:
    """Whether a manifest belongs to a part of the store.

    Example:
        >>> [number for number in range(4) if in_shard("manifests/c6/user-1", (number, 4))]
        [0]
    """
    number, count = shard
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) % count == number


def _may_match(key: str, pattern: str | None) -> bool:
    """Whether the thread of a manifest may be one of those that are wanted: not all keys tell."""
    thread_id = told_id(key)
    return pattern is None or thread_id is None or fnmatchcase(thread_id, pattern)


def tend(engine: Engine, key: str, options: Options) -> Steps[Outcome]:
    """Bring one thread into shape: expire, merge, collect. May be run any number of times, anywhere, at once.

    Args:
        engine: Does it, with its retention.
        key: The thread's manifest.
        options: What to do.

    Returns:
        What was done, be it to the end or until it was stopped.

    Raises:
        LSMError: If something is damaged, or the store does not answer. What was done until then stays done.
    """
    outcome = Outcome(key)
    try:
        yield from _tend(engine, options, outcome)
    except Stopped:
        outcome.stopped = True
    return outcome


def _tend(engine: Engine, options: Options, outcome: Outcome) -> Steps[None]:
    process, key = engine.process, outcome.key
    outcome.thread_id = yield from thread_id_at(process, key)
    if outcome.thread_id is None:
        return
    if options.threads is not None and not fnmatchcase(outcome.thread_id, options.threads):
        outcome.passed = True
        return
    thread = process.thread(outcome.thread_id)
    now = yield Now()
    view = yield from refresh(process, thread)
    outcome.passed = thread.tombstone is not None
    if view is not None and engine.retention is not None:
        removed = engine.retention.is_idle(view, now)
        expired, _ = yield from engine.expired(thread.id)
        if expired and not options.dry_run:
            removed = (yield from engine.expire(thread.id)) and thread.view is None
        outcome.removed, outcome.expired = removed, expired
        view = thread.view
    while view is not None and (inputs := due(view, engine.process.limits)):
        more = not options.dry_run and (yield from engine.compact_due(thread.id))
        outcome.merged += len(inputs)
        outcome.rewritten += sum(info.size for info in inputs)
        if not more:
            break
        view = thread.view
    yield from engine.collect_thread(thread.id, options.grace, options.dry_run, outcome.freed)
    view = thread.view
    if view is not None and not due(view, engine.process.limits):
        outcome.tag = view.tag
        outcome.again = _again(engine.retention, view, now, outcome.freed)


def failed(key: str, error: BaseException) -> Outcome:
    """The outcome for a thread that could not be brought into shape."""
    text = str(error) if isinstance(error, LSMError) else f"{type(error).__name__}: {error}"
    return Outcome(key, told_id(key), failure=text)


def _again(retention: Retention | None, view: View, now: float, left: Collected) -> float:
    """When a thread that does not change is to be looked at again; 0 for never."""
    times = [left.ripe]
    if retention is not None and retention.idle is not None:
        times.append(view.changed / 1000 + retention.idle.total_seconds())
    if retention is not None and retention.max_age is not None:
        age = retention.max_age.total_seconds()
        last = view.changed / 1000 + age  # from then on nothing is left to expire
        if last > now:
            times.append(min(last, now + age / _LOOKS))
    return min((time for time in times if time), default=0.0)


def sweep(
    engine: Engine,
    options: Options,
    width: int = 8,
    each: Callable[[Outcome, int], None] | None = None,
    stop: Stop | None = None,
) -> Steps[Summary]:
    """Bring all threads of a store, or of a part of it, into shape.

    Args:
        engine: Does it, with its retention.
        options: What to do.
        width: How many threads at once.
        each: Told what was done for each thread, and how many threads there are to do in all.
        stop: Asks for an early end: threads that are worked on are left at their next request, no other is begun.

    Returns:
        What was done.

    Example:
        >>> import os
        >>> from lsm.drive import run
        >>> from lsm.storage import open_storage
        >>> storage = open_storage("memory://")
        >>> run(sweep(Engine(storage.url, storage.appends, os.urandom), Options()), storage).threads
        0
    """
    stop = stop or Stop()
    one = Sweep(options, engine.retention, stop)
    keys = deque((yield from one.plan()))
    total = len(keys)

    def do(key: str) -> Steps[None]:
        if (yield from one.may_begin()):
            try:
                outcome = yield from stop.unless_asked(tend(engine, key, options))
            except Exception as error:  # whatever it is, it is this thread's alone
                logger.debug("%s: not brought into shape", key, exc_info=True)
                outcome = failed(key, error)
            one.settle(outcome)
            if each is not None:
                each(outcome, total)

    yield from side_by_side(keys, do, width)
    return (yield from one.close())
