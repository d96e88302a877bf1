"""What builds on what is about to go: a swap, a fence or a deletion that comes in between must see it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from lsm.compact import all_logs, compact
from lsm.drive import run
from lsm.engine import Engine
from lsm.errors import Unavailable
from lsm.flush import _MOST_STRAYS
from lsm.format.records import Typed
from lsm.limits import OBJECTS
from lsm.steps import List, Now, PutIf, Steps, Wait
from lsm.storage.memory import MemoryStorage
from lsm.view import View

EMPTY = ("msgpack", b"")
HOUR = 3600.0


class Meanwhile(MemoryStorage):
    """A store in which something happens just before some request, once, or just after it.

    Attributes:
        before: Whether a request is meant, and what happens before it.
        after: The same, for what happens after it.
        old: By how many seconds its objects look older than they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: tuple[Callable[[Any], bool], Callable[[], None]] | None = None
        self.after: tuple[Callable[[Any], bool], Callable[[], None]] | None = None
        self.old = 0.0

    def execute(self, request: Any) -> Any:
        if self.before is not None and self.before[0](request):
            (_, happens), self.before = self.before, None
            happens()
        answer = super().execute(request)
        if isinstance(request, List) and self.old:
            answer = type(answer)([_older(entry, self.old) for entry in answer.entries], answer.more)
        if self.after is not None and self.after[0](request):
            (_, happens), self.after = self.after, None
            happens()
        return answer


def _older(entry: Any, seconds: float) -> Any:
    return type(entry)(entry.key, entry.size, entry.tag, entry.modified - seconds)


def writes_manifest(request: Any) -> bool:
    return isinstance(request, PutIf) and request.key.startswith("manifests/")


class Thread:
    """One thread, as a process of its own sees it."""

    def __init__(self, storage: MemoryStorage) -> None:
        self.storage = storage
        self.engine = Engine(storage.url, storage.appends, os.urandom)

    def run(self, steps: Any) -> Any:
        return run(steps, self.storage)

    def put(self, id_: str, parent: str | None, versions: dict[str, str], values: dict[str, str]) -> None:
        new: dict[str, Any] = {channel: (versions[channel], typed(value)) for channel, value in values.items()}
        self.run(self.engine.put("t", "", id_, parent, ("id", id_.encode()), EMPTY, versions, new))

    def write(self, id_: str, task: str) -> None:
        self.run(self.engine.put_writes("t", "", id_, task, "", [(0, "c", typed(task))]))

    def flush(self) -> None:
        self.run(self.engine.flush("t"))

    def compact(self) -> None:
        self.run(self.engine.compact("t"))

    def values(self, id_: str | None = None) -> dict[str, str] | None:
        found = self.run(self.engine.get("t", "", id_))
        return None if found is None else {name: value[1].decode() for name, value in found.values.items()}

    def tasks(self, id_: str) -> list[str]:
        return [write.task_id for write in self.run(self.engine.get("t", "", id_)).writes]

    def view(self) -> View:
        found = self.engine.process.thread("t").view
        assert found is not None
        return found


def typed(text: str) -> Typed:
    return "text", text.encode()


@pytest.fixture
def storage() -> Meanwhile:
    return Meanwhile()


@pytest.fixture
def thread(storage: Meanwhile) -> Thread:
    return Thread(storage)


@pytest.fixture
def other(storage: Meanwhile) -> Thread:
    """Another process on the same thread."""
    return Thread(storage)


def test_what_was_replaced_recently_outlives_the_swaps_that_follow(storage: Meanwhile, thread: Thread) -> None:
    """Its grace counts from when it was replaced, however old it is."""
    for number in range(3):
        thread.put(str(number), None, {"c": f"v{number}"}, {"c": "value"})
        thread.compact()
    replaced = len(thread.view().header.retired)
    assert replaced == 5  # what three flushes and the first two swaps made
    storage.old = 10 * HOUR
    found = thread.run(thread.engine.collect(HOUR))
    assert found.objects == 0
    assert thread.run(thread.engine.collect(0.0)).objects == replaced


def test_values_at_hand_follow_a_rewrite_only_where_it_moved_those_very_values(
    storage: Meanwhile, thread: Thread, other: Thread
) -> None:
    """The head is put again, with another value, while a rewrite moves the one that it had."""
    thread.put("1", None, {"c": "v1"}, {"c": "first"})
    thread.put("2", "1", {"c": "v1"}, {})
    thread.flush()
    storage.before = writes_manifest, lambda: thread.put("2", "1", {"c": "v2"}, {"c": "other"})
    other.compact()
    assert storage.before is None
    assert thread.values("2") == {"c": "other"}
    assert thread.values("1") == {"c": "first"}
    assert other.values("1") == {"c": "first"}


