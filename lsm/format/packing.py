"""Values as MessagePack.

Rules of this module:

- All that this package packs is packed here, so that every text survives, lone surrogates included.
- A packer is made anew for each value, so that no two threads share one, none is left in the middle of a value that
  cannot be packed, and none keeps the memory that its largest value took.
"""

from __future__ import annotations

from typing import Any

import msgpack

_BUFFER = 1 << 10  # to begin with: msgpack's own 256 KiB take longer to get than most values to pack


def packb(value: Any) -> bytes:
    """A value as bytes.

    Example:
        >>> packb(["a", 1])
        b'\\x92\\xa1a\\x01'
    """
    packed: bytes = msgpack.Packer(unicode_errors="surrogatepass", buf_size=_BUFFER).pack(value)
    return packed
