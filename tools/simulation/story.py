"""What happened, in lines that a person can read.

Rules of this module:

- Only text is made here, and only when somebody wants to read it: a run without a story costs nothing.
- The same run makes the same text, byte for byte.
"""

from __future__ import annotations

from typing import Any

from lsm.steps import Append, Create, Delete, DeleteIf, GetRanges, List, PutIf


class Story:
    """Collects lines; a silent one collects nothing."""

    def __init__(self, told: bool):
        self.told = told
        self.lines: list[str] = []

    def tell(self, now: float, who: str, text: str) -> None:
        """Add a line."""
        if self.told:
            self.lines.append(f"{now:12.3f}  {who:<10} {text}")

    def text(self) -> str:
        return "\n".join(self.lines)


def describe(request: Any) -> str:
    """A request in a few words."""
    name = type(request).__name__
    if isinstance(request, Append):
        return f"{name} {len(request.new)} bytes to {short(request.key)} at {request.tag}"
    if isinstance(request, PutIf):
        return f"{name} {len(request.body)} bytes to {short(request.key)} at {request.tag}"
    if isinstance(request, Create):
        return f"{name} {short(request.key)}, {len(request.body)} bytes"
    if isinstance(request, DeleteIf):
        return f"{name} {short(request.key)} at {request.tag}"
    if isinstance(request, Delete):
        return f"{name} {', '.join(map(short, request.keys)) or 'nothing'}"
    if isinstance(request, GetRanges):
        return f"{name} {short(request.key)} {len(request.ranges)} ranges"
    if isinstance(request, List):
        return f"{name} {request.prefix} after {request.after and short(request.after)}"
    key = getattr(getattr(request, "handle", request), "key", None)
    return name if key is None else f"{name} {short(key)}"


def short(key: str) -> str:
    """A key without what only makes it long: hashes, and the time in front of a segment's name.

    Example:
        >>> short("segments/c6/user-1/06ekzz000000000000000abcde"), short("probe/0123")
        ('segment user-1/0000abcde', 'a probe')
    """
    kind, _, rest = key.partition("/")
    if kind == "probe":
        return "a probe"
    if kind in ("manifests", "segments") and "/" in rest:
        name = rest.split("/", 1)[1]
        if kind == "manifests":
            return f"manifest {name}"
        thread, _, ulid = name.partition("/")
        return f"segment {thread}/{ulid[-9:]}"
    return key
