"""Checking a whole store: its root, every thread, and what belongs to none.

Rules of this module:

- A thread that cannot be checked is that thread's problem: the others are checked all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from lsm.collect import Collected
from lsm.errors import LSMError, StorageError
from lsm.format.names import ROOT_KEY, SEGMENTS
from lsm.process import Process
from lsm.root import verify_root
from lsm.steps import Entry, Get, Steps
from lsm.verify.report import Report, StoreReport
from lsm.verify.thread import verify_thread
from lsm.walk import Manifests, list_all, side_by_side, thread_id_at


def verify_store(
    process: Process,
    each: Callable[[Report], None] | None = None,
    repair: bool = False,
    width: int = 4,
    total: StoreReport | None = None,
) -> Steps[StoreReport]:
    """Check a whole store.

    Args:
        process: The process.
        each: Told the report of every thread.
        repair: Whether to drop torn tails.
        width: How many threads at once.
        total: Where to count, which tells what was found until a check is stopped; this is what is returned.
    """
    total = StoreReport() if total is None else total
    keys: set[str] = set()

    def check(entry: Entry) -> Steps[None]:
        try:
            thread_id = yield from thread_id_at(process, entry.key)
            if thread_id is None:
                return
            report = yield from verify_thread(process, process.thread(thread_id), repair)
        except LSMError as error:
            report = Report(entry.key, [str(error)])
        total.add(report)
        if each is not None:
            each(report)

    yield from _verify_root(process, total)
    manifests = Manifests()
    while not manifests.done:
        page = yield from manifests.next()
        keys.update(entry.key for entry in page)
        yield from side_by_side(deque(page), check, width)
    for entry in (yield from list_all(SEGMENTS)):
        name = entry.key.removeprefix(SEGMENTS).rsplit("/", 1)[0]
        if f"manifests/{name}" not in keys:
            total.garbage.add(Collected(1, entry.size))
    return total


def _verify_root(process: Process, total: StoreReport) -> Steps[None]:
    try:
        if (yield Get(ROOT_KEY)) is not None:  # else it would be written
            yield from verify_root(process.url, process.entropy)
    except StorageError:
        raise
    except LSMError as error:
        total.problems[ROOT_KEY] = [str(error)]
