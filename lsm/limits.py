"""Sizes that bound what is stored and sent.

Rules of this module:

- The numbers that decide when something is flushed, split or refused stand here, with their reasons, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

MANIFEST = 256 << 10
"""No manifest is larger, in bytes."""
HEADER = 64 << 10
"""No header is larger, in bytes."""

WRITERS_MARGIN = 600.0
"""Nothing younger is collected, in seconds, unless nobody is writing. Commits need no such margin; what does are
probes of new roots, temporary files, and readers of an older manifest. A request with all tries of the client
takes a minute, a commit with its deadline another, and a clock may be off by some."""
SENT_WITHIN = 60.0
"""Who has written a tombstone sends its removal within so many seconds, or leaves it to others. By then it has met the
answer to one request, which takes a client with all its retries less than a minute."""
TOMBSTONE = 120.0
"""Who has seen a tombstone unchanged for so many seconds may remove it: no removal is under way any more. It was sent
within `SENT_WITHIN`, and was under way for as long at the most."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What depends on the kind of store.

    Attributes:
        inline: A record whose value is larger goes into a segment, in bytes.
        frame: A commit whose records are larger together sends its largest into a segment, in bytes.
        tail: Frames that are larger together are flushed, in bytes.
        heads: How much of the header may go to heads and their values, in bytes.
        small: A head's values stay in the header if they are no larger together, in bytes.
        directory: How many segments there may be before a commit compacts the thread itself.
        lasting: A segment of large values is emptied for being small only if it is smaller than this, in bytes, or than
            its share of all of them.
        commit_deadline: How long a commit tries, in seconds.
        grace: How long an object that nobody refers to is left alone, in seconds.
    """

    inline: int
    frame: int
    tail: int
    heads: int
    small: int
    directory: int = 96
    lasting: int = 1 << 20
    commit_deadline: float = 60.0
    grace: float = 3600.0


OBJECTS = Limits(inline=8 << 10, frame=12 << 10, tail=32 << 10, heads=8 << 10, small=3 << 10)
"""The manifest is sent again with every commit, so it is kept short."""
FILES = Limits(inline=24 << 10, frame=40 << 10, tail=144 << 10, heads=16 << 10, small=4 << 10)
"""Frames are appended, so a long tail costs nothing and saves flushes."""
