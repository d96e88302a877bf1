"""What a keep-rule keeps of the records of a namespace.

Rules of this module:

- A keep-rule and `lineage` know checkpoints; here these are made from stored records, and what they choose is said of
  records again: what stays, and what of it a later record must not build on any more.
- A blob stays if a checkpoint that stays has that version, or a patch that stays is applied to it.
- Only indexes are read. Memory grows with the checkpoints of one namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lsm.format.records import HIDDEN, Checkpoint, Writes, version_key
from lsm.format.segment import SegmentInfo
from lsm.lineage import KeepRule, Node, needed
from lsm.merge import Rows, newest
from lsm.process import Process, Thread
from lsm.steps import Steps
from lsm.view import BlobKey, CheckpointKey


@dataclass(slots=True)
class Kept:
    """What is kept of one namespace.

    Attributes:
        live: The checkpoints that stay visible.
        needed: The ancestors that stay for their sake, with the channels they stay for.
        blobs: The blobs that stay, as (channel, version key).
        unlinked: The checkpoints that are gone or hidden.
        dropped: The blobs that are gone.
    """

    live: set[str]
    needed: dict[str, set[str]]
    blobs: set[tuple[str, str]]
    unlinked: set[CheckpointKey]
    dropped: set[BlobKey]


def survey(
    process: Process, thread: Thread, inputs: Sequence[SegmentInfo], namespace: str, rule: KeepRule
) -> Steps[Kept]:
    """Let a keep-rule choose among the checkpoints of a namespace.

    Args:
        process: The process.
        thread: The thread.
        inputs: The segments that have the namespace's records.
        namespace: The namespace.
        rule: The keep-rule.
    """
    bases: dict[tuple[str, str], str | None] = {}
    rows = Rows(process, thread, inputs, blobs=True, namespace=namespace)
    while (found := (yield from rows.group())) is not None:
        blob = found[1][-1]
        if not blob.empty:
            bases[found[0][1:]] = None if blob.extends is None else version_key(blob.extends)  # type: ignore[index]
    nodes: dict[str, Node] = {}
    rows = Rows(process, thread, inputs, blobs=False, namespace=namespace)
    while (found := (yield from rows.group())) is not None:
        checkpoint = newest(found[1])
        if checkpoint is not None:
            written = {channel for each in found[1] if isinstance(each, Writes) for _, _, channel in each.runs}
            nodes[checkpoint.id] = _node(checkpoint, frozenset(written), bases)
    live = set(rule(namespace, nodes))
    ancestors = needed(nodes, live)
    wanted = [(channel, version_key(version)) for id_ in live for channel, version in nodes[id_].versions.items()]
    for id_, channels in ancestors.items():
        wanted += [(channel, version_key(nodes[id_].versions[channel])) for channel in channels & nodes[id_].stored]
    blobs: set[tuple[str, str]] = set()
    for key in wanted:
        at: tuple[str, str] | None = key
        while at is not None and at not in blobs and at in bases:
            blobs.add(at)
            base = bases[at]
            at = None if base is None else (at[0], base)
    unlinked = {(namespace, id_) for id_ in nodes if id_ not in live}
    dropped = {(namespace, *key) for key in bases if key not in blobs}
    return Kept(live, ancestors, blobs, unlinked, dropped)


def _node(checkpoint: Checkpoint, written: frozenset[str], bases: dict[tuple[str, str], str | None]) -> Node:
    stored = {channel for channel, version in checkpoint.versions.items() if (channel, version_key(version)) in bases}
    return Node(
        checkpoint.parent,
        checkpoint.root,
        checkpoint.time,
        checkpoint.versions,
        frozenset(stored),
        written,
        None if checkpoint.deltas is None else frozenset(checkpoint.deltas),
        bool(checkpoint.flags & HIDDEN),
    )
