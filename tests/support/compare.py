"""Equality to the letter.

Rules of this module:

- `1`, `1.0` and `True` are equal in Python, and so are a tuple and a named tuple; a store that turns one into
  another has lost something. `exact` makes of a value one that is equal only where types are equal, too.
"""

from __future__ import annotations

from typing import Any


def exact(value: Any) -> Any:
    """The value with every type spelt out, to be compared with `==`. The order of dictionaries is no part of it.

    Example:
        >>> exact({"a": 1}) == exact({"a": True})
        False
        >>> exact({"a": 1, "b": 2}) == exact({"b": 2, "a": 1})
        True
    """
    kind = type(value).__name__
    if isinstance(value, dict):
        pairs = [(exact(key), exact(item)) for key, item in value.items()]
        return kind, sorted(pairs, key=repr)
    if isinstance(value, list | tuple):
        return kind, [exact(item) for item in value]
    if isinstance(value, float):
        return kind, repr(value)  # tells -0.0 from 0.0, and finds a NaN equal to itself
    return kind, value
