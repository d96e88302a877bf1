"""Writes that were not stored are not hidden by a child of their checkpoint: it is refused until the loss is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from lsm.errors import IncompleteWritesError, Refused
from lsm.steps import Append, Get
from tests.support.checkpoints import at, checkpoint, put


@pytest.fixture
def saver() -> Iterator[LSMSaver]:
    with LSMSaver.from_conn_string("memory://", compaction="off") as saver:
        yield saver


def before(saver: LSMSaver, kind: type, do: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something before every request of a kind, but not for requests that this causes itself."""
    execute, doing = saver._storage.execute, []

    def meddle(request: Any) -> Any:
        if isinstance(request, kind) and not doing:
            doing.append(request)
            try:
                do()
            finally:
                doing.clear()
        return execute(request)

    monkeypatch.setattr(saver._storage, "execute", meddle)


def store_child(saver: LSMSaver, config: Any) -> None:
    """Without reading the thread first."""
    saver.put(config, checkpoint({}), {"source": "loop", "step": 1}, {})


def lose_writes(saver: LSMSaver, config: Any, task: str = "task") -> None:
    """Writes that the store refuses."""

    def refuse() -> None:
        raise Refused("the store is read-only for a moment")

    with pytest.MonkeyPatch.context() as monkeypatch:
        before(saver, Append, refuse, monkeypatch)
        with pytest.raises(Refused):
            saver.put_writes(config, [("a", 2)], task)


def test_a_child_is_refused_until_the_thread_was_read(saver: LSMSaver) -> None:
    config = put(saver, at("thread"), {"a": 1})
    lose_writes(saver, config)
    with pytest.raises(IncompleteWritesError, match="writes of checkpoint"):
        store_child(saver, config)
    saver.get_tuple(at("thread"))
    store_child(saver, config)


def test_a_child_is_stored_once_the_same_writes_were(saver: LSMSaver) -> None:
    config = put(saver, at("thread"), {"a": 1})
    lose_writes(saver, config)
    saver.put_writes(config, [("a", 2)], "task")
    store_child(saver, config)


@pytest.mark.parametrize("task", ["task", "another"])
def test_a_read_forgives_only_what_failed_before_it_began(
    saver: LSMSaver, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = put(saver, at("thread"), {"a": 1})
    lose_writes(saver, config)
    with monkeypatch.context() as patch:
        before(saver, Get, lambda: lose_writes(saver, config, task), patch)
        saver.get_tuple(at("thread"))
    with pytest.raises(IncompleteWritesError):
        store_child(saver, config)
