"""Decoders and readers on bytes that nobody wrote.

Rules of this module:

- Two kinds of bytes: noise, and valid bytes that were bent and *sealed again*, so that their checksums are right and
  the checks behind them have to do the work.
- Nothing but `CorruptionError` and `FormatVersionError` comes out, in bounded memory; what decodes is then used, too.
- `tests/data/corpus/<target>/` holds inputs worth keeping, those that once did harm among them.
"""

from __future__ import annotations

import lzma
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields as fields_of
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lsm.errors import CorruptionError, FormatVersionError, LSMError
from lsm.format import patch
from lsm.format.envelope import COMPRESSIONS, META, OVERHEAD, seal, unseal
from lsm.format.manifest import MARK_SIZE, Header, chain_of, pack_header, unpack_frames, unpack_header
from lsm.format.names import manifest_key, segment_key, thread_id_of, thread_name
from lsm.format.records import Checkpoint, unpack, unpack_payload, unpack_pieces, unpack_writes, version_key
from lsm.format.segment import SegmentInfo, SegmentWriter, above, open_footer, open_run, rows_of
from lsm.view import open_view
from tests.data import samples

CORPUS = Path(__file__).parent / "data" / "corpus"
OBJECTS = samples.make_store()
MANIFEST = OBJECTS[manifest_key(samples.THREAD)]
HEADER, HEADER_END = unpack_header(MANIFEST, "sample")
FRAMES = unpack_frames(MANIFEST, HEADER_END, HEADER.seq, HEADER.incarnation, HEADER.chain, False, "sample").frames
NUMBER, INFO = next((at, info) for at, info in enumerate(HEADER.segments) if not info.values)
SEGMENT = OBJECTS[segment_key(samples.THREAD, INFO.ulid)]
RUNS = [
    SEGMENT[run.offset : run.offset + run.length]
    for index in (INFO.checkpoint_index, INFO.blob_index)
    for run in index.runs
]
STUBS = [bytes(page._rows[row]) for run in RUNS for page in open_run(run, INFO, "sample") for row in range(len(page))]

# Targets: every decoder, as a function of bytes.


def _use_header(data: bytes) -> None:
    view = open_view("object", data, "tag", None, True)
    for space in ("", "child:1", "none"):
        head = view.head_at_hand(space)
        view.knows_head(space), view.is_fresh(space, "messages", "9"), view.is_complete(space, "0001")
        for checkpoint in view.checkpoints(space):
            for channel in checkpoint.versions:
                view.pieces(checkpoint, channel)
        if head is not None:
            view.writes(space, head.id)


def _use_run(data: bytes) -> None:
    for key, _ in rows_of(open_run(data, INFO, "object"), INFO, "object"):
        assert all(isinstance(part, str) for part in key)
    for page in open_run(data, INFO, "object"):
        page.find(("", "0001"))
        page.has_term(b"even    ")


def _use_info(info: SegmentInfo) -> None:
    assert "/" not in info.ulid
    for index in (info.checkpoint_index, info.blob_index):
        for run in index.covering(("", ""), ("\U0010ffff", "", "")):
            index.upper(run)


def _use_stub(data: bytes) -> None:
    record = unpack(data, "object", 3, 100)
    assert isinstance(record.namespace, str)
    numbers = [record.seq, getattr(record, "time", 0), getattr(record, "flags", 0)]
    numbers += [index for index, _ in getattr(record, "entries", ())]
    assert all(type(number) is int for number in numbers)
    for version in getattr(record, "versions", {}).values():
        version_key(version)


def _pieces(data: bytes) -> list[bytes]:
    """Several values from one: each with its length in front."""
    parts, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 2], "little")
        parts.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return parts


