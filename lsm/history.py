"""What one channel's ancestors contributed: the chain that a `DeltaChannel` is rebuilt from.

Rules of this module:

- The chain is walked on indexes alone, parent by parent, over hidden checkpoints, too. Parents decide, not the order of
  ids. A loop of parents ends the walk.
- The walk of a channel ends with the nearest ancestor that has a value stored for it (the *seed*), whose own writes
  belong to the chain.
- The data of the whole chain is read in one round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lsm.fetch import load_runs
from lsm.find import Gathering, Item, by_id, latest
from lsm.format.records import Checkpoint, Place, Typed, version_key
from lsm.format.segment import Run, SegmentInfo, above
from lsm.process import Process, Thread
from lsm.read import PendingWrite, settled
from lsm.steps import Steps
from lsm.values import Materials
from lsm.view import BlobKey, View


@dataclass(slots=True)
class ChannelHistory:
    """Of one channel: the writes, oldest first, and the stored value that they start from."""

    writes: list[PendingWrite] = field(default_factory=list)
    seed: Typed | None = None


@dataclass(slots=True)
class _Walk:
    """The ancestors that contribute to one channel, newest first, and the one with the seed."""

    chain: list[Item] = field(default_factory=list)
    seed: Checkpoint | None = None


def history(
    process: Process, thread: Thread, view: View, namespace: str, id_: str | None, channels: Sequence[str]
) -> Steps[dict[str, ChannelHistory]]:
    """Walk the ancestors of a checkpoint for some channels.

    Args:
        process: The process.
        thread: The thread.
        view: The view to read.
        namespace: The checkpoint's namespace.
        id_: The checkpoint, or `None` for the latest.
        channels: The channels.
    """
    if id_ is None:
        target = yield from latest(process, thread, view, namespace)
    else:
        target = yield from by_id(process, thread, view, namespace, id_)
    if target is None:
        return {channel: ChannelHistory() for channel in channels}
    ancestors = _Ancestors(process, thread, view, namespace)
    materials = Materials(process, thread, view)
    while True:
        walks = yield from walk(ancestors, materials, target.checkpoint, channels)
        places: list[Place] = []
        seeds: list[BlobKey] = []
        for channel, found in walks.items():
            calls = [call for item in found.chain for call in item.writes]
            wanted = [call.value for call in calls if any(name == channel for _, _, name in call.runs)]
            places += [value for value in wanted if isinstance(value, Place)]
            if found.seed is not None:
                seeds.append((namespace, channel, version_key(found.seed.versions[channel])))
        places += [place for key in seeds for place in materials.places(key)]
        materials.admit(places)
        yield from materials.collect(places)
        if all(materials.pieces[key] for key in seeds):
            break  # else a hint was wrong: that seed has been replaced by no value, and the walk goes on from there
    answer = {}
    for channel, found in walks.items():
        entry = ChannelHistory()
        for item in reversed(found.chain):
            entry.writes += settled(materials, item.writes, (channel,))
        if found.seed is not None:
            entry.seed = materials.channel((namespace, channel, version_key(found.seed.versions[channel])))
        answer[channel] = entry
    return answer


def walk(
    ancestors: _Ancestors, materials: Materials, start: Checkpoint, channels: Sequence[str]
) -> Steps[dict[str, _Walk]]:
    """The ancestors of a checkpoint, as far as each channel needs them."""
    walks = {channel: _Walk() for channel in channels}
    remaining, seen = set(channels), {start.id}
    at = start
    while remaining and at.parent is not None and at.parent not in seen:
        item = yield from ancestors.get(at.parent)
        if item is None:
            break
        at = item.checkpoint
        seen.add(at.id)
        stored = yield from _stored(materials, at, remaining)
        for channel in remaining:
            walks[channel].chain.append(item)
            if channel in stored:
                walks[channel].seed = at
        remaining -= stored
    return walks


def _stored(materials: Materials, checkpoint: Checkpoint, channels: set[str]) -> Steps[set[str]]:
    """Which of the channels a checkpoint has values for."""
    known = [channel for channel in channels if channel in checkpoint.versions]
    yield from materials.settle([(checkpoint, known)])
    namespace, versions = checkpoint.namespace, checkpoint.versions
    return {channel for channel in known if materials.pieces[namespace, channel, version_key(versions[channel])]}


class _Ancestors:
    """The checkpoints of a namespace, loaded as the walk comes by: first around it, then all the rest at once."""

    def __init__(self, process: Process, thread: Thread, view: View, namespace: str):
        self._process = process
        self._thread = thread
        self._view = view
        self._namespace = namespace
        self._gathering = Gathering(thread, view)
        self._gathering.add_at_hand(namespace)
        low, high = (namespace,), above(namespace)
        self._unread = [
            (info, run) for info in view.holders(namespace) for run in info.checkpoint_index.covering(low, high)
        ]
        self._far = False

    def get(self, id_: str) -> Steps[Item | None]:
        """A checkpoint, be it hidden, with its writes."""
        key = self._namespace, id_
        if self._unread and not self._view.is_complete(*key):
            near = [each for each in self._unread if each[1] in each[0].checkpoint_index.covering(key, key)]
            if near:
                wanted = self._unread if self._far else near
                self._far = True
                self._unread = [each for each in self._unread if each not in wanted]
                yield from self._load(wanted)
        return self._gathering.walked(key)

    def _load(self, wanted: list[tuple[SegmentInfo, Run]]) -> Steps[None]:
        loaded = yield from load_runs(self._process, self._thread, wanted)
        for (info, _), pages in zip(wanted, loaded, strict=True):
            for page in pages:
                rows = [row for row, group in enumerate(page.groups) if group[0] == self._namespace]
                self._gathering.add_page(info, page, rows)
