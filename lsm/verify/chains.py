"""Checking a namespace as a whole: which checkpoint is its head, and whether every chain is there.

Rules of this module:

- Pure: it is handed the checkpoints, and remembers of each what a walk needs. A namespace that has ended is checked and
  forgotten.
- The checkpoints in frames come first, of all namespaces; then those in segments, namespace by namespace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lsm.format.records import HIDDEN, ORPHAN
from lsm.verify.report import Report


class Node(NamedTuple):
    """A checkpoint, as far as chains are concerned."""

    seq: int
    parent: str | None
    flags: int
    deltas: tuple[str, ...]
    stored: frozenset[str]


class Chains:
    """The checkpoints of one namespace after the other.

    Args:
        key: The key of the thread's manifest, for problems.
        heads: The heads that the header names, by namespace.
        report: Takes down what is wrong.
    """

    def __init__(self, key: str, heads: Mapping[str, str], report: Report):
        self._key = key
        self._heads = heads
        self._report = report
        self._nodes: dict[str, Node] = {}
        self._at_hand: dict[str, dict[str, Node]] = {}

    def add_at_hand(self, namespace: str, nodes: Mapping[str, Node]) -> None:
        """Take in checkpoints of any namespace that are in frames only, by id."""
        self._at_hand.setdefault(namespace, {}).update(nodes)

    def add(self, nodes: Mapping[str, Node]) -> None:
        """Take in checkpoints, by id, of the namespace whose records are being read."""
        self._nodes.update(nodes)

    def end(self, namespace: str) -> None:
        """Check the namespace whose records were read."""
        if self._nodes:
            self._check(namespace)

    def finish(self) -> None:
        """Check the namespaces that no segment has checkpoints of."""
        for namespace in [*self._at_hand]:
            self._check(namespace)

    def _check(self, namespace: str) -> None:
        nodes, self._nodes = self._nodes, {}
        head = self._heads.get(namespace)
        if head is not None:
            highest = max((id_ for id_, node in nodes.items() if not node.flags & HIDDEN), default=None)
            self._report.expect(
                highest == head,
                f"{self._key}: the header says that the head of namespace {namespace!r} is {head!r}, but it is "
                f"{highest!r}",
            )
        nodes.update(self._at_hand.pop(namespace, {}))
        whole: set[tuple[str, str]] = set()
        for id_, node in nodes.items():
            if not node.flags & HIDDEN:
                for channel in set(node.deltas) - node.stored:
                    self._check_chain(namespace, nodes, id_, channel, whole)

    def _check_chain(
        self, namespace: str, nodes: dict[str, Node], start: str, channel: str, whole: set[tuple[str, str]]
    ) -> None:
        """Walk the ancestors of a checkpoint up to a stored value, or to the first of them. A rewrite leaves out those
        before the first contribution; the child of what it left out says so by its flags."""
        at = start
        while (at, channel) not in whole:
            whole.add((at, channel))
            node = nodes[at]
            if node.parent is None or (at != start and channel in node.stored):
                return
            if node.parent not in nodes:
                self._report.expect(
                    bool(node.flags & (HIDDEN | ORPHAN)),
                    f"{self._key}: channel {channel!r} of namespace {namespace!r} is rebuilt from ancestors, of "
                    f"which {node.parent!r}, the parent of {at!r}, is missing",
                )
                return
            at = node.parent
