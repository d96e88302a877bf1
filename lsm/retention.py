"""How long checkpoints stay.

Rules of this module:

- What has expired is invisible at once to whoever reads with that retention (`Horizon`), and physically gone after the
  next rewrite (`Expire`). Both ask the same questions, here.
- The latest checkpoint of a namespace never expires by age or count. A subgraph call's namespace (with `:` in its last
  part) lives as long as the root checkpoint that the call started from.
- A checkpoint and its writes expire together. What a live checkpoint's delta channels need stays, hidden.
- Time is the writers': a checkpoint's age counts from when it was put.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lsm.find import Item, Scan, by_id, latest
from lsm.format.records import HIDDEN, Checkpoint
from lsm.lineage import Nodes, is_call
from lsm.process import Process, Thread
from lsm.steps import Steps
from lsm.view import View


@dataclass(frozen=True, slots=True)
class Retention:
    """How long checkpoints stay; each part is optional.

    Args:
        max_age: Checkpoints that were put longer ago expire.
        max_checkpoints: Of every namespace, all but so many of the highest ids expire.
        idle: Threads to which nothing was written for so long are removed.

    Raises:
        ValueError: If a part is not positive.

    Example:
        >>> Retention(max_age=timedelta(days=30), max_checkpoints=500)
        Retention(max_age=datetime.timedelta(days=30), max_checkpoints=500, idle=None)
    """

    max_age: timedelta | None = None
    max_checkpoints: int | None = None
    idle: timedelta | None = None

    def __post_init__(self) -> None:
        parts: list[tuple[str, Any]] = [("max_age", self.max_age), ("idle", self.idle)]
        for name, value in parts:
            if value is not None and not (isinstance(value, timedelta) and value > timedelta(0)):
                raise ValueError(f"{name} must be a timedelta above zero, not {value!r}")
        count = self.max_checkpoints
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(f"max_checkpoints must be a number of at least 1, not {count!r}")

    def oldest(self, now: float) -> int:
        """The time before which checkpoints expire, in milliseconds since the epoch."""
        return 0 if self.max_age is None else int((now - self.max_age.total_seconds()) * 1000)

    def is_idle(self, view: View, now: float) -> bool:
        """Whether a thread is to be removed."""
        return self.idle is not None and view.changed < (now - self.idle.total_seconds()) * 1000


class Horizon:
    """What of one view of a thread has not expired.

    Args:
        process: The process.
        thread: The thread.
        view: The view.
        retention: The retention to read with.
        now: The time, in seconds since the epoch.
    """

    def __init__(self, process: Process, thread: Thread, view: View, retention: Retention, now: float):
        self._process = process
        self._thread = thread
        self._view = view
        self._retention = retention
        self._oldest = retention.oldest(now)
        self.idle = retention.is_idle(view, now)
        self._spaces: dict[str, tuple[str, str] | None] = {}

    def shows(self, checkpoint: Checkpoint) -> Steps[bool]:
        """Whether a checkpoint is visible."""
        if self.idle or checkpoint.flags & HIDDEN:
            return False
        bounds = yield from self._bounds(checkpoint.namespace)
        if bounds is None:
            return False
        head, lowest = bounds
        return checkpoint.id >= head or (checkpoint.id >= lowest and checkpoint.time >= self._oldest)

    def visible(self, items: Sequence[Item]) -> Steps[list[Item]]:
        """The items that are visible."""
        shown: list[Item] = []
        for item in items:
            shown += [item] if (yield from self.shows(item.checkpoint)) else []
        return shown

    def _bounds(self, namespace: str) -> Steps[tuple[str, str] | None]:
        """Of a namespace, the head and the lowest id that the count allows; `None` where it has come to its end."""
        if namespace not in self._spaces:
            self._spaces[namespace] = yield from self._find_bounds(namespace)
        return self._spaces[namespace]

    def _find_bounds(self, namespace: str) -> Steps[tuple[str, str] | None]:
        count = self._retention.max_checkpoints
        if count is None:
            head = yield from latest(self._process, self._thread, self._view, namespace)
            found = [head] if head is not None else []
        else:
            found = yield from Scan(self._process, self._thread, self._view, namespace).next(count)
        if not found:
            return None
        newest = found[0].checkpoint
        if is_call(namespace) and newest.root is not None:
            root = yield from by_id(self._process, self._thread, self._view, "", newest.root)
            if root is None or not (yield from self.shows(root.checkpoint)):
                return None
        return newest.id, (found[-1].checkpoint.id if count is not None and len(found) == count else "")


class Expire:
    """The keep-rule of expiry.

    Args:
        retention: The retention to apply.
        now: The time, in seconds since the epoch.
    """

    def __init__(self, retention: Retention, now: float):
        self._retention = retention
        self._oldest = retention.oldest(now)
        self._roots: set[str] = set()

    def __call__(self, namespace: str, nodes: Nodes) -> Iterable[str]:
        visible = sorted((id_ for id_, node in nodes.items() if not node.hidden), reverse=True)
        if not visible:
            return []
        root = nodes[visible[0]].root
        if is_call(namespace) and root is not None and root not in self._roots:
            return []
        kept = visible[: self._retention.max_checkpoints]
        live = [id_ for id_ in kept if id_ == visible[0] or nodes[id_].time >= self._oldest]
        if namespace == "":
            self._roots.update(live)
        return live
