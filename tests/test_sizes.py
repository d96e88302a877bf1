"""What a hostile store makes of a reader: an error, before it takes much memory or time."""

from __future__ import annotations

import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zstandard

from langgraph.checkpoint.lsm import LSMSaver
from lsm.errors import CorruptionError
from lsm.format import patch
from lsm.format.envelope import COMPRESSIONS, RATIO, Compression, seal, unseal
from lsm.format.manifest import Header, pack_header
from lsm.format.names import manifest_key, segment_key
from lsm.format.packing import packb, unpack_flat, unpackb
from lsm.format.records import Blob, Checkpoint, Place, pack_patch, pack_payload, pack_whole
from lsm.format.segment import SegmentInfo, SegmentWriter
from lsm.steps import Create, Get, PutIf
from lsm.storage.memory import MemoryStorage
from lsm.verify import verify_store
from lsm.view import Tail
from tests.support.checkpoints import at, put

LIMIT = 100 << 20
ULID = "0" * 26


@contextmanager
def small() -> Iterator[None]:
    """What is done inside takes at most 100 MiB at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < LIMIT
    finally:
        tracemalloc.stop()


def _saver(
    fill: Callable[[SegmentWriter], None], bend: Callable[[SegmentInfo], SegmentInfo] = lambda info: info
) -> Any:
    """A saver on a store with one thread, all of which is in one segment."""
    storage, writer = MemoryStorage(), SegmentWriter(ULID, "zstd")
    fill(writer)
    info = bend(replace(writer.finish(), number=2))
    header = Header("t", b"8 bytes.", seq=1, next_number=3, segments=(info,))
    storage.execute(Create(segment_key("t", ULID), writer.take()))
    storage.execute(PutIf(manifest_key("t"), pack_header(header, "zstd"), None))
    return LSMSaver.from_storage(storage, compaction="off")


def _checkpoint(writer: SegmentWriter, versions: dict[str, Any], table: Any = None, value: Any = None) -> None:
    payload = pack_payload(("msgpack", packb({"id": "1"})), ("msgpack", packb({"run_id": "r"})))
    kept: Any = writer.store(Checkpoint, payload) if value is None else value
    writer.add(Checkpoint("", "1", None, None, 1, versions, table or {}, b"", None, kept, seq=1))


CALLS: dict[str, Callable[[LSMSaver], Any]] = {
    "get": lambda saver: saver.get_tuple(at("t")),
    "list": lambda saver: list(saver.list(at("t"))),
    "history": lambda saver: saver.get_delta_channel_history(config=at("t", "1"), channels=["a"]),
    "compact": lambda saver: saver.compact("t"),
    "prune": lambda saver: saver.prune(["t"]),
    "copy": lambda saver: saver.copy_thread("t", "u"),
    "delete for runs": lambda saver: saver.delete_for_runs(["r"]),
    "verify": lambda saver: saver._runtime.run(verify_store(saver._engine.process)),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("count", [1, 2, 3, 3 * patch.MAX_LINKS])
def test_patches_on_each_other_end_everywhere(call: Callable[[LSMSaver], Any], count: int) -> None:
    def fill(writer: SegmentWriter) -> None:
        names = [f"{number:04}" for number in range(count)]
        for number, name in enumerate(names):
            link = patch.Link(name, (patch.Span(1, 0, 0),), 1, 0)
            slot: Any = writer.store(Blob, pack_patch(link, b"x"))
            writer.add(Blob("", "a", name, slot, 1, extends=names[number - 1]))
        _checkpoint(writer, {"a": names[-1]})

    saver = _saver(fill)
    with suppress(CorruptionError):
        call(saver)
    with pytest.raises(CorruptionError, match=r"without end|missing"):
        saver.get_tuple(at("t"))


def test_a_chain_in_the_manifest_is_bounded() -> None:
    for count in (patch.MAX_PIECES - 1, patch.MAX_PIECES):
        base = tuple([Place(2, 8, 20, 0, 5)] * count)
        blob = Blob("", "a", 2, b"", 1, extends=1, base=base)
        with pytest.raises(CorruptionError, match="pieces") if count == patch.MAX_PIECES else nullcontext():
            Tail(0)._apply(blob)


@pytest.mark.parametrize("call", ["get", "list"])
def test_places_without_number_in_one_block(call: str) -> None:
    def fill(writer: SegmentWriter) -> None:
        slot: Any = writer.store(Blob, pack_whole(("msgpack", bytes(1 << 20)), 1))
        writer.add(Blob("", "0000", 1, slot, 1))
        names = [f"{number:04}" for number in range(4000)]
        _checkpoint(writer, dict.fromkeys(names, 1), dict.fromkeys(names, (slot,)))

    saver = _saver(fill)
    with small(), pytest.raises(CorruptionError, match="more than all segments"):
        CALLS[call](saver)


def test_a_place_outside_of_its_segment() -> None:
    saver = _saver(lambda writer: _checkpoint(writer, {}, value=Place(0, 8, 1 << 40, 0, 100)))
    for call in ("get", "list", "compact"):
        with small(), pytest.raises(CorruptionError, match="outside"):
            CALLS[call](saver)


def test_a_segment_that_claims_to_hold_what_it_cannot() -> None:
    saver = _saver(lambda writer: _checkpoint(writer, {}), lambda info: replace(info, raw=RATIO * info.size + 1))
    with pytest.raises(CorruptionError, match="hold no"):
        saver.get_tuple(at("t"))


def test_a_block_that_holds_more_than_its_segment_says() -> None:
    saver = _saver(lambda writer: _checkpoint(writer, {}), lambda info: replace(info, raw=3))
    with pytest.raises(CorruptionError, match="no more than 3"):
        saver.get_tuple(at("t"))


def _sealed(encoding: int, size: int, payload: bytes) -> bytes:
    head = struct.pack("<BI", encoding, size)
    return head + payload + struct.pack("<I", zlib.crc32(payload, zlib.crc32(head, zlib.crc32(b""))))


def test_a_zstd_bomb_is_not_opened() -> None:
    size = 1 << 30
    bomb = zstandard.ZstdCompressor().compressobj(size=size)
    payload = b"".join([bomb.compress(bytes(1 << 20)) for _ in range(size >> 20)]) + bomb.flush()
    assert len(payload) < 200_000
    with small(), pytest.raises(CorruptionError, match="none can hold"):
        unseal(_sealed(1, size, payload), b"", "here")


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_is_sealed_holds_no_more_than_a_reader_accepts(compression: Compression) -> None:
    raw = bytes(4 << 20)
    sealed = seal(raw, compression, b"")
    assert len(raw) <= RATIO * len(sealed)
    assert unseal(sealed, b"", "here") == raw


BOMBS = {
    "arrays that are not there": b"\xdd\x00\x0f\x00\x00" * 500 + bytes(1 << 20),
    "small arrays that are not there": b"\xdc\xff\xff" * 500 + bytes(70_000),
    "empty arrays": b"\xdd" + (20 << 20).to_bytes(4, "big") + b"\x90" * (20 << 20),
    "a list of empty arrays": b"\x92\xdd" + (4 << 20).to_bytes(4, "big") + b"\x90" * (4 << 20) + b"\x01",
    "empty maps": b"\xdd" + (4 << 20).to_bytes(4, "big") + b"\x80" * (4 << 20),
}


@pytest.mark.parametrize("unpacked", [unpackb, unpack_flat])
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_nested_arrays_are_not_made(unpacked: Callable[[bytes], Any], bomb: bytes) -> None:
    with small(), pytest.raises((ValueError, msgpack.UnpackException)):
        unpacked(bomb)


@pytest.mark.parametrize("unpacked", [unpackb, unpack_flat])
@pytest.mark.parametrize(
    "value",
    [
        [],
        [1, "a" * 70_000, b"b" * (2 << 20)],
        ["", b"\x90" * (2 << 20), [0, 2**40, -(2**40)] * 64, 1.5],
        [b"", "\U0001f600" * 500_000],
        ["msgpack", b"\x80"] * 100_000,
        [None, True, -1, -200, 2**63, -(2**63), "x" * 300, [b"y" * 300] * 20, [1] * 200],
    ],
)
def test_what_is_honest_is_unpacked_whatever_its_size(unpacked: Callable[[bytes], Any], value: Any) -> None:
    assert unpacked(packb(value)) == value


@pytest.mark.parametrize("key", [manifest_key("t"), "lsm.json"])
def test_a_sparse_object_is_not_read(tmp_path: Path, key: str) -> None:
    with LSMSaver.from_conn_string(tmp_path.as_uri()) as saver:
        put(saver, at("t"), {"a": 1})
    os.truncate(tmp_path / key, 10_000_000_000)
    again = LSMSaver.from_conn_string(tmp_path.as_uri())
    with again, small(), pytest.raises(CorruptionError, match=f"{key} has 10,000,000,000 bytes"):
        put(again, at("t"), {"a": 1})


def test_an_object_in_a_bucket_is_refused_by_its_size(s3: Any) -> None:
    with LSMSaver.from_conn_string(s3.url(), store_options=s3.store_options) as saver:
        storage = saver._storage
        storage.execute(Create("a", bytes(2 << 20)))
        with pytest.raises(CorruptionError, match="a has 2,097,152 bytes"):
            storage.execute(Get("a"))
        assert storage.execute(Get("a", most=2 << 20)).body == bytes(2 << 20)