TARGETS: dict[str, Callable[[bytes], object]] = {
    "envelope": lambda data: unseal(data, b"context", "object"),
    "footer": lambda data: _use_info(open_footer(data, "object")),
    "frames": lambda data: unpack_frames(data, 0, 7, b"incarna.", 0, False, "object"),
    "frames_torn": lambda data: unpack_frames(data, 0, 7, b"incarna.", 0, True, "object"),
    "header": _use_header,
    "info": lambda data: _use_info(SegmentInfo.unpack(data, "object")),
    "payload": lambda data: unpack_payload(data, "object"),
    "pieces": lambda data: unpack_pieces(_pieces(data), "object"),
    "run": _use_run,
    "stub": _use_stub,
    "writes": lambda data: unpack_writes(data, "object"),
}


def decode(target: str, data: bytes) -> None:
    """Decode; both errors name the object."""
    try:
        TARGETS[target](data)
    except (CorruptionError, FormatVersionError) as error:
        if "object" not in str(error):
            raise AssertionError("the error does not name the object") from error


@contextmanager
def memory_of_at_most(limit: int) -> Iterator[None]:
    """Fail if the body allocates more than `limit` bytes at a time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= limit, f"{peak:,} bytes"


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=200))
@example(data=b"")
def test_noise(target: str, data: bytes) -> None:
    decode(target, data)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_corpus(path: Path) -> None:
    with memory_of_at_most(32 << 20):
        decode(path.parent.name, path.read_bytes())


def test_the_corpus_has_something_for_every_decoder() -> None:
    assert {path.parent.name for path in CORPUS.glob("*/*")} == set(TARGETS)


# Valid bytes, bent.

HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([0, 1, 2, 2**31, 2**32, 2**40, 2**63]),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.one_of(st.integers(0, 9), st.text(max_size=1)), max_size=6),
    st.dictionaries(st.text(max_size=1), st.none(), max_size=2),
    st.sampled_from(["../../etc/passwd", "\ud800", msgpack.Timestamp(0, 0), msgpack.ExtType(5, b"x")]),
)


def _packed(value: Any) -> bytes:
    return msgpack.packb(value, unicode_errors="surrogatepass")


def _unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)


def bend(draw: Any, value: Any) -> Any:
    """A value with one thing in it changed, wherever it lies; byte strings that are packed lists are opened, too."""
    if isinstance(value, bytes) and draw(st.integers(0, 3)):
        with suppress(Exception):
            inner = _unpacked(value)
            if isinstance(inner, list):
                return _packed(bend(draw, inner))
    if not isinstance(value, list) or not value or not draw(st.integers(0, 9)):
        return draw(HOSTILE)
    at = draw(st.integers(0, len(value) - 1))
    match draw(st.sampled_from(["inside", "inside", "inside", "inside", "drop", "double", "swap"])):
        case "drop":
            return value[:at] + value[at + 1 :]
        case "double":
            return value[: at + 1] + value[at:]
        case "swap":
            other = draw(st.integers(0, len(value) - 1))
            changed = list(value)
            changed[at], changed[other] = value[other], value[at]
            return changed
    return [*value[:at], bend(draw, value[at]), *value[at + 1 :]]


@st.composite
def bent(draw: Any, raws: list[bytes]) -> bytes:
    """One of some packed lists, bent once to three times, or with a byte changed."""
    raw = draw(st.sampled_from(raws))
    if not draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(raw) - 1))
        return raw[:at] + bytes([draw(st.integers(0, 255))]) + raw[at + 1 :]
    value = _unpacked(raw)
    for _ in range(draw(st.integers(1, 3))):
        value = bend(draw, value)
    return _packed(value)


def manifest_of(body: bytes, frames: bytes = b"") -> bytes:
    """A manifest around the body of a header."""
    sealed = seal(body, "none", HEADER.incarnation)
    prelude = struct.pack("<6sHI8s", b"lsmman", 1, len(sealed), HEADER.incarnation)
    return prelude + struct.pack("<I", zlib.crc32(prelude)) + sealed + HEADER.incarnation + frames


def frame_of(body: bytes, seq: int, incarnation: bytes = HEADER.incarnation, chain: int = 0) -> bytes:
    """A frame around its body."""
    sealed = seal(body, "none", incarnation + seq.to_bytes(8, "little"))
    head = struct.pack("<I8sQQ", len(sealed), b"writer..", 1, seq)
    return head + struct.pack("<I", zlib.crc32(head, zlib.crc32(incarnation, chain))) + sealed + incarnation


def run_of(body: bytes, info: SegmentInfo = INFO) -> bytes:
    """A run of one page."""
    sealed = seal(body, "none", info.context)
    return struct.pack("<I", len(sealed)) + sealed


def footer_of(body: bytes) -> bytes:
    """The end of a segment."""
    sealed = seal(body, "none", b"footer")
    return sealed + struct.pack("<I", len(sealed)) + b"lsmseg\1\0"


HEADER_FIELDS = [field.name for field in fields_of(Header) if field.name != "incarnation"]
INFO_FIELDS = [field.name for field in fields_of(SegmentInfo)]
HEADER_BODY = unseal(pack_header(HEADER, "none")[24:-8], HEADER.incarnation, "sample")
_at = HEADER_END
FRAME_BODIES = []
for _frame in FRAMES:
    _sealed = MANIFEST[_at + 32 : _at + _frame.size - MARK_SIZE]
    FRAME_BODIES.append(unseal(_sealed, HEADER.incarnation + _frame.seq.to_bytes(8, "little"), "sample"))
    _at += _frame.size
PAGE_BODIES = [unseal(run[4:], INFO.context, "sample") for run in RUNS]

SEALED: dict[str, tuple[list[bytes], Callable[[bytes], bytes]]] = {
    "footer": ([INFO.pack()], footer_of),
    "frames": (FRAME_BODIES, lambda body: frame_of(body, 8, b"incarna.")),
    "header": ([HEADER_BODY], manifest_of),
    "info": ([INFO.pack()], bytes),
    "payload": ([_packed(("json", b"{}", "json", b"{}"))], bytes),
    "run": (PAGE_BODIES, run_of),
    "stub": (STUBS, bytes),
    "writes": ([_packed(("json", b"{}", "json", b"{}"))], bytes),
}

bending = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("target", SEALED)
@bending
@given(data=st.data())
def test_bent_bytes_with_right_checksums(target: str, data: st.DataObject) -> None:
    raws, around = SEALED[target]
    decode(target, around(data.draw(bent(raws))))


@pytest.mark.parametrize("target", SEALED)
def test_what_is_not_bent_decodes(target: str) -> None:
    raws, around = SEALED[target]
    for raw in raws:
        TARGETS[target](around(raw))


# A whole store, bent: what the decoders let through meets the readers.


def with_manifest(body: bytes) -> samples.Objects:
    return {**OBJECTS, manifest_key(samples.THREAD): body}


@bending
@given(data=st.data())
def test_a_store_whose_header_is_bent(data: st.DataObject) -> None:
    _read(with_manifest(manifest_of(data.draw(bent([HEADER_BODY])), MANIFEST[HEADER_END:])))


@bending
@given(data=st.data())
def test_a_store_whose_frames_are_bent(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(FRAMES) - 1))
    bodies = [*FRAME_BODIES[:at], data.draw(bent([FRAME_BODIES[at]])), *FRAME_BODIES[at + 1 :]]
    manifest, chain = MANIFEST[:HEADER_END], HEADER.chain
    for body, frame in zip(bodies, FRAMES, strict=True):
        raw = frame_of(body, frame.seq, chain=chain)
        manifest, chain = manifest + raw, chain_of(raw)
    _read(with_manifest(manifest))


@bending
@given(data=st.data())
def test_a_store_whose_index_is_bent(data: st.DataObject) -> None:
    """The pages of the first segment are written anew behind its data, and the header says where they are."""
    body, fields, header = bytearray(SEGMENT), _unpacked(INFO.pack()), _unpacked(HEADER_BODY)
    for index in ("checkpoint_index", "blob_index"):
        runs, _ = fields[INFO_FIELDS.index(index)]
        for run in runs:
            page = unseal(SEGMENT[run[1] + 4 : run[1] + run[2]], INFO.context, "sample")
            made = run_of(data.draw(bent([page])) if data.draw(st.booleans()) else page)
            run[1], run[2] = len(body), len(made)
            body += made
    header[HEADER_FIELDS.index("segments")][NUMBER] = _packed(fields)
    for name in ("carried", "inline", "heads"):  # these would answer for it
        header[HEADER_FIELDS.index(name)] = []
    objects = with_manifest(manifest_of(_packed(header)))
    _read({**objects, segment_key(samples.THREAD, INFO.ulid): bytes(body)})


def _read(objects: samples.Objects) -> None:
    for read in samples.READS.values():
        with suppress(LSMError):
            read(objects, samples.THREAD)


# Memory.


@pytest.mark.parametrize("compression", COMPRESSIONS[1:])
def test_a_bomb_is_opened_no_further_than_it_says(compression: str) -> None:
    """A block that records 100 bytes and holds 64 MiB."""
    bomb = seal(bytes(64 << 20), compression, b"")  # type: ignore[arg-type]
    with memory_of_at_most(4 << 20), pytest.raises(CorruptionError, match="object"):
        unseal(_resealed(bomb[0], 100, bomb[5:-4]), b"", "object")


def test_a_zstd_frame_may_not_ask_for_a_window() -> None:
    """100 bytes whose frame asks for the largest window there is, 128 MiB."""
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    chunks = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    payload = chunks.compress(b"a" * 100) + chunks.flush()
    with memory_of_at_most(1 << 20), pytest.raises(CorruptionError, match="object"):
        unseal(_resealed(1, 100, payload), b"", "object")


def test_an_lzma_stream_may_not_ask_for_a_large_dictionary() -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9}]
    payload = lzma.compress(b"a" * 100, filters=filters)
    with pytest.raises(CorruptionError, match="object"):
        unseal(_resealed(3, 100, payload), b"", "object")


@pytest.mark.parametrize("target", ["header", "frames", "run", "footer"])
def test_what_is_no_value_is_bounded(target: str) -> None:
    """A bomb that is honest about its size, where only values may be so large."""
    payload = zlib.compress(bytes(META + 1), 9)
    contexts = {
        "header": HEADER.incarnation,
        "frames": b"incarna." + (8).to_bytes(8, "little"),
        "run": INFO.context,
        "footer": b"footer",
    }
    bomb = _resealed(2, META + 1, payload, contexts[target])
    around = {
        "header": lambda: _prelude(bomb),
        "frames": lambda: _frame_head(bomb),
        "run": lambda: struct.pack("<I", len(bomb)) + bomb,
        "footer": lambda: bomb + struct.pack("<I", len(bomb)) + b"lsmseg\1\0",
    }
    with memory_of_at_most(4 << 20), pytest.raises(CorruptionError, match="no more than"):
        TARGETS[target](around[target]())


def _prelude(sealed: bytes) -> bytes:
    prelude = struct.pack("<6sHI8s", b"lsmman", 1, len(sealed), HEADER.incarnation)
    return prelude + struct.pack("<I", zlib.crc32(prelude)) + sealed


def _frame_head(sealed: bytes) -> bytes:
    head = struct.pack("<I8sQQ", len(sealed), b"writer..", 1, 8)
    return head + struct.pack("<I", zlib.crc32(head, zlib.crc32(b"incarna."))) + sealed


def _resealed(encoding: int, size: int, payload: bytes, context: bytes = b"") -> bytes:
    head = struct.pack("<BI", encoding, size)
    return head + payload + struct.pack("<I", zlib.crc32(payload, zlib.crc32(head, zlib.crc32(context))))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 100_000])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_is_sealed_is_unsealed_in_its_place_only(compression: Any, size: int) -> None:
    raw = bytes(index % 7 for index in range(size))
    sealed = seal(raw, compression, b"here")
    assert unseal(sealed, b"here", "object") == raw
    assert len(sealed) <= size + OVERHEAD
    with pytest.raises(CorruptionError):
        unseal(sealed, b"there", "object")


def test_a_length_that_claims_to_be_huge() -> None:
    huge = struct.pack("<I8sQQ", 2**32 - 1, b"writer..", 1, 8)
    frame = huge + struct.pack("<I", zlib.crc32(huge, zlib.crc32(b"incarna.")))
    with memory_of_at_most(1 << 20):
        with pytest.raises(CorruptionError):
            unpack_frames(frame, 0, 7, b"incarna.", 0, False, "object")
        assert unpack_frames(frame, 0, 7, b"incarna.", 0, True, "object")[:2] == ([], 0)
        with pytest.raises(CorruptionError):
            open_run(struct.pack("<I", 2**32 - 1) + b"xxxx", INFO, "object")
        with pytest.raises(CorruptionError):
            open_footer(struct.pack("<I", 2**32 - 1) + b"lsmseg\1\0", "object")
        for code in (b"\xdd", b"\xdb", b"\xc6", b"\xdf"):  # array, text, bytes, map: four billion of each
            with pytest.raises(CorruptionError):
                unpack(code + b"\xff\xff\xff\xff", "object")


# Names.


@given(st.text(min_size=1, max_size=150))
@example("..")
@example("a/b")
@example("\ud800")
@example("\0")
@example("A")
@example("é" * 30)
def test_the_name_of_a_thread_is_safe_and_comes_back(thread_id: str) -> None:
    name = thread_name(thread_id)
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_=")
    assert 0 < len(name) <= 120
    assert thread_id_of(name) == (None if name.startswith("==") else thread_id)


@given(st.text(alphabet="=abcdef0189-._/Aé\ud800", max_size=20))
@example("=zz")
@example("=e9")
@example("=")
@example("=61")
def test_a_name_that_no_thread_has(name: str) -> None:
    thread_id = thread_id_of(name)
    assert thread_id is None or thread_name(thread_id) == name


# Patches.

VALUES = st.one_of(
    st.binary(max_size=64),
    st.builds(lambda unit, times: unit * times, st.binary(min_size=1, max_size=40), st.integers(0, 200)),
)


@st.composite
def histories(draw: Any) -> list[bytes]:
    """A value as it grows, is edited, shrinks, is emptied, or is replaced by something else."""
    value = draw(VALUES)
    versions = [value]
    for _ in range(draw(st.integers(1, 24))):
        at = draw(st.integers(0, len(value)))
        new = draw(VALUES)
        match draw(st.sampled_from(["append"] * 3 + "count insert edit shrink other none".split())):
            case "append":
                value = value + new
            case "count":  # as a serialiser does it: the count in front changes, and an item is added
                value = len(versions).to_bytes(2, "big") + value[2:] + new
            case "insert":
                value = value[:at] + new + value[at:]
            case "edit":
                value = value[:at] + new + value[at + len(new) :]
            case "shrink":
                value = value[:at]
            case "other":
                value = new
            case "none":
                value = b""
        versions.append(value)
    return versions


@settings(max_examples=200, deadline=None)
@given(histories())
def test_diff_and_apply(versions: list[bytes]) -> None:
    for old, new in pairwise(versions):
        spans = patch.diff(old, new)
        assert patch.apply(old, spans, inserted(spans, new)) == new


@settings(max_examples=200, deadline=None)
@given(histories())
def test_patches_merge_without_their_bases(versions: list[bytes]) -> None:
    spans = patch.diff(versions[0], versions[1])
    for old, new in pairwise(versions[1:]):
        spans = patch.merge(spans, patch.diff(old, new))
        assert patch.apply(versions[0], spans, inserted(spans, new)) == new


@settings(max_examples=200, deadline=None)
@given(histories())
def test_a_chain_gives_every_version_back_and_stays_short(versions: list[bytes]) -> None:
    versions = [bytes(600) + value for value in versions]
    chain, pieces = [patch.whole(0, versions[0])], [versions[0]]
    for number, (old, new) in enumerate(pairwise(versions), 1):
        made = patch.extend(chain, number, old, new)
        if made is None:
            chain, pieces = [patch.whole(number, new)], [new]
        else:
            chain, pieces = [*chain[: made.keep], made.link], [*pieces[: made.keep], made.data]
        value = pieces[0]
        for link, data in zip(chain[1:], pieces[1:], strict=True):
            value = patch.apply(value, link.spans, data)
        assert value == new
        assert len(chain) <= patch.MAX_PIECES
        assert all(len(link.spans) <= patch.MAX_SPANS for link in chain)
        assert sum(map(len, pieces[1:])) <= len(new)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 60), st.integers(1, 3), st.booleans())
def test_a_window_that_slides_costs_what_is_new(seed: int, size: int, slide: int, pinned: bool) -> None:
    """The front of a list is dropped, perhaps behind a first message that stays, and its end grows."""
    source = random.Random(seed)
    messages = [source.randbytes(source.randint(40, 400)) for _ in range(size + slide)]
    first = [source.randbytes(100)] if pinned else []
    old, new = _packed([*first, *messages[:size]]), _packed([*first, *messages[slide:]])

    spans = patch.diff(old, new)

    assert patch.apply(old, spans, inserted(spans, new)) == new
    assert len(inserted(spans, new)) <= len(_packed(messages[size:])) + 10


def inserted(spans: list[patch.Span], new: bytes) -> bytes:
    """The bytes of a value that its spans do not keep."""
    parts, at = [], 0
    for span in spans:
        parts.append(new[at : at + span.inserted])
        at += span.inserted + span.length
    return b"".join(parts)


SPANS = st.lists(st.builds(patch.Span, *[st.integers(0, 2**64)] * 3) | st.builds(patch.Span, *[st.integers(0, 9)] * 3))


@given(st.binary(max_size=40), SPANS, st.binary(max_size=40))
def test_a_patch_makes_no_more_than_its_base_and_its_bytes(base: bytes, spans: list[patch.Span], data: bytes) -> None:
    try:
        made = patch.apply(base, spans, data)
    except ValueError:
        return
    assert len(made) <= len(base) + len(data)


def test_a_chain_of_patches_that_doubles_its_base() -> None:
    """30 patches of 20 bytes each would make a gigabyte, if a patch might keep bytes twice."""
    pieces = [_packed((0, "bytes", b"x"))]
    pieces += [_packed((n, b"", [0, 0, 2**n, 0, 0, 2**n], 0)) for n in range(30)]
    with memory_of_at_most(1 << 20), pytest.raises(CorruptionError, match="object"):
        unpack_pieces(pieces, "object")


def test_a_chain_without_end() -> None:
    pieces = [_packed((0, "bytes", b"x" * 1000)), *[_packed((0, b"", [0, 0, 1000], 0))] * 99]
    with pytest.raises(CorruptionError, match="object"):
        unpack_pieces(pieces, "object")


# Bounds of keys.

NAMES = st.text(alphabet="a\0z\ud7ff\U0010ffff", max_size=4).map(lambda text: text * 20) | st.text(max_size=3)


@settings(max_examples=100, deadline=None)
@given(st.sets(st.tuples(NAMES, NAMES.filter(bool)), min_size=1, max_size=40))
@example({("", "\U0010ffff" * 60), ("\U0010ffff" * 60, "1")})
@example({("a" * 48 + "\U0010ffff" * 9, "1"), ("a" * 48, "1")})
def test_an_index_finds_all_its_keys(keys: set[tuple[str, str]]) -> None:
    """Whatever they are: what an index knows of its keys are cut bounds."""
    writer = SegmentWriter("0" * 26, "none")
    for key in sorted(keys):
        writer.add(Checkpoint(*key, None, None, 0, {}, {}, b"x" * 30_000, None, writer.store(Checkpoint, b"")))
    info = writer.finish()
    body = writer.take()
    index = info.checkpoint_index
    found: dict[Any, list[Any]] = {}
    for run in index.runs:
        pages = open_run(body[run.offset : run.offset + run.length], info, "object")
        found[run] = [key for key, _ in rows_of(pages, info, "object")]
        upper = index.upper(run)
        assert all(run.first <= key and (upper is None or key <= upper) for key in found[run])
    for key in keys:
        assert [run for run in index.covering(key, key) if key in found[run]]
        space = (key[0],), above(key[0])
        runs = index.covering(*space)
        assert {each for run in runs for each in found[run]} >= {each for each in keys if each[0] == key[0]}
