"""Checkpoints to store, for tests that call a saver directly.

Rules of this module:

- Ids come from LangGraph's own clock (`uuid6`), so that a later checkpoint has the greater id.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver, Checkpoint, empty_checkpoint


def at(thread_id: str, checkpoint_id: str | None = None, namespace: str = "", **configurable: Any) -> Any:
    """The config that addresses a thread, or one checkpoint of it."""
    found = {"thread_id": thread_id, "checkpoint_ns": namespace, **configurable}
    if checkpoint_id is not None:
        found["checkpoint_id"] = checkpoint_id
    return {"configurable": found}


def checkpoint(values: dict[str, Any] | None = None, *, version: str | int | float = 1) -> Checkpoint:
    """A new checkpoint that holds these channels, all at one version."""
    made = empty_checkpoint()
    made["channel_values"] = dict(values or {})
    made["channel_versions"] = dict.fromkeys(made["channel_values"], version)
    return made


def put(saver: BaseCheckpointSaver[Any], config: Any, values: dict[str, Any] | None = None, **metadata: Any) -> Any:
    """Store a new checkpoint; its parent is the one that `config` addresses. Returns the config of the new one."""
    parent = saver.get_tuple(config) if config["configurable"].get("checkpoint_id") else None
    known = dict(parent.checkpoint["channel_versions"]) if parent is not None else {}
    new = {channel: saver.get_next_version(known.get(channel), None) for channel in values or {}}
    made = checkpoint(values)
    made["channel_versions"] = {**known, **new}
    return saver.put(config, made, {"source": "loop", "step": 0, **metadata}, new)  # type: ignore[typeddict-item]


def chain(
    saver: BaseCheckpointSaver[Any], thread_id: str, values: Iterable[dict[str, Any]], namespace: str = ""
) -> list[Any]:
    """Store a chain of checkpoints; `step` in the metadata counts them. Returns their configs, oldest first."""
    configs: list[Any] = []
    for step, held in enumerate(values):
        parent = configs[-1] if configs else at(thread_id, namespace=namespace)
        configs.append(put(saver, parent, held, step=step))
    return configs


def ids(configs: Iterable[Any]) -> list[str]:
    """The checkpoint ids of configs."""
    return [config["configurable"]["checkpoint_id"] for config in configs]


def listed(saver: BaseCheckpointSaver[Any], *args: Any, **kwargs: Any) -> list[str]:
    """The checkpoint ids that `list` gives, in its order."""
    return [found.checkpoint["id"] for found in saver.list(*args, **kwargs)]
