"""Checking a segment against what the directory says of it.

Rules of this module:

- Every byte but those of values is read: the two ends, and all pages of both indexes. Values are `records`'.
- What readers rely on is checked as they use it: the order of keys, the runs that lead to a key, the filters.
"""

from __future__ import annotations

from dataclasses import replace

from lsm.errors import CorruptionError, FormatVersionError, NotFound
from lsm.fetch import SegmentGone, load_runs
from lsm.format.bloom import HASH_BYTES, has
from lsm.format.names import segment_key
from lsm.format.records import HIDDEN, Blob, Checkpoint
from lsm.format.segment import MAGIC, Index, SegmentInfo, blob_term, namespace_term, open_footer, rows_of
from lsm.process import Process, Thread
from lsm.steps import GetRanges, Steps
from lsm.verify.report import Report

_FOOTER = 256 << 10


def check_segment(process: Process, thread: Thread, info: SegmentInfo, size: int, report: Report) -> Steps[None]:
    """Check one segment.

    Args:
        process: The process.
        thread: The thread.
        info: What the directory says of the segment.
        size: How large the object is, in bytes.
        report: Takes down what is wrong.

    Raises:
        SegmentGone: If the segment is not there any more.
    """
    where = segment_key(thread.id, info.ulid)
    report.expect(size == info.size, f"{where}: it has {size} bytes instead of {info.size}; restore a backup")
    try:
        ranges = ((0, len(MAGIC)), (max(0, info.size - _FOOTER), info.size))
        begin, end = yield GetRanges(where, ranges)
        report.expect(begin == MAGIC, f"{where}: its first bytes are damaged; restore it from a backup")
        footer = open_footer(end, where)
        same = replace(
            footer, number=info.number, size=info.size, base=info.base, companion=info.companion, live=info.live
        )
        moved = info.top - footer.top  # a segment of large values gets its numbers from its commit
        same = replace(same, top=info.top) if info.values else same
        report.expect(
            same == info and (info.values or moved == 0),
            f"{where}: its footer says something else than the directory in {thread.key}",
        )
        seen = [0, 0]
        at = 0
        for index, blobs in ((info.blob_index, True), (info.checkpoint_index, False)):
            for run in index.runs:
                report.expect(at in (0, run.offset), f"{where}: its index has gaps")
                at = run.offset + run.length
            yield from _check_index(process, thread, info, index, blobs, seen, report)
        report.expect(
            seen == [info.rows, info.checkpoints],
            f"{where}: it has {seen[0]} records, {seen[1]} of them checkpoints, where the directory in "
            f"{thread.key} says {info.rows} and {info.checkpoints}",
        )
    except NotFound as error:
        raise SegmentGone(info) from error
    except (CorruptionError, FormatVersionError) as error:
        report.note(str(error))


def _check_index(
    process: Process, thread: Thread, info: SegmentInfo, index: Index, blobs: bool, seen: list[int], report: Report
) -> Steps[None]:
    """Check one of a segment's indexes; `seen` counts its records, and the checkpoints among them."""
    where = segment_key(thread.id, info.ulid)
    last: tuple[str, ...] = ()
    namespace = None
    for run in index.runs:
        (pages,) = yield from load_runs(process, thread, [(info, run)])
        for key, record in rows_of(pages, info, where):
            report.expect(key >= last, f"{where}: its records are out of order at {key}")
            report.expect(isinstance(record, Blob) == blobs, f"{where}: a record is in the wrong index at {key}")
            report.expect(info.base <= record.seq <= info.top, f"{where}: commit {record.seq} has no place in it")
            if key != last:
                found = run in index.covering(key, key)
                report.expect(found, f"{where}: the directory does not lead to its record {key}")
            last = key
            seen[0] += 1
            if isinstance(record, Blob):
                found = record.fresh or has(info.shared, blob_term(*key))
                report.expect(found, f"{where}: its filter does not know {key}")
                continue
            if key[0] != namespace:
                namespace = key[0]
                found = has(info.terms, namespace_term(namespace))
                report.expect(found, f"{where}: its filter does not know namespace {namespace!r}")
            if isinstance(record, Checkpoint):
                seen[1] += not record.flags & HIDDEN
                terms = record.terms
                for start in range(0, len(terms), HASH_BYTES):
                    found = has(info.terms, terms[start : start + HASH_BYTES])
                    report.expect(found, f"{where}: its filter does not know the metadata of {key}")
