"""A value as what changed since an earlier version of it.

Rules of this module:

- Pure functions on bytes. A *patch* is a few spans, each some new bytes and then a stretch of its base. Most channels
  grow: a list gains an item, so that the count in front of it changes and bytes are added at its end.
- Finding a patch is comparing at the speed of memory: ahead, over changes of a few bytes and over what was dropped (a
  window that slides), and back from the end. It need not find the smallest one. The spans are in order of the base and
  do not overlap in it, so that a patch never makes more than its base and its own bytes.
- A value is stored as a *chain* of pieces: a whole one, then patches, each on the value of the pieces before it.
  Chains stay short the way a log-structured tree does: patches have levels, and seven of one level and the next are
  merged into one of the level above, so that n versions need about 7 * log8(n) pieces, and every byte is rewritten
  about log8(n) times. Patches merge without the bytes of their bases (`merge`).
- Patches of a chain never have more bytes together than the value: it is begun anew instead. Merged patches do not
  grow beyond 64 KiB.
- New bytes that are stored already, in what a task wrote, need not be stored again: `overlap` finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

Version = str | int | float

FAN_IN = 8
MAX_LINKS = 32
MAX_PIECES = 64
LARGEST_MERGED = 64 << 10
MAX_SPANS = 64
SMALLEST = 512
_STEP = 1 << 16
_WINDOW = 24
_REACH = 16
_PROBE = 32


class Span(NamedTuple):
    """`inserted` new bytes, then `length` bytes of the base from `start` on."""

    inserted: int
    start: int
    length: int


class Link(NamedTuple):
    """What a chain's owner must remember of one piece: of which version it is, and sizes. The first link of a chain is
    the whole value. It takes as many pieces as its new bytes are borrowed in, and one."""

    version: Version
    spans: tuple[Span, ...]
    inserted: int
    level: int
    borrowed: int = 0


class Patch(NamedTuple):
    """A patch that takes the place of all pieces after the first `keep` ones; `data` is its new bytes."""

    keep: int
    link: Link
    data: bytes


def common_prefix(a: bytes, b: bytes, i: int = 0, j: int = 0) -> int:
    """The number of bytes that `a` from `i` on and `b` from `j` on share at the front.

    Example:
        >>> common_prefix(b"checkpoint", b"checksum")
        5
    """
    limit = min(len(a) - i, len(b) - j)
    low = 0
    while low < limit and a[i + low : i + low + _STEP] == b[j + low : j + low + _STEP]:
        low += _STEP
    if low >= limit:
        return limit
    high = min(low + _STEP, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if a[i + low : i + middle] == b[j + low : j + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(a: bytes, b: bytes, limit: int, i: int | None = None, j: int | None = None) -> int:
    """The number of bytes, at most `limit`, that `a` up to `i` and `b` up to `j` share at the end.

    Example:
        >>> common_suffix(b"put_writes", b"writes", 5)
        5
    """
    i, j = len(a) if i is None else i, len(b) if j is None else j
    low = 0
    while low < limit and _before(a, i - low, _STEP) == _before(b, j - low, _STEP):
        low += _STEP
    if low >= limit:
        return limit
    high = min(low + _STEP, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if _before(a, i - low, middle - low) == _before(b, j - low, middle - low):
            low = middle
        else:
            high = middle - 1
    return low


def _before(value: bytes, end: int, size: int) -> bytes:
    return value[max(0, end - size) : end]


def diff(old: bytes, new: bytes) -> list[Span]:
    """The spans that make `new` of `old`.

    Example:
        >>> diff(b"\\x02" + b"a" * 90, b"\\x03" + b"a" * 90 + b"bb")
        [Span(inserted=1, start=1, length=90), Span(inserted=2, start=0, length=0)]
    """
    spans: list[Span] = []
    i = j = done = 0
    while len(spans) < MAX_SPANS // 4:
        shared = common_prefix(old, new, i, j)
        if shared:
            spans.append(Span(j - done, i, shared))
            i, j = i + shared, j + shared
            done = j
        step = _resync(old, i, new, j) or _dropped(old, i, new, j)
        if step is None:
            break
        i, j = i + step[0], j + step[1]
    back = common_suffix(old, new, min(len(old) - i, len(new) - j))
    if back >= _REACH:
        spans.append(Span(len(new) - back - done, len(old) - back, back))
        done = len(new)
    if done < len(new):
        spans.append(Span(len(new) - done, 0, 0))
    return spans


def _resync(old: bytes, i: int, new: bytes, j: int) -> tuple[int, int] | None:
    """How far to skip in both values to be at the same bytes again, if that is near."""
    for skip in range(_REACH):
        key = old[i + skip : i + skip + _WINDOW]
        if len(key) < _WINDOW:
            return None
        found = new.find(key, j, j + _REACH + _WINDOW)
        if found >= 0:
            return skip, found - j
    return None


def _dropped(old: bytes, i: int, new: bytes, j: int) -> tuple[int, int] | None:
    """How far to skip in the old value to where the new one goes on, unless the ends have more in common."""
    key = new[j : j + _WINDOW]
    found = old.find(key, i) if len(key) == _WINDOW else -1
    if found < 0:
        return None
    back = common_suffix(old, new, min(len(old) - i, len(new) - j))
    return (found - i, 0) if common_prefix(old, new, found, j) > back else None


def merge(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The spans of two patches in a row, as one patch on the base of the first.

    Example:
        >>> merge([Span(1, 1, 90)], [Span(0, 0, 1), Span(2, 1, 90)])
        [Span(inserted=3, start=1, length=90)]
    """
    bounds = [0]
    for span in first:
        bounds += [bounds[-1] + span.inserted, bounds[-1] + span.inserted + span.length]
    merged: list[Span] = []
    pending = 0

    def copy(start: int, length: int) -> None:
        nonlocal pending
        if merged and not pending and merged[-1].start + merged[-1].length == start:
            merged[-1] = merged[-1]._replace(length=merged[-1].length + length)
        else:
            merged.append(Span(pending, start, length))
        pending = 0

    for span in second:
        pending += span.inserted
        low, high = span.start, span.start + span.length
        for at, (begin, end) in enumerate(pairwise(bounds)):
            left, right = max(begin, low), min(end, high)
            if left >= right:
                continue
            if at % 2:
                copy(first[at // 2].start + left - begin, right - left)
            else:
                pending += right - left
    if pending:
        merged.append(Span(pending, 0, 0))
    return merged


def overlap(a: bytes, b: bytes) -> tuple[int, int, int]:
    """A long stretch of bytes that two values share, wherever it lies in them: one that has the middle of the shorter,
    or a byte a quarter from its ends. Another may be longer.

    Returns:
        Where it starts in each, and its length: 0 if none was found.

    Example:
        >>> image = bytes(range(256))
        >>> overlap(b"[1, " + image + b"]", b"2:" + image)
        (4, 2, 256)
    """
    if len(a) > len(b):
        j, i, length = overlap(b, a)
        return i, j, length
    best = 0, 0, 0
    for quarter in (2, 1, 3):
        i = max(0, len(a) * quarter // 4 - _PROBE // 2)
        probe = a[i : i + _PROBE]
        j = b.find(probe) if len(probe) == _PROBE else -1
        if j >= 0:
            back = common_suffix(a, b, min(i, j), i, j)
            length = back + common_prefix(a, b, i, j)
            best = max(best, (i - back, j - back, length), key=lambda found: found[2])
        if best[2] * 2 >= len(a):
            break
    return best


def count_pieces(chain: Sequence[Link]) -> int:
    """How many pieces a chain is stored in.

    Example:
        >>> count_pieces([whole(1, b"a"), Link(2, (), 5000, 0, borrowed=1)])
        3
    """
    return sum(1 + link.borrowed for link in chain)


def whole(version: Version, value: bytes) -> Link:
    """The link of a piece that is stored whole."""
    return Link(version, (), len(value), 0)


def extend(chain: Sequence[Link], version: Version, old: bytes, new: bytes) -> Patch | None:
    """The patch to store for a new version of a value.

    Args:
        chain: The links of the version before.
        version: The new version.
        old: The bytes of the version before.
        new: The bytes of the new version.

    Returns:
        The patch, or `None` where the value is better stored whole.

    Example:
        >>> old, new = bytes(1000), bytes(1000) + b"more"
        >>> patch = extend([whole(1, old)], 2, old, new)
        >>> patch.keep, patch.data, apply(old, patch.link.spans, patch.data) == new
        (1, b'more', True)
    """
    if len(new) < SMALLEST:
        return None
    spans = diff(old, new)
    level, keep = 0, len(chain)
    while _run(chain[:keep], level) >= FAN_IN - 1:
        merged = spans
        for link in reversed(chain[keep - FAN_IN + 1 : keep]):
            merged = merge(link.spans, merged)
        if sum(span.inserted for span in merged) > LARGEST_MERGED:
            break  # reading a few more large pieces costs less than writing them once more
        spans, level, keep = merged, level + 1, keep - FAN_IN + 1
    inserted = sum(span.inserted for span in spans)
    stored = sum(piece.inserted for piece in chain[1:keep]) + inserted
    small = inserted * 2 <= len(new) and stored <= len(new)
    if keep >= MAX_LINKS or count_pieces(chain[:keep]) >= MAX_PIECES or len(spans) > MAX_SPANS or not small:
        return None
    parts, at = [], 0
    for span in spans:
        parts.append(new[at : at + span.inserted])
        at += span.inserted + span.length
    return Patch(keep, Link(version, tuple(spans), inserted, level), b"".join(parts))


def _run(chain: Sequence[Link], level: int) -> int:
    """How many patches of one level stand at the end of a chain."""
    run = 0
    while run < len(chain) - 1 and chain[-1 - run].level == level:
        run += 1
    return run


def apply(base: bytes, spans: Sequence[Span], data: bytes) -> bytes:
    """The value that a patch makes of its base.

    Raises:
        ValueError: If the patch does not fit its base or its data.
    """
    parts, at, low = [], 0, 0
    for inserted, start, length in spans:
        if length and not low <= start <= len(base) - length:
            raise ValueError(f"a patch keeps bytes {start} to {start + length}, not after {low}, of {len(base)}")
        parts += [data[at : at + inserted], base[start : start + length]]
        at, low = at + inserted, start + length if length else low
    if at != len(data):
        raise ValueError(f"a patch inserts {at} bytes and has {len(data)}")
    return b"".join(parts)
