"""Writes what lies in `golden/` and `corpus/`: `python -m tests.data.generate`, by hand, after a change of the format.

Rules of this module:

- A change of bytes that are meant to stay is a new format version (`docs/format.md`); then the files of the old one
  stay, beside the new ones.
- Inputs that a fuzzer found are added to `corpus/` by hand, under other names; nothing here removes them.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgpack

from lsm.format.envelope import COMPRESSIONS, seal
from tests.data import samples

HERE = Path(__file__).parent


def _write(path: Path, body: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


def golden() -> None:
    """The sample store, once for each compression."""
    for compression in COMPRESSIONS:
        root = HERE / "golden" / compression
        for path in root.rglob("*"):
            if path.is_file():
                path.unlink()
        for key, body in samples.make_store(compression).items():
            _write(root / key, body)


def corpus() -> None:
    """A valid input and some hostile ones for every target of `tests/test_fuzz.py`."""
    from tests import test_fuzz as fuzz

    def keep(target: str, name: str, body: bytes) -> None:
        _write(HERE / "corpus" / target / name, body)

    for target, (raws, around) in fuzz.SEALED.items():
        keep(target, "valid", around(raws[0]))
        keep(target, "cut", around(raws[0])[:-5])
        keep(target, "nested", around(b"\x91" * 2000))
        keep(target, "arrays_that_claim_to_be_huge", around((b"\xdd" + struct.pack(">I", len(raws[0]))) * 200))
    keep("frames_torn", "zeros", bytes(100))
    keep("frames_torn", "valid", (HERE / "corpus/frames/valid").read_bytes())
    keep("frames_torn", "cut", (HERE / "corpus/frames/valid").read_bytes()[:-5])
    for compression in COMPRESSIONS:
        keep("envelope", compression, seal(b"text " * 100, compression, b"context"))
    whole, piece = msgpack.packb((1, "bytes", b"x" * 600)), msgpack.packb((2, b"new", [3, 0, 600], 0))
    keep("pieces", "valid", b"".join(struct.pack("<H", len(each)) + each for each in (whole, piece)))
    borrowed = [
        b"abc",
        msgpack.packb((1, "bytes", [b"x" * 600, b"y"])),
        b"de",
        b"f",
        msgpack.packb((2, [b"", b"", b"g"], [4, 0, 604], 0)),
    ]
    keep("pieces", "borrowed", b"".join(struct.pack("<H", len(each)) + each for each in borrowed))
    keep("pieces", "borrowed_from_nobody", b"".join(struct.pack("<H", len(each)) + each for each in borrowed[1:]))
    twice = msgpack.packb((2, b"", [0, 0, 600, 0, 0, 600], 0))
    keep("pieces", "the_base_twice", b"".join(struct.pack("<H", len(each)) + each for each in (whole, *[twice] * 25)))
    # Once, each of these came out of a decoder as another error, or took all memory.
    keep("stub", "a_time_that_is_infinite", msgpack.packb((1, 0, b"", "", "1", "", "", float("inf"), [])))
    keep("stub", "entries_that_are_a_map", msgpack.packb((1, 0, b"", "", "1", "", "", 0, {"a": 1})))
    header = msgpack.unpackb(fuzz.HEADER_BODY, unicode_errors="surrogatepass", strict_map_key=False)
    header[fuzz.HEADER_FIELDS.index("commits")] = [(1 << 40, 1)]
    keep("header", "a_writer_that_is_a_number", fuzz.manifest_of(fuzz._packed(header)))
    page = msgpack.packb(([[{}]], [0], ["1"], [b""], b""))
    keep("run", "a_key_that_is_a_map", fuzz.run_of(page))
    info = msgpack.unpackb(fuzz.INFO.pack(), unicode_errors="surrogatepass")
    info[fuzz.INFO_FIELDS.index("ulid")] = "é" * 26
    keep("info", "a_name_that_is_no_ulid", msgpack.packb(info))


if __name__ == "__main__":
    golden()
    corpus()
