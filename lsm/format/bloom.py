"""Bloom filters over 64-bit hashes (B. H. Bloom, CACM 13(7), 1970).

Rules of this module:

- A filter is plain bytes; it may answer yes wrongly, never no. Empty bytes hold nothing.
- Terms are hashed here and nowhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import lru_cache

HASH_BYTES = 8
_PROBES = 4
_SHORT = 128


def term_hash(*parts: bytes) -> bytes:
    """The hash of one term: of a list of byte strings, where the division matters.

    Example:
        >>> term_hash(b"a", b"b") == term_hash(b"ab"), len(term_hash(b"a"))
        (False, 8)
    """
    return _hash_of_short(parts) if sum(map(len, parts)) <= _SHORT else _hash(parts)


def _hash(parts: tuple[bytes, ...]) -> bytes:
    divided = b"".join([each for part in parts for each in (len(part).to_bytes(4, "little"), part)])
    return hashlib.blake2b(divided, digest_size=HASH_BYTES).digest()


_hash_of_short = lru_cache(512)(_hash)  # most terms come again: those of a run's metadata with its every checkpoint


def make(hashes: Collection[bytes], largest: int) -> bytes:
    """A filter with ten bits a hash, of at most `largest` bytes.

    Example:
        >>> has(make([term_hash(b"a")], 256), term_hash(b"a"))
        True
    """
    if not hashes:
        return b""
    size = min(largest, max(8, len(hashes) * 10 // 8 + 1))
    bits = bytearray(size)
    for each in hashes:
        for probe in _probes(each, size * 8):
            bits[probe >> 3] |= 1 << (probe & 7)
    return bytes(bits)


def has(bits: bytes, each: bytes) -> bool:
    """Whether the hash may be among those that the filter was made of."""
    return bool(bits) and all(bits[probe >> 3] >> (probe & 7) & 1 for probe in _probes(each, len(bits) * 8))


def _probes(each: bytes, bits: int) -> list[int]:
    first, second = int.from_bytes(each[:4], "little"), int.from_bytes(each[4:], "little") | 1
    return [(first + i * second) % bits for i in range(_PROBES)]
