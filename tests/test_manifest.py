"""What is behind the last mark of a manifest: a frame that counts, or a torn append; and what is damage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsm.errors import CorruptionError
from lsm.format.manifest import MARK_SIZE, Header, chain_of, pack_frame, pack_header
from lsm.format.records import Writes, pack_writes
from lsm.view import View, open_view

INCARNATION = b"incarnat"


def frame(seq: int, chain: int, size: int = 300) -> bytes:
    value = pack_writes([("bytes", bytes([seq]) * size)])
    writes = Writes("", f"{seq}", "task", "", 1000 + seq, ((0, 1, "c"),), value, seq)
    return pack_frame((b"writer01", seq), seq, [writes], None, INCARNATION, "none", chain)


def frames(count: int, chain: int = 0) -> list[bytes]:
    made: list[bytes] = []
    for seq in range(1, count + 1):
        made.append(frame(seq, chain))
        chain = chain_of(made[-1])
    return made


HEADER = pack_header(Header("t", INCARNATION), "none")
FRAMES = frames(3)
MANIFEST = HEADER + b"".join(FRAMES)
LAST = len(MANIFEST) - len(FRAMES[-1])


def opened(body: bytes, appends: bool = True) -> View:
    return open_view("manifests/e3/t", body, "tag", "t", appends)


def state(view: View) -> tuple[int, bool, int]:
    return view.count, view.loose, view.dropped


def test_what_ends_with_a_mark_is_whole() -> None:
    assert state(opened(MANIFEST)) == (3, False, 0)
    assert state(opened(HEADER)) == (0, False, 0)


@pytest.mark.parametrize("cut", range(1, MARK_SIZE + 1))
def test_a_frame_whose_mark_is_missing_counts_and_is_not_appended_to(cut: int) -> None:
    view = opened(MANIFEST[:-cut])
    assert state(view) == (3, True, 0)
    assert b"".join(view.parts()) == MANIFEST
    view = opened(HEADER[:-cut])
    assert state(view) == (0, True, 0)
    assert b"".join(view.parts()) == HEADER


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 300, len(FRAMES[-1]) - MARK_SIZE - 1])
def test_an_append_is_torn_at_any_length(length: int) -> None:
    """A single byte of it is enough."""
    view = opened(MANIFEST[: LAST + length])
    assert state(view) == (2, True, length)
    assert b"".join(view.parts()) == MANIFEST[:LAST]


@given(data=st.data())
def test_an_append_is_torn_in_any_shape(data: st.DataObject) -> None:
    """Blocks are missing, zero, or hold something else; the file is longer or shorter than what was appended."""
    body = bytearray(FRAMES[-1][:-MARK_SIZE])
    at = data.draw(st.integers(0, len(body) - 1))
    for start in data.draw(st.sets(st.integers(0, len(body) // 64))) | {at // 64}:
        block = data.draw(st.one_of(st.just(b""), st.binary(max_size=64)))
        piece = body[start * 64 : (start + 1) * 64]
        body[start * 64 : (start + 1) * 64] = block[: len(piece)].ljust(len(piece), b"\0")
    torn = bytes(body) + data.draw(st.sampled_from((b"", bytes(100))))
    torn = torn[: data.draw(st.integers(1, len(torn)))]
    lost_mark = data.draw(st.booleans())  # the mark before it shares a block with what was torn
    before = MANIFEST[:LAST] if not lost_mark else MANIFEST[: LAST - MARK_SIZE] + bytes(MARK_SIZE)
    view = opened(before + torn)
    if view.count == 3:  # by chance, all that was appended is there
        assert torn.startswith(FRAMES[-1][:-MARK_SIZE])
        return
    assert (view.count, view.loose) == (2, True)
    assert b"".join(view.parts()) == MANIFEST[:LAST]


def test_what_comes_before_a_mark_is_damaged_not_torn() -> None:
    for at in range(len(HEADER), len(MANIFEST) - MARK_SIZE):
        body = bytearray(MANIFEST)
        body[at] ^= 0xFF
        with pytest.raises(CorruptionError, match="manifests/"):
            opened(bytes(body))
        if at < LAST - MARK_SIZE:  # also where the last append is torn
            with pytest.raises(CorruptionError, match="manifests/"):
                opened(bytes(body[:LAST]) + b"torn")


def test_an_object_is_whole_or_damaged() -> None:
    for length in range(len(MANIFEST)):
        if length in (len(HEADER), len(HEADER) + len(FRAMES[0]), LAST):
            continue
        with pytest.raises(CorruptionError, match="manifests/"):
            opened(MANIFEST[:length], appends=False)


def test_frames_of_another_history_do_not_follow() -> None:
    """They have the right numbers and lengths, and checksums of their own: a restored backup went on from less."""
    other = [FRAMES[0], frame(2, chain_of(FRAMES[0]), 299)]
    other.append(frame(3, chain_of(other[-1]), 301))
    with pytest.raises(CorruptionError):
        opened(HEADER + FRAMES[0] + FRAMES[1] + other[2], appends=False)
    assert opened(HEADER + b"".join(other), appends=False).count == 3
