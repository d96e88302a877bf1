"""A checkpoint that is put again, its parts in any number of places: every search finds what counts, and all of it.

Between the calls the thread is left alone, flushed or compacted, in all combinations. The model is `InMemorySaver`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from langgraph.checkpoint.lsm import LSMSaver
from tests.support.checkpoints import at, checkpoint
from tests.support.compare import exact

AGAIN, HEAD = "5", "9"


def put(number: int, id_: str, value: int, **metadata: Any) -> Callable[[Any], object]:
    """The call that puts a checkpoint whose channel has the version and value `number`."""
    made = checkpoint({"channel": value}, version=f"{number}")
    made["id"] = id_
    return lambda saver: saver.put(at("t"), made, metadata, {"channel": f"{number}"})


def write(task_id: str, value: int) -> Callable[[Any], object]:
    return lambda saver: saver.put_writes(at("t", AGAIN), [("channel", value), ("__error__", value)], task_id)


CALLS = {
    "writes between": [put(1, AGAIN, 1, kind="old"), write("one", 1), put(2, AGAIN, 2, kind="new")],
    "writes around": [write("one", 1), put(1, AGAIN, 1, kind="old"), put(2, AGAIN, 2, kind="new"), write("one", 2)],
    "writes of two": [put(1, AGAIN, 1, kind="old"), write("one", 1), write("two", 2), put(1, AGAIN, 3, kind="new")],
}


@pytest.mark.parametrize("head", [False, True], ids=["it is the head", "it is not the head"])
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_all_of_it_is_found_wherever_it_lies(calls: list[Callable[[Any], object]], head: bool) -> None:
    model = InMemorySaver()
    first = [put(0, HEAD, 0, kind="other")] if head else []
    for call in [*first, *calls]:
        call(model)
    for between in product(("", "flush", "compact"), repeat=len(calls)):
        saver = LSMSaver.from_conn_string("memory://", compaction="off")
        for call in first:
            call(saver)
        for call, how in zip(calls, between, strict=True):
            call(saver)
            if how:
                saver._runtime.run(getattr(saver._engine, how)("t"))
        for search in ({}, {"kind": "new"}, {"kind": "old"}):
            found = [exact(each) for each in saver.list(at("t"), filter=search)]
            assert found == [exact(each) for each in model.list(at("t"), filter=search)], (between, search)
        assert exact(saver.get_tuple(at("t", AGAIN))) == exact(model.get_tuple(at("t", AGAIN))), between
