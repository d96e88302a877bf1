"""Metadata as terms that an index can answer for.

Rules of this module:

- Two values that Python's `==` calls equal have one term. Values that it cannot speak for (objects with an `==` of
  their own) have the wildcard term of their key, which every query for that key asks for, too.
- Terms only ever narrow a search: what is found is compared with the metadata itself (`matches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lsm.format.bloom import term_hash

_WILDCARD = b"*"


def _canonical(value: Any) -> bytes | None:
    """One text for all values equal to this one, or `None` where there is no telling."""
    if value is None:
        return b"n"
    if isinstance(value, str):
        return b"s" + str.__str__(value).encode("utf-8", "surrogatepass")
    if isinstance(value, (bool, int)):
        return b"i%d" % int(value)
    if isinstance(value, float):
        return b"i%d" % int(value) if value.is_integer() else b"f" + repr(float(value)).encode()
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, (list, tuple)):
        parts = [_canonical(each) for each in value]
        return None if None in parts else b"l" + term_hash(*(part for part in parts if part is not None))
    if isinstance(value, Mapping):
        pairs = [(_canonical(key), _canonical(each)) for key, each in value.items()]
        if any(key is None or each is None for key, each in pairs):
            return None
        return b"d" + term_hash(*(part for pair in sorted(pairs) for part in pair if part is not None))
    return None


def _term(key: str, canonical: bytes) -> bytes:
    return term_hash(b"metadata", key.encode("utf-8", "surrogatepass"), canonical)


def terms_of(metadata: Mapping[str, Any]) -> list[bytes]:
    """The terms of a checkpoint's metadata, 8 bytes each."""
    terms = []
    for key, value in metadata.items():
        canonical = _canonical(value)
        terms.append(_term(str(key), _WILDCARD if canonical is None else canonical))
    return terms


def terms_for(filter: Mapping[str, Any]) -> list[Sequence[bytes]]:
    """For every condition of a filter that terms can narrow, those of which a match has one."""
    groups: list[Sequence[bytes]] = []
    for key, value in filter.items():
        canonical = _canonical(value)
        if value is not None and canonical is not None:  # a missing key counts as None, and has no term
            groups.append((_term(str(key), canonical), _term(str(key), _WILDCARD)))
    return groups


def matches(metadata: Mapping[str, Any], filter: Mapping[str, Any] | None) -> bool:
    """Whether metadata has exactly the values of a filter, as `InMemorySaver` compares them.

    Example:
        >>> matches({"step": 1}, {"step": 1.0}), matches({}, {"user": None}), matches({"a": 1}, {"a": 2})
        (True, True, False)
    """
    return all(value == metadata.get(key) for key, value in (filter or {}).items())
