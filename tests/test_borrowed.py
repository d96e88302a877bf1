"""What a task wrote and a channel keeps is stored once: the channel's blob borrows the bytes of the task's writes.

Whatever is done to the writes meanwhile, every value comes back byte for byte; `verify` finds nothing amiss.
"""

from __future__ import annotations

import base64
import random
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from langgraph.checkpoint.lsm import LSMSaver
from lsm.commit import _hand_over
from lsm.compact import all_logs, drained
from lsm.engine import Engine
from lsm.format import patch
from lsm.format.records import Blob, pack_patch, pack_whole, unpack_pieces
from lsm.format.segment import SegmentInfo
from lsm.lineage import KeepLatest, KeepRule
from lsm.process import refresh
from lsm.rewrite import Plan, Rewritten, rewrite
from lsm.steps import Steps
from lsm.swap import swap
from lsm.verify import verify_thread
from lsm.view import View
from tests.support.checkpoints import at, put

SIZE = 100_000
LARGEST = 1.2
"""How much may be stored, in sizes of the state."""


def image(number: int, size: int = SIZE) -> str:
    """`size` random bytes in base64."""
    return base64.b64encode(random.Random(number).randbytes(size)).decode()


class Thread:
    """A thread whose every step writes some images, and whose state is all of them."""

    def __init__(self, saver: LSMSaver, thread_id: str = "t"):
        self.saver = saver
        self.id = thread_id
        self.images: list[str] = []
        self.states: dict[str, list[str]] = {}
        self.head = put(saver, at(thread_id), {"images": []})

    def write(self, task: str, images: list[str]) -> None:
        """Store what a task wrote. It is part of the state from the next `put` on."""
        self.images = [*self.images, *images]
        self.saver.put_writes(self.head, [("images", images)], task)

    def put(self) -> None:
        self.head = put(self.saver, self.head, {"images": self.images})
        self.states[self.head["configurable"]["checkpoint_id"]] = self.images

    def step(self, *numbers: int) -> None:
        for number in numbers:
            self.write(f"task {number}", [image(number)])
        self.put()

    def check(self, saver: LSMSaver | None = None, thread_id: str | None = None) -> None:
        """Every state that is there is what was put; and at least the latest is."""
        saver, thread_id = saver or self.saver, thread_id or self.id
        found = {each.checkpoint["id"]: each for each in saver.list(at(thread_id))}
        assert self.head["configurable"]["checkpoint_id"] in found
        for id_, images in self.states.items():
            if id_ in found:
                assert found[id_].checkpoint["channel_values"]["images"] == images, id_
        process = saver._engine.process
        report = saver._runtime.run(verify_thread(process, process.thread(thread_id)))
        assert report is not None
        assert not report.problems


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[LSMSaver]:
    with LSMSaver.from_conn_string(tmp_path.as_uri(), fsync=False, compaction="off") as opened:
        yield opened


def run(saver: LSMSaver, steps: Steps[Any]) -> Any:
    return saver._runtime.run(steps)


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def view_of(saver: LSMSaver) -> View:
    found: View = run(saver, refresh(saver._engine.process, saver._engine.process.thread("t")))
    return found


def borrowing(saver: LSMSaver) -> int:
    """How many blobs in frames borrow."""
    return sum(bool(blob.borrowed) for found in view_of(saver).tail.blobs.values() for blob in found)


def rewritten(saver: LSMSaver, emptied: tuple[SegmentInfo, ...], rule: KeepRule | None = None) -> Rewritten:
    """All segments, rewritten, but not swapped in."""
    view, process = view_of(saver), saver._engine.process
    plan = Plan(view, all_logs(view), emptied, "t", view.incarnation, view.header.fence, rule)
    made: Rewritten = run(saver, rewrite(process, process.thread("t"), plan))
    return made


def swap_in(saver: LSMSaver, made: Rewritten) -> None:
    """Swap them in, and remove what they replace."""
    run(saver, swap(saver._engine.process, saver._engine.process.thread("t"), made))
    run(saver, saver._engine.collect(0))


# What it saves.


