"""Where a value is that has not changed for long: checkpoints hand it on, and a rewrite that moves it tells them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from lsm.compact import all_logs, drained
from lsm.process import refresh
from lsm.rewrite import Plan, Rewritten, rewrite
from lsm.storage import open_storage
from lsm.swap import swap
from lsm.view import View
from tests.support.checkpoints import at
from tests.support.counting import CountingRuntime, CountingStorage
from tests.support.histories import Branch

STATE = {"count": 0, "still": "what never changes", "empty": None}


class History:
    """A thread with a channel that changes in each step, and one that does not."""

    def __init__(self) -> None:
        self.url = f"memory://{uuid.uuid4().hex}"
        self.saver = self.open()
        self.branch = Branch(self.saver, "t")
        self.branch.put(STATE)

    def open(self) -> LSMSaver:
        """A saver that knows nothing yet; counting starts now."""
        self.storage = CountingStorage(open_storage(self.url))
        saver = LSMSaver.from_storage(self.storage, compaction="off")
        saver._runtime = CountingRuntime(self.storage)
        return saver

    def run(self, steps: Any) -> Any:
        return self.saver._runtime.run(steps)

    def step(self) -> None:
        self.branch.write({"count": self.branch.step})
        self.branch.put({"count": self.branch.step})

    def flush(self) -> None:
        self.run(self.saver._engine.flush("t"))

    def view(self) -> View:
        found: View = self.run(refresh(self.saver._engine.process, self.saver._engine.process.thread("t")))
        return found

    def rewrite(self, only_new: bool = False) -> Rewritten:
        """Rewrite all segments, or all but the oldest."""
        process, view = self.saver._engine.process, self.view()
        inputs = all_logs(view)[1:] if only_new else all_logs(view)
        plan = Plan(view, inputs, drained(view, inputs, process.limits), "t", view.incarnation, view.header.fence)
        made: Rewritten = self.run(rewrite(process, process.thread("t"), plan))
        return made

    def swap(self, made: Rewritten) -> None:
        self.run(swap(self.saver._engine.process, self.saver._engine.process.thread("t"), made))


@pytest.fixture
def history() -> Iterator[History]:
    made = History()
    yield made
    made.saver.close()


@pytest.mark.parametrize("steps_after", [0, 1])
def test_the_head_knows_what_was_moved_while_it_was_flushed(history: History, steps_after: int) -> None:
    history.step()
    history.flush()
    made = history.rewrite()
    history.step()
    history.flush()  # this head says where the value was
    history.swap(made)
    for _ in range(steps_after):
        history.step()
    view = history.view()
    head = view.head_at_hand("")
    assert head is not None
    assert {channel for channel in head.versions if view.pieces(head, channel) is None} == set()

    reader = history.open()
    found = reader.get_tuple(at("t"))
    assert history.storage.rounds == 1  # a small state is in the manifest
    assert found is not None
    assert found.checkpoint["channel_values"] == {**STATE, "count": history.branch.values["count"]}


def test_a_later_rewrite_settles_what_an_earlier_one_moved(history: History) -> None:
    """Of the checkpoints that were flushed meanwhile, all but the head say where the value was."""
    history.step()
    history.flush()
    made = history.rewrite()
    history.step()
    behind = history.branch.id
    history.step()
    history.flush()
    history.swap(made)
    history.swap(history.rewrite(only_new=True))

    reader = history.open()
    found = reader.get_tuple(at("t", behind))
    assert found is not None
    assert found.checkpoint["channel_values"]["still"] == STATE["still"]
    assert history.storage.rounds == 3
