"""Values as MessagePack.

Rules of this module:

- All that this package packs is packed here, so that every text survives, lone surrogates included.
- Nothing is unpacked that would take much more memory than its bytes: an array is made as long as it says that it is,
  and an empty one takes a byte and becomes 56. So what is large is looked through first.
- A packer is made anew for each value, so that no two threads share one, none is left in the middle of a value that
  cannot be packed, and none keeps the memory that its largest value took.
"""

from __future__ import annotations

from typing import Any

import msgpack

_SMALL = 4 << 10  # bytes of which nothing large can be made
_DENSE = 1 << 20  # bytes of which little can be made but of arrays alone
_MOST_ARRAYS = 1 << 19
_ITEMS_AT_MOST = 3 << 20
_ARRAYS = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
_FIXED = {0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}
_FIXED |= {0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}

_BUFFER = 1 << 10  # to begin with: msgpack's own 256 KiB take longer to get than most values to pack


def packb(value: Any) -> bytes:
    """A value as bytes.

    Example:
        >>> packb(["a", 1])
        b'\\x92\\xa1a\\x01'
    """
    packed: bytes = msgpack.Packer(unicode_errors="surrogatepass", buf_size=_BUFFER).pack(value)
    return packed


def unpackb(data: bytes) -> Any:
    """The inverse of `packb`, for what may be nested.

    Raises:
        ValueError: If the bytes are not what was packed, or would take too much memory. `msgpack` raises others, too.
    """
    if len(data) > _SMALL:
        if len(data) > _DENSE and len(data) - len(data.translate(None, _ARRAYS)) > _MOST_ARRAYS:
            _look_through(data, 0, [_ITEMS_AT_MOST, _MOST_ARRAYS], 16)
        unpacker = msgpack.Unpacker(max_buffer_size=len(data), strict_map_key=False)
        unpacker.feed(data)
        unpacker.skip()  # fails on arrays that are longer than what is there, and makes none
    return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)


def unpack_flat(data: bytes) -> Any:
    """The inverse of `packb`, for a list of numbers, texts and bytes, and at most two lists of such. It is not copied
    to be looked through. Raises what `unpackb` does.

    Example:
        >>> unpack_flat(packb([1, b"a", [2, 3]]))
        [1, b'a', [2, 3]]
    """
    if len(data) > _SMALL:
        _look_through(data, 0, [_ITEMS_AT_MOST, 3], 2)
    return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)


def _look_through(data: bytes, at: int, left: list[int], depth: int) -> int:
    """Go over a list without making anything. `left` has how many items and lists there may still be.

    Returns:
        Where it ends.

    Raises:
        ValueError: If it is no list, is cut short, or there is too much of it.
    """
    head = data[at] if at < len(data) else 0
    width = {0xDC: 2, 0xDD: 4}.get(head, 0)
    if not width and head & 0xF0 != 0x90:
        raise ValueError("a list is expected")
    count = int.from_bytes(data[at + 1 : at + 1 + width], "big") if width else head & 0x0F
    at += 1 + width
    left[0] -= count
    left[1] -= 1
    if min(left) < 0 or not depth or at + count > len(data):
        raise ValueError("a list has too much in it")
    for _ in range(count):
        head = data[at] if at < len(data) else 0
        if head < 0x80 or head >= 0xE0:
            at += 1
        elif 0xA0 <= head < 0xC0:
            at += 1 + (head & 0x1F)
        elif head in _SIZED:
            width = _SIZED[head]
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "big")
        elif head in _FIXED:
            at += _FIXED[head]
        else:
            at = _look_through(data, at, left, depth - 1)
    if at > len(data):
        raise ValueError("a list is cut short")
    return at
