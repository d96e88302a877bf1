"""What was asked of the engine, when, and what it answered.

Rules of this module:

- It knows calls and times, and nothing of what they should lead to: that is the oracle's.
- The outcome of a call is `acked`, `refused` (nothing of it may ever be seen), or `unknown`: it failed, or its process
  died, and it may have happened, or may still happen until all is quiet.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Any

Cell = tuple[Hashable, ...]
"""What has one value at a time: `("c", thread, ns, id)`, `("b", thread, ns, channel, version)` or
`("w", thread, ns, id, task, index)`."""


@dataclass(eq=False, slots=True)
class Op:
    """One call.

    Attributes:
        number: Counts calls.
        kind: The name of the engine's method.
        began: When.
        ended: When it is over for sure, whatever became of it.
        outcome: `open`, `acked`, `refused` or `unknown`.
        known: Since when it is known to have happened: acknowledged, or seen by a reader.
        cells: What it stores, for `put` and `put_writes`.
        about: Its arguments, as far as the oracle needs them.
    """

    number: int
    kind: str
    thread: str
    node: str
    life: int
    began: float
    cells: dict[Cell, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    ended: float = inf
    outcome: str = "open"
    known: float = inf
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"call {self.number} ({self.kind}, {self.outcome})"


class Ledger:
    """All calls of a run, in the order in which they began."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def begin(self, op: Op) -> Op:
        self.ops.append(op)
        return op

    def ack(self, op: Op, now: float) -> None:
        op.outcome, op.ended, op.known = "acked", now, min(op.known, now)

    def refuse(self, op: Op, now: float, error: BaseException) -> None:
        op.outcome, op.ended, op.error = "refused", now, error

    def lose(self, op: Op, error: BaseException | None) -> None:
        """Nobody knows what became of it."""
        op.outcome, op.error = "unknown", error

    def settle(self, now: float) -> None:
        """All is quiet: what has not happened by now never will."""
        for op in self.ops:
            if op.ended > now:
                op.ended = now
