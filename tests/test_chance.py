"""Fast tests depend on no luck: what they draw is the same in every run."""

from __future__ import annotations

import os
import random
import uuid
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint

from langgraph.checkpoint.lsm import LSMSaver
from tests.support.chance import fixed, fixed_ids
from tests.support.histories import KINDS


def drawn() -> list[Any]:
    return [random.random(), os.urandom(8), uuid.uuid4(), empty_checkpoint()["id"]]


def test_what_is_drawn_is_the_same_in_every_run() -> None:
    with fixed("a test"), fixed_ids():
        first = drawn()
    with fixed("a test"), fixed_ids():
        assert drawn() == first
    with fixed("another test"), fixed_ids():
        assert not {*drawn()} & {*first}


def test_ids_of_nested_blocks_go_on_behind_them() -> None:
    with fixed_ids():
        inner = [empty_checkpoint()["id"] for _ in range(3)]
    assert empty_checkpoint()["id"] > max(inner)


@pytest.mark.parametrize("kind", ["subgraphs", "forks"])
def test_a_history_is_the_same_in_every_run(tmp_path: Path, kind: str) -> None:
    def names(folder: Path) -> list[str]:
        """Of all checkpoints, versions and writers: what searches and filters are made of."""
        with fixed(kind), fixed_ids(), LSMSaver.from_conn_string(folder.as_uri(), compaction="off") as saver:
            deque(islice(KINDS[kind](saver, "thread"), 40), maxlen=0)
            thread = saver._engine.process.thread("thread")
            listed = saver.list({"configurable": {"thread_id": "thread"}})
            return [str((each.config, each.checkpoint["channel_versions"])) for each in listed] + [thread.writer.hex()]

    assert names(tmp_path / "one") == names(tmp_path / "other")