def test_twenty_images_are_stored_once(tmp_path: Path) -> None:
    with LSMSaver.from_conn_string(tmp_path.as_uri(), fsync=False) as saver:
        thread = Thread(saver)
        for number in range(20):
            thread.step(number)
        state = sum(map(len, thread.images))
        assert stored(tmp_path) <= LARGEST * state
        thread.check()
    for make in (
        lambda saver: saver._engine.compact("t"),
        lambda saver: saver._engine.prune(["t"]),
    ):
        with LSMSaver.from_conn_string(tmp_path.as_uri(), fsync=False) as saver:
            run(saver, make(saver))
            run(saver, saver._engine.collect(0))
            assert stored(tmp_path) <= LARGEST * state
            thread.check(saver)


def test_a_document_that_is_written_and_kept_is_stored_once(saver: LSMSaver, tmp_path: Path) -> None:
    config, text = put(saver, at("t"), {}), image(1, 1_000_000)
    saver.put_writes(config, [("count", 1), ("document", text)], "task")
    put(saver, config, {"count": 1, "document": text})
    assert stored(tmp_path) <= len(text)
    found = saver.get_tuple(at("t"))
    assert found is not None
    assert found.checkpoint["channel_values"] == {"count": 1, "document": text}


def test_what_parallel_tasks_wrote_is_stored_once(saver: LSMSaver, tmp_path: Path) -> None:
    thread = Thread(saver)
    thread.step(*range(8))
    thread.step(*range(8, 16))
    assert stored(tmp_path) <= LARGEST * sum(map(len, thread.images))
    thread.check()


def test_a_copy_shares_as_its_source_does(saver: LSMSaver, tmp_path: Path) -> None:
    thread = Thread(saver)
    for number in range(5):
        thread.step(number)
    before = stored(tmp_path)
    saver.copy_thread("t", "copy")
    assert stored(tmp_path) <= 2.1 * before
    saver.delete_thread("t")
    thread.check(saver, "copy")


def test_writes_and_checkpoint_of_one_commit_share(saver: LSMSaver, tmp_path: Path) -> None:
    thread = Thread(saver)
    engine, process = saver._engine, saver._engine.process
    process.thread("t").leading = True  # somebody commits: those who come now queue
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(thread.write, "task", [image(1)])]
        while not process.thread("t").queue:
            pass
        calls.append(pool.submit(thread.put))
        while len(process.thread("t").queue) < 2:
            pass
        entry = process.thread("t").queue[0]
        assert entry.waiter is not None
        _hand_over(process, process.thread("t"))
        for call in calls:
            call.result(30)
    assert borrowing(saver) == 1
    assert stored(tmp_path) <= LARGEST * len(image(1))
    run(saver, engine.flush("t"))
    thread.check()


# What may become of the writes.


def test_it_survives_a_prune_that_drops_the_writes(saver: LSMSaver) -> None:
    thread = Thread(saver)
    for number in range(4):
        thread.step(number)
    for _ in range(2):
        saver.prune(["t"])
        thread.check()
        run(saver, saver._engine.collect(0))
        thread.check()
        thread.step(100)
        thread.step(101)


def test_only_what_is_wanted_is_kept_of_a_large_write(saver: LSMSaver, tmp_path: Path) -> None:
    """The channel takes a tenth of what a task wrote; after a prune the rest is gone."""
    thread = Thread(saver)
    parts = [image(number) for number in range(10)]
    saver.put_writes(thread.head, [("images", parts)], "task")
    thread.images = parts[5:6]
    thread.put()
    assert borrowing(saver) == 1
    thread.put()
    saver.prune(["t"])
    run(saver, saver._engine.collect(0))
    assert stored(tmp_path) <= 2 * len(parts[0])
    thread.check()


@pytest.mark.parametrize("flushed", [False, True], ids=["in a frame", "flushed"])
@pytest.mark.parametrize("lasting", [False, True], ids=["emptied", "without a use"])
def test_what_is_borrowed_during_a_rewrite_stays(saver: LSMSaver, lasting: bool, flushed: bool) -> None:
    """The rewrite empties the segment, or knows of no use for it; a blob that it has not seen borrows from it."""
    engine: Engine = saver._engine
    process, thread = engine.process, Thread(saver)
    thread.step(0)
    thread.step(1)
    thread.write("task", [image(2)])
    if lasting:  # written again: the first counts, and the second is of no use, until somebody borrows it
        process.limits = replace(process.limits, lasting=0)
        saver.put_writes(thread.head, [("images", [image(3)])], "task")
        thread.images = [*thread.images[:-1], image(3)]
    run(saver, engine.flush("t"))
    view = view_of(saver)
    made = rewritten(saver, () if lasting else drained(view, all_logs(view), process.limits))
    assert (0 in made.live.values()) is lasting
    thread.put()
    assert borrowing(saver) == 1
    if flushed:
        run(saver, engine.flush("t"))
    swap_in(saver, made)
    thread.check()
    run(saver, engine.compact("t"))
    run(saver, engine.collect(0))
    thread.check()


