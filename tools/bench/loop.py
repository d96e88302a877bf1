"""LangGraph's loop without LangGraph: the calls that it makes on a saver, with arguments like its own.

Rules of this module:

- It makes arguments; it takes no time. What is measured is the saver's share only.
- Every checkpoint carries all channels, and says in `new_versions` which of them changed, as the loop does.
- A superstep is `put_writes` of its task on the checkpoint before it, then `put` of the checkpoint after it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.base.id import uuid6

TASK_PATH = "~__pregel_pull, agent"
BRANCH = "branch:to:agent"


@dataclass(frozen=True)
class Superstep:
    """The arguments of one superstep's two calls."""

    config: dict[str, Any]
    writes: list[tuple[str, Any]]
    task_id: str
    checkpoint: Any
    metadata: Any
    new_versions: dict[str, Any]

    def put_writes(self, saver: BaseCheckpointSaver[Any]) -> None:
        """Store what the task returned."""
        saver.put_writes(self.config, self.writes, self.task_id, TASK_PATH)

    def put(self, saver: BaseCheckpointSaver[Any]) -> None:
        """Store the checkpoint that the superstep ends with."""
        saver.put(self.config, self.checkpoint, self.metadata, self.new_versions)

    def save(self, saver: BaseCheckpointSaver[Any]) -> None:
        """Both calls."""
        self.put_writes(saver)
        self.put(saver)

    async def asave(self, saver: BaseCheckpointSaver[Any]) -> None:
        """Both calls, of the async face."""
        await saver.aput_writes(self.config, self.writes, self.task_id, TASK_PATH)
        await saver.aput(self.config, self.checkpoint, self.metadata, self.new_versions)


@dataclass
class Thread:
    """One thread of conversation, as the loop sees it between two supersteps.

    Args:
        thread_id: Its id.
        next_version: The saver's `get_next_version`.
    """

    thread_id: str
    next_version: Callable[[Any, None], Any]
    ids: list[str] = field(default_factory=list)
    _values: dict[str, Any] = field(default_factory=dict)
    _versions: dict[str, Any] = field(default_factory=dict)
    _seen: dict[str, Any] = field(default_factory=dict)

    def config(self, checkpoint_id: str | None = None) -> dict[str, Any]:
        """The config that names this thread, or one of its checkpoints."""
        configurable = {"thread_id": self.thread_id, "checkpoint_ns": ""}
        if checkpoint_id is not None:
            configurable["checkpoint_id"] = checkpoint_id
        return {"configurable": configurable}

    def begin(self, saver: BaseCheckpointSaver[Any], values: Mapping[str, Any], **metadata: Any) -> None:
        """Store the first checkpoint: the input, with these values."""
        step = self._next({}, values, {"source": "input", **metadata}, branch=False)
        step.put(saver)

    def superstep(
        self, writes: Mapping[str, Any], values: Mapping[str, Any], bumped: tuple[str, ...] = (), **metadata: Any
    ) -> Superstep:
        """The next superstep.

        Args:
            writes: What the task returned, by channel.
            values: The channels that changed, with their whole new values.
            bumped: Channels that changed without a value in the checkpoint, as a `DeltaChannel` does.
            metadata: More keys for the checkpoint's metadata.
        """
        return self._next(writes, values, {"source": "loop", **metadata}, bumped=bumped)

    def _next(
        self,
        writes: Mapping[str, Any],
        values: Mapping[str, Any],
        metadata: dict[str, Any],
        *,
        branch: bool = True,
        bumped: tuple[str, ...] = (),
    ) -> Superstep:
        config = self.config(self.ids[-1] if self.ids else None)
        number = len(self.ids) - 1
        changed = [*values, *bumped, *([BRANCH] if branch else [])]
        version = self.next_version(max(self._versions.values(), default=None), None)
        if branch:
            self._values[BRANCH] = None
            self._seen["agent"] = {BRANCH: version}
        self._values.update(values)
        self._versions.update(dict.fromkeys(changed, version))
        checkpoint_id = str(uuid6(clock_seq=number))
        self.ids.append(checkpoint_id)
        return Superstep(
            config=config,
            writes=[*writes.items(), (BRANCH, None)],
            task_id=str(uuid.uuid5(uuid.NAMESPACE_OID, checkpoint_id)),
            checkpoint={
                "v": 4,
                "id": checkpoint_id,
                "ts": datetime.now(UTC).isoformat(),
                "channel_values": dict(self._values),
                "channel_versions": dict(self._versions),
                "versions_seen": {"__input__": {}, **self._seen},
                "updated_channels": sorted(changed),
            },
            metadata={**metadata, "step": number, "parents": {}},
            new_versions=dict.fromkeys(changed, version),
        )
