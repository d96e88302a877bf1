"""What survives: keep-rules, and what survivors need of their ancestors.

Rules of this module:

- Pure. A keep-rule says which checkpoints of a namespace are *live*; `lineage` adds what these cannot be read without.
- For every live checkpoint and every channel that is rebuilt from writes and that it does not store, the ancestors'
  writes on that channel are needed, back to the nearest ancestor with a stored value, that one's own writes and value
  included, and the checkpoints that link them. Parents decide, not the order of ids.
- An ancestor that is only needed for this is *hidden*, and keeps only those channels. Nothing else is kept.
- A checkpoint's metadata names its delta channels (LangGraph's `counters_since_delta_snapshot`). Where it does not, a
  channel that ancestors wrote and that the checkpoint has no version for counts as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from lsm.format.records import Version


@dataclass(slots=True)
class Node:
    """A checkpoint, as far as lineage is concerned.

    Attributes:
        parent: Its parent's id.
        root: The checkpoint of the root namespace that it belongs to.
        time: When it was put, in milliseconds since the epoch.
        versions: The version of every channel.
        stored: The channels that it stores a value for.
        written: The channels that its writes are on.
        deltas: The channels that are rebuilt from writes, or `None` where nobody said.
        hidden: Whether an earlier rewrite has hidden it.
    """

    parent: str | None
    root: str | None = None
    time: int = 0
    versions: Mapping[str, Version] = field(default_factory=dict)
    stored: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    deltas: frozenset[str] | None = None
    hidden: bool = False


Nodes = Mapping[str, Node]
KeepRule = Callable[[str, Nodes], Iterable[str]]
"""Given a namespace and its checkpoints by id, those that stay live. Hidden ones are not among those to choose from.
The root namespace comes first."""


def needed(nodes: Nodes, live: Iterable[str]) -> dict[str, set[str]]:
    """The ancestors that live checkpoints need, with the channels that they are needed for.

    Args:
        nodes: The checkpoints of one namespace.
        live: The live ones.

    Returns:
        For every ancestor that must stay (be it live itself), the channels whose writes must stay, and whose stored
        value must, where it has one.

    Example:
        >>> nodes = {
        ...     "1": Node(None, stored=frozenset({"log"}), written=frozenset({"log"})),
        ...     "2": Node("1", written=frozenset({"log", "other"})),
        ...     "3": Node("2", deltas=frozenset({"log"})),
        ... }
        >>> needed(nodes, ["3"])
        {'2': {'log'}, '1': {'log'}}
    """
    kept: dict[str, set[str]] = {}
    above: dict[str, frozenset[str]] = {}
    looping = _looping(nodes)
    for id_ in live:
        start = nodes[id_]
        if start.deltas is not None:
            wanted = start.deltas - start.stored
        else:
            wanted = _above(nodes, id_, above, looping) - start.versions.keys()
        path: list[tuple[str, frozenset[str]]] = []
        shared = False
        for ancestor in _ancestors(nodes, id_):
            if not wanted or shared:
                break
            path.append((ancestor, wanted))
            # Another live checkpoint may need the same from here on.
            shared = id_ not in looping and wanted <= kept.get(ancestor, set())
            wanted = wanted - nodes[ancestor].stored
        for ancestor, channels in path if shared else _trimmed(nodes, path):
            kept.setdefault(ancestor, set()).update(channels)
    return kept


def _ancestors(nodes: Nodes, id_: str) -> Iterator[str]:
    """The ancestors of a checkpoint, nearest first. A loop of parents ends them."""
    seen = {id_}
    parent = nodes[id_].parent
    while parent is not None and parent in nodes and parent not in seen:
        yield parent
        seen.add(parent)
        parent = nodes[parent].parent


def _looping(nodes: Nodes) -> set[str]:
    """The checkpoints whose parents lead into a loop. Where their walks end depends on where they begin, so that one
    tells nothing about another."""
    looping: set[str] = set()
    ending: set[str] = set()
    for id_ in nodes:
        path: dict[str, None] = {}
        at: str | None = id_
        while at is not None and at in nodes and not (at in looping or at in ending or at in path):
            path[at] = None
            at = nodes[at].parent
        (looping if at in looping or at in path else ending).update(path)
    return looping


def _traces(node: Node) -> frozenset[str]:
    """The channels by which a checkpoint shows that they are rebuilt from writes. A hidden one has no others: its
    writes from before a stored value are gone."""
    return node.written | node.stored if node.hidden else node.written


def _above(nodes: Nodes, id_: str, known: dict[str, frozenset[str]], looping: set[str]) -> frozenset[str]:
    """The channels that have traces among a checkpoint's ancestors. What is found is added to `known`."""
    if id_ in looping:
        return frozenset[str]().union(*(_traces(nodes[ancestor]) for ancestor in _ancestors(nodes, id_)))
    path = [id_]
    while (parent := nodes[path[-1]].parent) is not None and parent in nodes and parent not in known:
        path.append(parent)
    for at in reversed(path):
        parent = nodes[at].parent
        if parent is not None and parent in nodes:
            known[at] = known[parent] | _traces(nodes[parent])
        else:
            known[at] = frozenset()
    return known[id_]


def _trimmed(nodes: Nodes, path: list[tuple[str, frozenset[str]]]) -> list[tuple[str, frozenset[str]]]:
    """The path without what lies before the first contribution to each channel."""
    contributed: set[str] = set()
    trimmed = []
    for id_, channels in reversed(path):
        contributed |= channels & (nodes[id_].written | nodes[id_].stored)
        if channels & contributed:
            trimmed.append((id_, channels & contributed))
    return trimmed[::-1]


# Keep-rules.


def keep_all(namespace: str, nodes: Nodes) -> Iterable[str]:
    """The rule of compaction."""
    return [id_ for id_, node in nodes.items() if not node.hidden]


def is_call(namespace: str) -> bool:
    """Whether a namespace is one call's of a subgraph, by the form of its last part (`name:task id`).

    Example:
        >>> is_call("agent:1|tools:2"), is_call("agent:1|memory"), is_call("")
        (True, False, False)
    """
    return ":" in namespace.rsplit("|", 1)[-1]


class KeepLatest:
    """The rule of `prune("keep_latest")`: the latest checkpoint of every namespace. A subgraph call's namespace (with
    `:` in its last part) goes with the root checkpoint that the call started from, where it says which."""

    def __init__(self) -> None:
        self._roots: set[str] = set()

    def __call__(self, namespace: str, nodes: Nodes) -> Iterable[str]:
        latest = max((id_ for id_, node in nodes.items() if not node.hidden), default=None)
        if latest is None:
            return []
        if namespace == "":
            self._roots.add(latest)
        elif is_call(namespace):
            root = nodes[latest].root
            if root is not None and root not in self._roots:
                return []
        return [latest]


class Without:
    """The rule of deletion: all but some checkpoints."""

    def __init__(self, doomed: Iterable[tuple[str, str]]):
        self._doomed = set(doomed)

    def __call__(self, namespace: str, nodes: Nodes) -> Iterable[str]:
        return [id_ for id_ in keep_all(namespace, nodes) if (namespace, id_) not in self._doomed]
