"""Sealed bytes: compressed, sized and checksummed, each saying how.

Rules of this module:

- It alone compresses and checks sums. A sealed block is
  `encoding (1) | raw length (4, little endian) | payload | CRC-32 (4)`.
- The checksum is seeded with a *context* (which object the block belongs to), so that a block that turns up in
  another object's place is refused like a damaged one.
- `encoding`: bits 0 to 2 are the compression (0 none, 1 zstd, 2 zlib, 3 lzma). Bit 7 is kept for encryption (a key
  id will follow); bits 3 to 6 are zero. A reader refuses bits that it does not know.
- Opening is bounded by the recorded length: not one byte more is ever decompressed. A zstd payload is one frame that
  states its content size; an lzma payload is in the xz format and needs at most 16 MiB to decompress.
- What is not a value (headers, frames, pages) is bounded by `META`, however it is recorded.
- No block holds more than `RATIO` times its sealed bytes, so that what an object can grow to is known from its size.
  What compresses better is stored with a method that does not.
"""

from __future__ import annotations

import lzma
import struct
import threading
import zlib
from typing import Literal

import zstandard

from lsm.errors import CorruptionError, FormatVersionError

Compression = Literal["none", "zstd", "zlib", "lzma"]
COMPRESSIONS: tuple[Compression, ...] = ("none", "zstd", "zlib", "lzma")

_HEAD = struct.Struct("<BI")
_CRC = struct.Struct("<I")
OVERHEAD = _HEAD.size + _CRC.size
MAX_RAW = 2**32 - 1
META = 64 << 20
"""No sealed header, frame, page or footer holds more, in bytes."""
RATIO = 4096
"""No block holds more bytes for each byte that it takes."""
_WORTHWHILE = 64
_LZMA_MEMORY = 16 << 20

_local = threading.local()  # zstandard's contexts must not be shared between threads


def _zstd_compressor() -> zstandard.ZstdCompressor:
    made: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if made is None:
        made = _local.compressor = zstandard.ZstdCompressor(level=3)
    return made


def _zstd_decompressor() -> zstandard.ZstdDecompressor:
    made: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
    if made is None:
        made = _local.decompressor = zstandard.ZstdDecompressor()
    return made


def _compress(raw: bytes, compression: Compression) -> bytes:
    if compression == "zstd":
        return _zstd_compressor().compress(raw)
    if compression == "zlib":
        return zlib.compress(raw, 6)
    return lzma.compress(raw, preset=1)


def _decompress(payload: bytes, encoding: int, size: int) -> bytes:
    """The payload's content, which must be `size` bytes; at most one more is made."""
    if encoding == 1:
        # One call for a frame of known size takes no memory for a window, whatever window the frame asks for.
        if zstandard.frame_content_size(payload) != size:
            return b""
        return _zstd_decompressor().decompress(payload, allow_extra_data=False)
    if encoding == 2:
        return zlib.decompressobj().decompress(payload, size + 1)
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_LZMA_MEMORY).decompress(payload, size + 1)


def seal(raw: bytes, compression: Compression, context: bytes, most: int = MAX_RAW) -> bytes:
    """Seal bytes, compressed where that makes them smaller.

    Args:
        raw: What to seal.
        compression: What to try.
        context: What the block belongs to.
        most: How much a reader will accept, in bytes; 4 GiB and more never fit.

    Returns:
        The sealed block.

    Raises:
        ValueError: If `raw` is too large.

    Example:
        >>> sealed = seal(b"a" * 1000, "zstd", b"here")
        >>> len(sealed) < 100, unseal(sealed, b"here", "an object") == b"a" * 1000
        (True, True)
    """
    if len(raw) > most:
        raise ValueError(f"a block may have {most:,} bytes, this one has {len(raw):,}")
    payload, encoding = raw, 0
    if compression != "none" and len(raw) >= _WORTHWHILE:
        for method in dict.fromkeys((compression, "zlib")):  # zlib never makes less than a thousandth
            smaller = _compress(raw, method)
            if len(smaller) < len(raw) <= RATIO * len(smaller):
                payload, encoding = smaller, COMPRESSIONS.index(method)
                break
            if len(smaller) >= len(raw):
                break
    head = _HEAD.pack(encoding, len(raw))
    crc = zlib.crc32(payload, zlib.crc32(head, zlib.crc32(context)))
    return b"".join((head, payload, _CRC.pack(crc)))


def unseal(sealed: bytes, context: bytes, where: str, most: int = MAX_RAW) -> bytes:
    """What was sealed.

    Args:
        sealed: A whole sealed block.
        context: What it was sealed with.
        where: The object, for the error.
        most: More than this, in bytes, is not even decompressed.

    Returns:
        The bytes given to `seal`.

    Raises:
        CorruptionError: If the bytes are not what was sealed in this context.
        FormatVersionError: If they are encoded in a way that this version does not know.
    """
    if len(sealed) < OVERHEAD:
        raise CorruptionError(f"{where}: a block of {len(sealed)} bytes is too short to be one")
    encoding, size = _HEAD.unpack_from(sealed)
    payload = sealed[_HEAD.size : -_CRC.size]
    crc = zlib.crc32(payload, zlib.crc32(sealed[: _HEAD.size], zlib.crc32(context)))
    if crc != _CRC.unpack_from(sealed, len(sealed) - _CRC.size)[0]:
        raise CorruptionError(f"{where}: a block fails its checksum; restore the object from a backup")
    if size > RATIO * len(sealed):
        raise CorruptionError(f"{where}: a block of {len(sealed):,} bytes records {size:,}, which none can hold")
    if size > most:
        raise CorruptionError(f"{where}: a block records {size:,} bytes, where no more than {most:,} belong")
    if encoding == 0:
        raw = payload
    elif encoding < len(COMPRESSIONS):
        try:
            raw = _decompress(payload, encoding, size)
        except (zstandard.ZstdError, zlib.error, lzma.LZMAError, EOFError) as error:
            raise CorruptionError(f"{where}: a block does not decompress ({error})") from error
    else:
        raise FormatVersionError(f"{where}: a block has encoding {encoding:#x}, which this version does not know")
    if len(raw) != size:
        raise CorruptionError(f"{where}: a block records {size} bytes but holds another number")
    return raw
