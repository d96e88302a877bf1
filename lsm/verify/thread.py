"""Checking one thread: its manifest, then its segments, then all records.

Rules of this module:

- All is checked against one view of the manifest. That a thread is written to meanwhile is no problem: it is begun
  again where a segment was replaced.
- A torn end is no problem either: it is counted, and dropped where that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lsm.cache import Cache
from lsm.collect import Collected
from lsm.errors import Conflict, CorruptionError, FormatVersionError, ReadTimeout
from lsm.fetch import SegmentGone
from lsm.format.names import segments_prefix
from lsm.process import Process, Thread, missing
from lsm.steps import Entry, Get, PutIf, Steps
from lsm.turn import Patience
from lsm.verify.carried import Carried
from lsm.verify.chains import Chains
from lsm.verify.records import Records
from lsm.verify.report import Report
from lsm.verify.segments import check_segment
from lsm.view import View, open_view
from lsm.walk import list_all

_CACHE = 32 << 20
_LEAST = 20


def verify_thread(process: Process, thread: Thread, repair: bool = False) -> Steps[Report]:
    """Check one thread: its manifest, every segment, every record and value, every reference, every chain.

    Args:
        process: The process; what it has cached is not used.
        thread: The thread.
        repair: Whether to drop a torn tail.

    Returns:
        The report. A thread that does not exist has no problems, and all its objects are garbage.

    Raises:
        StorageError: If the store does not answer.
        ReadTimeout: If the thread changed faster than it could be read.
    """
    patience = Patience(process, thread, "a check", "try again when the thread is quieter", _LEAST, ReadTimeout)
    while True:
        listed = yield from list_all(segments_prefix(thread.id))
        report = Report(thread.id)
        found = yield Get(thread.key)
        if found is None:
            report.exists, report.garbage = False, Collected(len(listed), sum(entry.size for entry in listed))
            return report
        try:
            view = open_view(thread.key, found.body, found.tag, thread.id, process.appends)
        except (CorruptionError, FormatVersionError) as error:
            report.problems.append(str(error))
            return report
        if view.header.deleted:
            report.exists, report.garbage = False, Collected(len(listed), sum(entry.size for entry in listed))
            return report
        report.torn = view.dropped
        if view.loose and repair:
            try:
                yield PutIf(thread.key, b"".join(view.parts()), found.tag)
            except Conflict as error:
                yield from patience.check(error)
                continue
            report.repaired = True
        try:
            yield from _check(process, thread, view, listed, report)
        except SegmentGone as gone:
            again = yield Get(thread.key)
            if again is None or not again.body.startswith(found.body[: len(found.body) - view.dropped]):
                yield from patience.check(gone)
                continue
            report.problems.append(str(missing(process, thread, gone.info)))
        return report


def _check(process: Process, thread: Thread, view: View, listed: Sequence[Entry], report: Report) -> Steps[None]:
    """Check one view of a thread."""
    process = replace(process, cache=Cache(_CACHE), busy={}, failed={})
    header = view.header
    view = replace(view, header=replace(header, inline={}))  # so that the values in segments are read
    infos = view.segments()
    sizes = {entry.key.rsplit("/", 1)[-1]: entry.size for entry in listed}
    named = {info.ulid for info in infos}
    garbage = [size for name, size in sizes.items() if name not in named]
    report.segments = len(infos)
    report.bytes = view.size + sum(info.size for info in infos)
    report.garbage = Collected(len(garbage), sum(garbage))
    report.expect(
        len({info.number for info in infos}) == len(infos), f"{thread.key}: two segments have the same number"
    )
    before = len(report.problems)
    for info in infos:
        yield from check_segment(process, thread, info, sizes.get(info.ulid, info.size), report)
    if len(report.problems) > before:
        return  # records cannot be told from gaps where an index is damaged
    chains = Chains(thread.key, dict(header.heads), report)
    records = Records(process, thread, view, chains, report)
    yield from records.check_at_hand()
    yield from records.check_segments([info for info in infos if not info.values])
    chains.finish()
    yield from Carried(process, thread, view, header, report).check()
