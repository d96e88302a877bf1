"""The bytes of stores that were written once, and must be read, and written, so for ever.

Rules of this module:

- `tests/data/golden/<compression>/` is a store as `python -m tests.data.generate` wrote it. A store of an earlier
  version of the format is kept here as long as it is to be read.
- Compressed bytes differ with the version of the compressor: those are read only; uncompressed ones are made again.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lsm.format.envelope import COMPRESSIONS, unseal
from lsm.format.manifest import Frame, pack_frame, pack_header, unpack_frames, unpack_header
from lsm.format.names import manifest_key, segment_key
from lsm.format.records import Blob, Place, Record, pack, unpack
from lsm.format.segment import SegmentInfo, open_footer, open_run, rows_of
from tests.data import samples

GOLDEN = Path(__file__).parent / "data" / "golden"
FORMAT = Path(__file__).parent.parent / "docs" / "format.md"
THREADS = (samples.THREAD, "other")


def load(compression: str) -> samples.Objects:
    root = GOLDEN / compression
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("thread_id", THREADS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_was_written_is_read(compression: str, thread_id: str) -> None:
    objects = load(compression)
    for number in range(8):
        stored = samples.READS[f"by id {number}"](objects, thread_id)
        assert (stored.id, stored.parent) == (f"{number:04}", f"{number - 1:04}" if number else None)
        assert stored.checkpoint == ("bytes", b"checkpoint %d" % number)
        assert stored.metadata == ("bytes", b"metadata %d" % number)
        assert stored.values == {
            "count": ("int", str(number).encode()),
            "large": ("bytes", samples.large(number // 4 * 4, thread_id)),
            "messages": ("bytes", samples.message_list(number)),
        }
        writes = [(write.channel, write.index, write.value) for write in stored.writes]
        text = ("bytes", b"write %d" % number)
        expected = [("__error__", -1, text), ("messages", 0, text), ("steps", 1, text)] if number % 2 else []
        expected += [("large", 2, ("bytes", samples.large(4, thread_id)))] if number == 3 else []
        assert writes == expected
    listed = samples.READS["list"](objects, thread_id)
    assert [(each.id, each.namespace) for _, each in listed] == [
        (f"{number:04}", space) for number in reversed(range(8)) for space in sorted(samples.NAMESPACES, reverse=True)
    ]
    assert {thread for thread, _ in samples.READS["all"](objects, thread_id)} == set(THREADS)
    history = samples.READS["history"](objects, thread_id)
    assert [write.value for write in history["steps"].writes] == [("bytes", b"write %d" % each) for each in (1, 3, 5)]
    assert history["messages"].seed == ("bytes", samples.message_list(6))


def test_the_same_calls_make_the_same_bytes() -> None:
    """Not a promise of the format: when something is flushed or carried may change; then the files are made anew."""
    assert samples.make_store("none") == load("none")


@pytest.mark.parametrize("thread_id", THREADS)
def test_manifests_are_packed_as_they_were(thread_id: str) -> None:
    body = load("none")[manifest_key(thread_id)]
    header, end = unpack_header(body, "golden")
    assert pack_header(header, "none") == body[:end]
    found, chain = unpack_frames(body, end, header.seq, header.incarnation, header.chain, False, "golden"), header.chain
    assert (found.end, found.marked) == (len(body), True)
    assert len(found.frames) > 1
    for frame in found.frames:
        records = [_in_own_terms(record, frame) for record in frame.records]
        made = pack_frame(frame.commit, frame.seq, records, frame.segment, header.incarnation, "none", chain)
        chain = frame.chain
        assert made == body[end : end + frame.size]
        end += frame.size


def _in_own_terms(record: Record, frame: Frame) -> Record:
    """A frame calls the segment that it adds segment 0."""
    if frame.segment is None or not isinstance(record.value, Place) or record.value.segment != frame.segment.number:
        return record
    return replace(record, value=record.value._replace(segment=0))


@pytest.mark.parametrize("thread_id", THREADS)
def test_segments_are_packed_as_they_were(thread_id: str) -> None:
    objects = load("none")
    header, _ = unpack_header(objects[manifest_key(thread_id)], "golden")
    rows = borrowed = 0
    for info in header.segments:
        body = objects[segment_key(thread_id, info.ulid)]
        footer = open_footer(body, "golden")
        # What a commit gives a segment is in the directory only; a footer cannot know its own length.
        assert replace(info, number=0, size=0, base=footer.base, top=footer.top) == footer
        assert info.size == len(body)
        assert SegmentInfo.unpack(info.pack(), "golden") == info
        assert body.endswith(footer.pack() + body[-16:])
        for index in (info.checkpoint_index, info.blob_index):
            for run in index.runs:
                pages = open_run(body[run.offset : run.offset + run.length], footer, "golden")
                rows += run.rows
                assert sum(map(len, pages)) == run.rows
                packed = [bytes(row) for page in pages for row in page._rows]
                records = [unpack(row, "golden") for row in packed]
                assert [pack(record) for record in records] == packed
                borrowed += sum(isinstance(record, Blob) and len(record.borrowed) for record in records)
                keys = [key for key, _ in rows_of(pages, footer, "golden")]
                assert keys == sorted(keys)
    assert rows > 20
    assert borrowed == 2


def test_the_example_in_the_documentation() -> None:
    """The bytes that `docs/format.md` takes apart are a manifest, and say what it says."""
    [block] = re.findall(r"```hex\n(.*?)```", FORMAT.read_text(), re.DOTALL)
    body = bytes.fromhex("".join(re.sub(r"#.*", "", line) for line in block.splitlines()))
    header, end = unpack_header(body, "docs")
    found = unpack_frames(body, end, header.seq, header.incarnation, header.chain, False, "docs")
    assert (found.end, found.marked) == (len(body), True)
    [frame] = found.frames
    assert (header.thread_id, header.seq, header.segments) == ("t", 0, ())
    [writes] = frame.records
    described: Any = (frame.commit, frame.seq, writes.namespace, writes.id, writes.runs)
    assert described == ((b"writer01", 1), 1, "", "c1", ((0, 1, "ch"),))
    assert unseal(body[24 : end - 8], header.incarnation, "docs").startswith(b"\xdc\0\x10\xa1t\0\2")
