"""What is fetched of segments: pages of their indexes, and blocks of their data.

Rules of this module:

- All that one call asks for comes in one round, and what the cache has is not asked for. Segments never change, so that
  what was cached of one stays true.
- Bytes are checked as they come in: what is cached has passed its checksum.
- A segment that is not there is `SegmentGone`. Whether the view is old or the store damaged is for the caller to find
  out, who has the view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lsm.errors import CorruptionError, LSMError, NotFound
from lsm.format.envelope import unseal
from lsm.format.names import segment_key
from lsm.format.segment import Page, Run, SegmentInfo, open_run
from lsm.process import Process, Thread
from lsm.steps import All, GetRanges, Steps


class SegmentGone(LSMError):
    """A segment of the view is not there any more: the view is old, or the store is damaged."""

    def __init__(self, info: SegmentInfo):
        super().__init__(f"segment {info.ulid} is gone")
        self.info = info


def load_runs(process: Process, thread: Thread, wanted: Sequence[tuple[SegmentInfo, Run]]) -> Steps[list[list[Page]]]:
    """The pages of some runs, in one round for all that are not cached.

    Args:
        process: The process.
        thread: The thread.
        wanted: The runs, each with its segment.

    Returns:
        The pages of each run.

    Raises:
        SegmentGone: If a segment is not there any more.
        CorruptionError: If a page is damaged.
    """
    keys = [("run", info.ulid, run.offset) for info, run in wanted]
    found: list[list[Page] | None] = [process.cache.get(key) for key in keys]
    lacking: dict[str, list[int]] = {}
    for at, pages in enumerate(found):
        if pages is None:
            lacking.setdefault(wanted[at][0].ulid, []).append(at)
    groups = list(lacking.values())
    requests = [
        GetRanges(
            segment_key(thread.id, wanted[group[0]][0].ulid),
            tuple((wanted[at][1].offset, wanted[at][1].offset + wanted[at][1].length) for at in group),
        )
        for group in groups
    ]
    bodies = yield from _fetch(requests, [wanted[group[0]][0] for group in groups])
    for group, parts in zip(groups, bodies, strict=True):
        for at, part in zip(group, parts, strict=True):
            info, run = wanted[at]
            where = segment_key(thread.id, info.ulid)
            if len(part) != run.length:
                raise CorruptionError(f"{where}: the segment ends within its index; restore it from a backup")
            pages = open_run(part, info, where)
            process.cache.put(keys[at], pages, sum(page.cost for page in pages))
            found[at] = pages
    return [pages for pages in found if pages is not None]


def load_blocks(
    process: Process, thread: Thread, wanted: Iterable[tuple[SegmentInfo, int, int]]
) -> Steps[dict[tuple[int, int], bytes]]:
    """The contents of some data blocks, in one round for all that are not cached.

    Args:
        process: The process.
        thread: The thread.
        wanted: The blocks, as (segment, offset, bytes stored).

    Returns:
        The contents, by (number of the segment, offset).

    Raises:
        SegmentGone: If a segment is not there any more.
        CorruptionError: If a block is damaged.
    """
    found: dict[tuple[int, int], bytes] = {}
    lacking: dict[int, tuple[SegmentInfo, dict[int, int]]] = {}
    for info, offset, stored in wanted:
        check_block(info, offset, stored, segment_key(thread.id, info.ulid))
        block = process.cache.get(("block", info.ulid, offset))
        if block is None:
            lacking.setdefault(info.number, (info, {}))[1][offset] = stored
        else:
            found[info.number, offset] = block
    groups = [(info, sorted(ranges.items())) for info, ranges in lacking.values()]
    requests = [
        GetRanges(segment_key(thread.id, info.ulid), tuple((start, start + stored) for start, stored in ranges))
        for info, ranges in groups
    ]
    bodies = yield from _fetch(requests, [info for info, _ in groups])
    for (info, ranges), parts in zip(groups, bodies, strict=True):
        where = segment_key(thread.id, info.ulid)
        for (start, stored), part in zip(ranges, parts, strict=True):
            if len(part) != stored:
                raise CorruptionError(f"{where}: the segment ends within its data; restore it from a backup")
            block = unseal(part, info.context, where, info.raw)
            found[info.number, start] = block
            process.cache.put(("block", info.ulid, start), block, len(block) + 200)
    return found


def check_block(info: SegmentInfo, offset: int, stored: int, where: str) -> None:
    """See that a block lies inside its segment, before it is read.

    Raises:
        CorruptionError: If it does not.
    """
    if offset + stored > info.size:
        raise CorruptionError(
            f"{where}: {stored:,} bytes from byte {offset:,} on lie outside of the segment's {info.size:,}"
        )


def _fetch(requests: Sequence[GetRanges], infos: Sequence[SegmentInfo]) -> Steps[list[list[bytes]]]:
    """Ranges of several segments, in one round."""
    if not requests:
        return []
    outcomes = yield All(requests)
    for outcome, info in zip(outcomes, infos, strict=True):
        if isinstance(outcome, NotFound):
            raise SegmentGone(info) from outcome
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[no-any-return]
