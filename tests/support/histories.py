"""Long histories, made the way LangGraph makes them: the writes of a task, then the checkpoint that they lead to.

Rules of this module:

- Versions come from the saver, unless a history is about others. Ids come from LangGraph's clock.
- The same kind and length always give the same history, but for ids and random parts of versions.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.base.id import uuid6

from tests.support.checkpoints import at

WORDS = "a checkpoint saver that needs nothing but a directory or a bucket and stays as fast as on day one".split()


def text(words: int, seed: int) -> str:
    """Some prose."""
    source = random.Random(seed)
    return " ".join(f"{source.choice(WORDS)}{source.randrange(1000)}" for _ in range(words))


class Branch:
    """A chain of checkpoints in one namespace, and the state at its end.

    Args:
        saver: Where it is stored.
        thread_id: The thread.
        namespace: The namespace.
        next_version: Makes versions; the saver's own `get_next_version` if left out.
        parents: Put into the metadata, as LangGraph does in subgraphs.

    Attributes:
        config: Addresses the last checkpoint.
        values: Its channels.
        versions: Their versions.
        step: How many checkpoints there are.
    """

    def __init__(
        self,
        saver: BaseCheckpointSaver[Any],
        thread_id: str,
        namespace: str = "",
        next_version: Callable[[Any], Any] | None = None,
        parents: dict[str, str] | None = None,
    ) -> None:
        self.saver = saver
        self.config = at(thread_id, namespace=namespace)
        self.values: dict[str, Any] = {}
        self.versions: dict[str, Any] = {}
        self.step = 0
        self._next_version = next_version or (lambda current: saver.get_next_version(current, None))
        self._parents = parents or {}

    @property
    def id(self) -> str:
        """The id of the last checkpoint."""
        return str(self.config["configurable"]["checkpoint_id"])

    def forked(self) -> Branch:
        """Another branch that goes on from the same checkpoint."""
        other = Branch(self.saver, "", "", self._next_version, self._parents)
        other.config, other.step = self.config, self.step
        other.values, other.versions = dict(self.values), dict(self.versions)
        return other

    def write(self, writes: dict[str, Any], *, task: int = 0, path: str = "~__pregel_pull, node") -> None:
        """One task of the next step is done."""
        task_id = str(uuid.UUID(int=(self.step << 16) + task))
        self.saver.put_writes(self.config, list(writes.items()), task_id, path)

    def put(self, changed: dict[str, Any], *, unstored: tuple[str, ...] = (), **metadata: Any) -> None:
        """The next checkpoint. The channels in `unstored` have changed, too, and are rebuilt from their writes."""
        new = {channel: self._next_version(self.versions.get(channel)) for channel in (*changed, *unstored)}
        self.values = {**self.values, **changed}
        for channel in unstored:
            self.values.pop(channel, None)
        self.versions = {**self.versions, **new}
        id_ = str(uuid6(clock_seq=self.step))
        seen = {"__input__": {}, "node": {name: self.versions[name] for name in sorted(self.versions)[:1]}}
        checkpoint: Any = {
            "v": 4,
            "id": id_,
            "ts": "2026-01-01T00:00:00.000000+00:00",
            "channel_values": self.values,
            "channel_versions": self.versions,
            "versions_seen": seen,
            "updated_channels": sorted(new),
        }
        about: Any = {"source": "loop", "step": self.step, "parents": self._parents, **metadata}
        self.config = self.saver.put(self.config, checkpoint, about, new)
        self.step += 1

    def superstep(self, changed: dict[str, Any], **metadata: Any) -> None:
        """One task writes, and the checkpoint follows."""
        if self.step:
            self.write(changed)
        self.put(changed, **metadata)


def small(saver: BaseCheckpointSaver[Any], thread_id: str) -> Iterator[Branch]:
    """A counter, a note, and what never changes."""
    yield from _counted(Branch(saver, thread_id))


def chat(saver: BaseCheckpointSaver[Any], thread_id: str) -> Iterator[Branch]:
    """A list of messages that gains one of 60 words with every step."""
    branch = Branch(saver, thread_id)
    while True:
        messages = [*branch.values.get("messages", ()), ("ai", text(60, branch.step))]
        if branch.step:
            branch.write({"messages": messages[-1]})
        branch.put({"messages": messages}, label=f"label-{branch.step}")
        yield branch


def integers(saver: BaseCheckpointSaver[Any], thread_id: str) -> Iterator[Branch]:
    """Versions that are plain numbers."""
    yield from _counted(Branch(saver, thread_id, next_version=lambda current: (current or 0) + 1))


def strings(saver: BaseCheckpointSaver[Any], thread_id: str) -> Iterator[Branch]:
    """Versions made by hand, none the successor of the one before."""
    numbers = iter(range(1, 1 << 60))
    yield from _counted(Branch(saver, thread_id, next_version=lambda _: f"{next(numbers):032}.{0.25:016f}"))


def _counted(branch: Branch) -> Iterator[Branch]:
    while True:
        changed = {"count": branch.step, "note": f"step {branch.step}"}
        branch.superstep(changed if branch.step else {**changed, "still": "here"}, label=f"label-{branch.step}")
        yield branch


def subgraphs(saver: BaseCheckpointSaver[Any], thread_id: str) -> Iterator[Branch]:
    """Each step of the root calls a subgraph, which has a namespace of its own and takes one step there."""
    root = Branch(saver, thread_id)
    while True:
        if root.step:
            namespace = f"node:{uuid.UUID(int=root.step)}"
            inner = Branch(saver, thread_id, namespace, parents={"": root.id})
            inner.superstep({"count": 0})
        root.superstep({"count": root.step, "note": f"step {root.step}"}, label=f"label-{root.step}")
        yield root


def forks(saver: BaseCheckpointSaver[Any], thread_id: str) -> Iterator[Branch]:
    """Every tenth step goes on from a checkpoint that is up to 20 steps old."""
    source = random.Random(1)
    branch, old = Branch(saver, thread_id), []
    for number in itertools.count():
        if number and number % 10 == 0:
            branch = source.choice(old).forked()
        branch.superstep({"count": number, "note": f"step {number}"}, label=f"label-{number}")
        old = [*old[-20:], branch.forked()]
        yield branch


def deltas(saver: BaseCheckpointSaver[Any], thread_id: str) -> Iterator[Branch]:
    """A channel whose value is stored once, at the start; all that follows are writes to it, as a `DeltaChannel` has
    it."""
    branch = Branch(saver, thread_id)
    branch.put({"log": [], "count": 0})
    yield branch
    while True:
        branch.write({"log": [f"line {branch.step}"]})
        counters = {"log": (branch.step, branch.step)}
        branch.put({"count": branch.step}, unstored=("log",), counters_since_delta_snapshot=counters)
        yield branch


KINDS: dict[str, Callable[[BaseCheckpointSaver[Any], str], Iterator[Branch]]] = {
    "small": small,
    "chat": chat,
    "integers": integers,
    "strings": strings,
    "subgraphs": subgraphs,
    "forks": forks,
    "deltas": deltas,
}
