"""Where things lie under the root.

Rules of this module:

- It alone knows the layout of keys. All keys are made of lower-case letters, digits, `-`, `_`, `.`, `=` and `/`,
  so that they are safe on case-insensitive disks and in every object store.
- The name of a thread is readable and reversible while the thread id is short, and a digest otherwise.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Literal

ROOT_KEY = "lsm.json"
MANIFESTS = "manifests/"
SEGMENTS = "segments/"
SWEEPS = "sweep/"

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")
_LONGEST = 120
_DIGEST = "=="
_DIGESTS = re.compile(f"{_DIGEST}[0-9a-f]{{64}}")
MOST_THREAD_ID = 4096
"""No thread id is longer, in characters."""


def check_thread_id(thread_id: str) -> None:
    """See that a text can be a thread's id.

    Raises:
        TypeError: If it is no `str`.
        ValueError: If it is empty, or longer than the header of a manifest has room for.

    Example:
        >>> check_thread_id("x" * 5000)
        Traceback (most recent call last):
        ...
        ValueError: a thread id has at most 4,096 characters, this one has 5,000
    """
    if type(thread_id) is not str:
        raise TypeError(f"a thread id must be a str, not {type(thread_id).__name__}")
    if not 0 < len(thread_id) <= MOST_THREAD_ID:
        raise ValueError(f"a thread id has at most {MOST_THREAD_ID:,} characters, this one has {len(thread_id):,}")


@lru_cache(256)
def thread_name(thread_id: str) -> str:
    """The name under which a thread's objects lie.

    Args:
        thread_id: Any non-empty string.

    Returns:
        The id with every byte but `a-z 0-9 - _` (and `.` inside the name) as `=` and two hex digits, or `==` and a
        SHA-256 digest where that would be longer than 120 characters.

    Example:
        >>> thread_name("user-1"), thread_name("A/b"), thread_name("..")
        ('user-1', '=41=2fb', '=2e=2e')
    """
    raw = thread_id.encode("utf-8", "surrogatepass")
    if len(raw) <= _LONGEST:
        name = "".join(chr(byte) if chr(byte) in _PLAIN else f"={byte:02x}" for byte in raw)
        if len(name) <= _LONGEST:
            return name
    return _DIGEST + hashlib.sha256(raw).hexdigest()


def thread_id_of(name: str) -> str | None:
    """The thread id that a name stands for, or `None` where the name does not tell: it is a digest (the manifest has
    the id), or no thread has it.

    Example:
        >>> thread_id_of("=41=2fb"), thread_id_of("==" + "0" * 64), thread_id_of("=4")
        ('A/b', None, None)
    """
    head, *escaped = name.split("=")
    try:
        raw = head.encode() + b"".join(bytes.fromhex(part[:2]) + part[2:].encode() for part in escaped)
        thread_id = raw.decode("utf-8", "surrogatepass")
    except ValueError:
        return None
    return thread_id if thread_id and thread_name(thread_id) == name else None


@lru_cache(256)
def _spread(thread_id: str) -> str:
    return hashlib.sha256(thread_id.encode("utf-8", "surrogatepass")).hexdigest()[:2]


def manifest_key(thread_id: str) -> str:
    """The key of a thread's manifest.

    Example:
        >>> manifest_key("user-1")
        'manifests/c6/user-1'
    """
    return f"{MANIFESTS}{_spread(thread_id)}/{thread_name(thread_id)}"


def segments_prefix(thread_id: str) -> str:
    """The prefix of the keys of all of a thread's segments."""
    return f"{SEGMENTS}{_spread(thread_id)}/{thread_name(thread_id)}/"


def segment_key(thread_id: str, ulid: str) -> str:
    """The key of one segment."""
    return segments_prefix(thread_id) + ulid


def sweep_key(shard: int, shards: int) -> str:
    """The key under which the sweeps of one shard remember what they found in shape.

    Example:
        >>> sweep_key(0, 4)
        'sweep/0-of-4'
    """
    return f"{SWEEPS}{shard}-of-{shards}"


FOLDERS = ("manifests", "segments", "sweep", "probe", "tmp")
"""The folders of a store, in which no other may lie."""

Kind = Literal["root", "manifest", "segment", "sweep", "probe", "temporary"]

_NUMBER = "(?:0|[1-9][0-9]*)"
_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("manifest", re.compile(r"manifests/([0-9a-f]{2})/([^/]+)")),
    ("segment", re.compile(r"segments/([0-9a-f]{2})/([^/]+)/[0-7][0-9a-hjkmnp-tv-z]{25}")),
    ("sweep", re.compile(rf"sweep/{_NUMBER}-of-[1-9][0-9]*")),
    ("probe", re.compile(r"probe/[0-9a-f]{24}")),
    ("temporary", re.compile(r"tmp/[0-9a-f]{32}")),
    ("root", re.compile(re.escape(ROOT_KEY))),
)


def kind_of(key: str) -> Kind | None:
    """What an object is, by its whole name; `None` for what this store never makes, which is somebody else's.

    Example:
        >>> kind_of("manifests/c6/user-1"), kind_of("manifests/00/user-1"), kind_of("probe/notes.txt")
        ('manifest', None, None)
    """
    for kind, pattern in _KINDS:
        found = pattern.fullmatch(key)
        if found is not None:
            return kind if kind not in ("manifest", "segment") or _is_at(*found.groups()) else None
    return None


def _is_at(spread: str, name: str) -> bool:
    """Whether a thread of this name lies below these two digits."""
    if _DIGESTS.fullmatch(name):
        return name[len(_DIGEST) :].startswith(spread)
    thread_id = thread_id_of(name)
    return thread_id is not None and _spread(thread_id) == spread


_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"


def make_ulid(now: float, incarnation: bytes, random: bytes) -> str:
    """The name of a segment: a ULID (https://github.com/ulid/spec) in lower case, of 48 bits of milliseconds and 80
    bits of chance. 32 of these are the thread's incarnation's, so that whoever deletes a thread can tell what was
    uploaded for it from what is being uploaded for its successor.

    Args:
        now: Seconds since the epoch.
        incarnation: The incarnation that the segment is for.
        random: At least 6 random bytes.

    Example:
        >>> make_ulid(0.0, bytes(8), bytes(6))
        '00000000000000000000000000'
    """
    number = (int(now * 1000) & (2**48 - 1)) << 80 | int.from_bytes(incarnation[:4] + random[:6], "big")
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))


def is_ulid(value: object) -> bool:
    """Whether this is what `make_ulid` makes.

    Example:
        >>> is_ulid("0" * 26), is_ulid("../" + "0" * 23)
        (True, False)
    """
    return isinstance(value, str) and len(value) == 26 and set(value) <= set(_CROCKFORD)