def test_a_segment_is_kept_for_the_sake_of_what_borrows_from_it(saver: LSMSaver) -> None:
    """Large segments stay where they are; one whose writes are gone is still referred to."""
    saver._engine.process.limits = replace(saver._engine.process.limits, lasting=0)
    thread = Thread(saver)
    for number in range(3):
        thread.step(number)
    run(saver, saver._engine.flush("t"))
    made = rewritten(saver, (), KeepLatest())
    unused, *used = sorted(made.live.values())
    assert unused == 0  # the first image is in the whole value that the second began
    assert len(used) == 3
    assert all(SIZE <= live <= 1.5 * SIZE for live in used)
    swap_in(saver, made)
    thread.check()


def test_live_bytes_are_counted_once(saver: LSMSaver) -> None:
    saver._engine.process.limits = replace(saver._engine.process.limits, lasting=0)
    thread = Thread(saver)
    for number in range(3):
        thread.step(number)
    run(saver, saver._engine.compact("t"))
    view = view_of(saver)
    values = [info for info in view.header.segments if info.values]
    assert values
    assert all(info.live <= info.raw for info in values)


# The bytes.


@st.composite
def cuts(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]]]:
    """A value, and ranges of it in order that do not overlap."""
    data = draw(st.binary(max_size=60))
    bounds = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return data, [(low, high - low) for low, high in zip(bounds[::2], bounds[1::2], strict=False)]


@given(st.lists(cuts(), min_size=1, max_size=6))
def test_chains_with_borrowed_ranges_are_put_together_as_they_were(chain: list[Any]) -> None:
    pieces: list[bytes] = []
    value = b""
    for version, (data, ranges) in enumerate(chain):
        pieces += [data[start : start + length] for start, length in ranges]
        if not version:
            pieces.append(pack_whole(("kind", data), version, ranges))
            value = data
        else:
            spans = (patch.Span(len(data), 0, len(value)),)
            pieces.append(pack_patch(patch.Link(version, spans, len(data), 0), data, ranges))
            value = data + value
    found, links = unpack_pieces(pieces, "here")
    assert found == ("kind", value)
    assert [link.borrowed for link in links] == [len(ranges) for _, ranges in chain]
    assert patch.count_pieces(links) == len(pieces)


@given(st.integers(0), st.integers(64, 300), st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=30))
def test_an_overlap_is_one(seed: int, size: int, before: bytes, after: bytes, other: bytes) -> None:
    shared = random.Random(seed).randbytes(size)
    for a, b in (
        (shared, before + shared + after),
        (before + shared + after, shared),
        (other + shared, before + shared),
    ):
        i, j, length = patch.overlap(a, b)
        assert a[i : i + length] == b[j : j + length]
        assert length >= size


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_an_overlap_of_any_two_values_is_one_if_any(a: bytes, b: bytes) -> None:
    i, j, length = patch.overlap(a, b)
    assert a[i : i + length] == b[j : j + length]
    assert (length == 0) or length >= 32


def test_a_chain_never_has_more_pieces_than_a_reader_takes(saver: LSMSaver) -> None:
    thread = Thread(saver)
    for step in range(12):
        for number in range(6):
            thread.write(f"task {step} {number}", [image(step * 6 + number, 26_000)])
        thread.put()
    view = view_of(saver)
    counts = [len(blob.pieces or ()) for found in view.tail.blobs.values() for blob in found if isinstance(blob, Blob)]
    assert max(counts) <= patch.MAX_PIECES
    thread.check()


def test_an_unrelated_write_lends_nothing() -> None:
    saver = LSMSaver.from_conn_string(f"memory://{uuid.uuid4().hex}", compaction="off")
    thread = Thread(saver)
    saver.put_writes(thread.head, [("other", [image(1)])], "task")  # another channel, the same bytes
    saver.put_writes(thread.head, [("images", [image(2)])], "other task")
    thread.images = [image(1)]
    thread.put()
    assert borrowing(saver) == 0
    thread.check()