class Chain:
    """A thread whose value grows from checkpoint to checkpoint.

    Versions are numbers, whose keys are not in their order: a base may come after its patch.
    """

    def __init__(self) -> None:
        self.thread = Thread(MemoryStorage())
        self.states: dict[int, str] = {}

    def put(self, number: int, state: str | None = None) -> None:
        self.thread.run(self.steps(number, state))

    def steps(self, number: int, state: str | None = None) -> Steps[None]:
        self.states[number] = state or "text " * 200 + "more" * number
        parent = f"{number - 1:02}" if number > 1 else None
        value = {"c": (number, typed(self.states[number]))}
        return self.thread.engine.put("t", "", f"{number:02}", parent, ("id", b"1"), EMPTY, {"c": number}, value)

    def check(self) -> None:
        """Another process finds every value as it was put last."""
        fresh = Thread(self.thread.storage)
        found = {number: fresh.values(f"{number:02}") for number in self.states}
        assert found == {number: {"c": state} for number, state in self.states.items()}


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("again", range(1, 12))
def test_a_patch_is_applied_to_what_it_was_made_from_whatever_is_put_again(again: int, flushed: bool) -> None:
    """A checkpoint is put again with another value, at every later point of the chain; then the next, beside a rewrite
    that does not have it."""
    for since in range(again, 12):
        chain = Chain()
        thread = chain.thread
        for number in range(1, 12):
            chain.put(number)
            if number == since:
                chain.put(again, "other " * 150)
                if flushed:
                    thread.flush()
        chain.check()
        thread.flush()
        logs = all_logs(thread.view())
        chain.put(again % 11 + 1, "another " * 150)
        thread.run(compact(thread.engine.process, thread.engine.process.thread("t"), lambda view, logs=logs: logs))
        assert thread.view().count
        chain.check()
        thread.compact()
        chain.check()


@pytest.mark.parametrize("again", range(1, 9))
def test_a_patch_is_applied_to_what_it_was_made_from_whatever_is_put_again_in_the_same_commit(again: int) -> None:
    for last in {again + 1, 9}:
        chain = Chain()
        for number in range(1, last):
            chain.put(number)
        known = chain.thread.engine.process.thread("t")
        known.leading = True  # so that this one waits in the queue, for the next
        waiting = chain.steps(again, "other " * 150)
        assert isinstance(next(waiting), Now)
        assert isinstance(waiting.send(0.0), Wait)
        known.leading = False
        seq = chain.thread.view().seq
        chain.put(last)
        assert chain.thread.view().seq == seq + 1
        chain.check()
        chain.thread.compact()
        chain.check()


@pytest.mark.parametrize("flushed", [False, True])
def test_what_is_put_again_during_a_prune_keeps_its_values(
    storage: Meanwhile, thread: Thread, other: Thread, flushed: bool
) -> None:
    """Put again without values, it has those that it had; the prune, which began before, would drop them."""
    thread.put("1", None, {"c": "v1"}, {"c": "first"})
    thread.put("2", "1", {"c": "v2"}, {"c": "second"})
    thread.flush()

    def again() -> None:
        thread.put("1", None, {"c": "v1"}, {})
        thread.put("3", "1", {"c": "v1", "d": "v3"}, {"d": "new"})
        if flushed:
            thread.flush()

    storage.before = writes_manifest, again
    other.run(other.engine.prune(["t"]))
    assert storage.before is None
    for reader in (thread, other, Thread(storage)):
        assert reader.values() == {"c": "first", "d": "new"}
        assert reader.values("1") is reader.values("2") is None


def test_a_rewrite_of_the_newest_remembers_that_older_segments_have_writes_without_a_checkpoint(
    storage: Meanwhile, thread: Thread, other: Thread
) -> None:
    thread.put("1", None, {"c": "v1"}, {"c": "first"})
    tasks = [f"task {number:04}" for number in range(_MOST_STRAYS + 1)]
    for task in tasks:
        thread.write("2", task)
    thread.flush()
    assert thread.view().header.stray
    for number in range(2):
        thread.put("1", None, {"c": f"w{number}"}, {"c": "again"})
        thread.flush()
    process = other.engine.process
    assert other.run(compact(process, process.thread("t"), lambda view: all_logs(view)[1:]))
    other.put("2", "1", {"c": "v2"}, {"c": "second"})
    for reader in (other, Thread(storage)):
        assert reader.tasks("2") == tasks


class Ambiguous(Meanwhile):
    """A store that answers the next write of a manifest with an error, without carrying it out."""

    fails = False

    def execute(self, request: Any) -> Any:
        if self.fails and writes_manifest(request):
            self.fails = False
            raise Unavailable("no answer came")
        return super().execute(request)


def test_a_collector_leaves_orphans_alone_whose_fence_may_not_stand() -> None:
    storage = Ambiguous()
    thread = Thread(storage)
    thread.put("1", None, {"c": "v1"}, {"c": "first"})
    orphan = "x" * (OBJECTS.inline + 1)

    def collect() -> None:
        storage.fails = True
        assert Thread(storage).run(Thread(storage).engine.collect(0.0)).objects == 0

    storage.after = (lambda request: request.__class__.__name__ == "Create"), collect
    thread.put("2", "1", {"c": "v2"}, {"c": orphan})
    assert not storage.fails
    assert Thread(storage).values() == {"c": orphan}
