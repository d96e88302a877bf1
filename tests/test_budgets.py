"""What operations cost, in rounds, requests and bytes, however long the history: `docs/architecture.md` has the table.

Histories are made once, as LangGraph makes them, with the flushes and the compaction that come with their length. Then
every operation is counted in a process that knows nothing yet (`cold`), or that has just done the same (`warm`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from lsm.limits import HEADER, MANIFEST
from lsm.steps import Append
from lsm.storage import Storage, open_storage
from tests.conftest import S3
from tests.support.chance import fixed, fixed_ids
from tests.support.checkpoints import at
from tests.support.counting import CountingRuntime, CountingStorage
from tests.support.histories import KINDS, Branch
from tests.support.moto import store_options
from tests.support.proxy import S3Proxy

SMALL_COMMIT = 48 << 10
"""What a small commit sends to an object store at most, on average, in bytes."""

CALLS = {"subgraphs": 3}
"""How many commits a superstep of a history is, where it is not two."""


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


def opened(storage: CountingStorage, **options: Any) -> LSMSaver:
    """A saver whose rounds are counted. Its compaction runs when a test says so."""
    saver = LSMSaver.from_storage(storage, **{"compaction": "off", **options})
    saver._runtime = CountingRuntime(storage)
    return saver


@dataclass
class History:
    """A thread that was written by one process, superstep by superstep, and what that took.

    Attributes:
        kind: Which of `KINDS`.
        storage: Where it is.
        saver: The saver that has written it.
        branch: Its end.
        ids: The ids of its checkpoints, those of subgraphs left out, oldest first.
        commits: How many commits there were, the first superstep's left out.
        beside: How many objects were uploaded.
        unusual: The supersteps of which a commit took more than one round, or that made another number of commits.
        sent: What the commits sent, in bytes.
        manifest: The largest size of the manifest.
        header: The largest size of its header.
        compactions: How often segments were merged.
    """

    kind: str
    storage: CountingStorage
    saver: LSMSaver
    thread_id: str = "thread"
    branch: Branch | None = None
    ids: list[str] = field(default_factory=list)
    commits: int = 0
    beside: int = 0
    unusual: list[int] = field(default_factory=list)
    sent: int = 0
    manifest: int = 0
    header: int = 0
    compactions: int = 0

    def grow(self, length: int) -> None:
        """Let it grow, and be compacted whenever that is due."""
        due: set[str] = set()
        self.saver._engine.on_due = due.add
        calls = CALLS.get(self.kind, 2)
        for number, branch in zip(range(length), KINDS[self.kind](self.saver, self.thread_id), strict=False):
            self.branch = branch
            self.ids.append(branch.id)
            commits = self.storage.commits
            if number:  # the first write of a process has more to do
                self.commits += len(commits)
                self.beside += self.storage.kinds["Create"]
                if not len(commits) == self.storage.rounds == calls:
                    self.unusual.append(number)
            while due:
                due.clear()
                while self.saver._runtime.run(self.saver._engine.compact_due(self.thread_id)):
                    self.compactions += 1
            self._measure()
            self.storage.reset()

    def _measure(self) -> None:
        """Note what was sent since the last time. Swaps of the directory count as what the commits cost, too."""
        self.sent += sum(request.sent for request in self.storage.commits)
        view = self.saver._engine.process.thread(self.thread_id).view
        assert view is not None
        self.manifest = max(self.manifest, view.size)
        self.header = max(self.header, len(view.header_bytes))

    def cold(self) -> LSMSaver:
        """A saver that knows nothing yet; counting starts now."""
        saver = opened(self.storage)
        self.storage.reset()
        return saver

    def samples(self) -> list[str]:
        """Some of its ids, from all parts of it."""
        count = len(self.ids)
        return [self.ids[at] for at in sorted({0, count // 4, count // 2, count * 3 // 4, count - 2, count - 1})]


Make = Callable[[str, str, int], History]


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Makes histories, each once: by the backend, the kind and the length."""
    made: dict[tuple[str, str, int], History] = {}

    def make(backend: str, kind: str, length: int) -> History:
        if (backend, kind, length) not in made:
            folder = tmp_path_factory.mktemp("store")
            url = "memory://" if backend == "memory" else folder.as_uri()
            storage = CountingStorage(open_storage(url, fsync=False))
            with fixed(f"history {backend} {kind} {length}"), fixed_ids():
                history = made[backend, kind, length] = History(kind, storage, opened(storage))
                history.grow(length)
        return made[backend, kind, length]

    yield make
    for history in made.values():
        history.saver.close()


@pytest.fixture(params=["memory", "file"])
def where(request: pytest.FixtureRequest) -> str:
    """A store that writes whole objects, and one that appends: each has limits of its own."""
    return str(request.param)


EVERY_KIND = pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("small", 10),
        ("small", 1000),
        slow("small", 100_000),
        ("chat", 250),
        ("integers", 300),
        ("strings", 300),
        ("forks", 1000),
        ("subgraphs", 500),
        slow("subgraphs", 10_000),
    ],
)


@EVERY_KIND
def test_small_commits_are_one_write(histories: Make, where: str, kind: str, length: int) -> None:
    history = histories(where, kind, length)

    # A list that has doubled since it was last stored whole is stored whole again, which is a large value.
    assert len(history.unusual) <= (length.bit_length() if kind == "chat" else 0)
    assert history.commits == CALLS.get(kind, 2) * (length - 1)
    assert history.beside <= history.commits / 20 + len(history.unusual)


@EVERY_KIND
def test_manifests_stay_small(histories: Make, where: str, kind: str, length: int) -> None:
    history = histories(where, kind, length)

    assert history.manifest < MANIFEST
    assert history.header < HEADER
    if where == "memory":
        assert history.sent / history.commits <= SMALL_COMMIT


@EVERY_KIND
def test_latest_cold(histories: Make, where: str, kind: str, length: int) -> None:
    history = histories(where, kind, length)

    found = history.cold().get_tuple(at("thread"))

    assert found is not None
    assert found.checkpoint["id"] == max(history.ids)
    assert history.storage.rounds <= (2 if kind == "chat" else 1)


@EVERY_KIND
def test_latest_warm_moves_nothing(histories: Make, where: str, kind: str, length: int) -> None:
    history = histories(where, kind, length)
    saver = history.cold()
    for read in (saver, history.saver):
        read.get_tuple(at("thread"))
        history.storage.reset()

        found = read.get_tuple(at("thread"))

        assert found is not None
        assert found.checkpoint["id"] == max(history.ids)
        assert history.storage.kinds == {"Get": 1}
        assert history.storage.rounds == 1
        assert history.storage.received == 0


@EVERY_KIND
def test_by_id(histories: Make, where: str, kind: str, length: int) -> None:
    history = histories(where, kind, length)
    for id_ in history.samples():
        saver = history.cold()

        found = saver.get_tuple(at("thread", id_))

        assert found is not None
        assert found.checkpoint["id"] == id_
        assert history.storage.rounds <= 3


def test_by_id_of_a_value_that_was_replaced(where: str, tmp_path: Path) -> None:
    """Where branches give values the same versions, the last one counts: what a checkpoint says is wrong then."""
    storage = CountingStorage(open_storage("memory://" if where == "memory" else tmp_path.as_uri(), fsync=False))
    history = History("integers", storage, opened(storage))
    branch = Branch(history.saver, "thread", next_version=lambda current: (current or 0) + 1)
    branch.put({"count": 0, "note": "before"})
    other = branch.forked()
    branch.put({"count": 1, "note": "after"})
    replaced = branch.id
    history.saver._runtime.run(history.saver._engine.flush("thread"))
    other.put({"count": 2})
    history.saver._runtime.run(history.saver._engine.flush("thread"))
    branch.put({"count": 3})

    found = history.cold().get_tuple(at("thread", replaced))

    assert found is not None
    assert found.checkpoint["channel_values"] == {"count": 2, "note": "after"}
    assert storage.rounds <= 4


def test_a_wide_state(where: str, tmp_path: Path) -> None:
    """Of so many channels that their versions take more than heads have room for in the header."""
    storage = CountingStorage(open_storage("memory://" if where == "memory" else tmp_path.as_uri(), fsync=False))
    history = History("small", storage, opened(storage))
    branch = Branch(history.saver, "thread")
    branch.put({f"channel {number}": number for number in range(400)})
    for step in range(30):
        branch.superstep({f"channel {step}": -step})
    history.saver._runtime.run(history.saver._engine.flush("thread"))
    saver = history.cold()

    found = saver.get_tuple(at("thread"))

    assert found is not None
    assert found.checkpoint["channel_values"] == branch.values
    assert storage.rounds <= 2
    branch.put({"channel 0": 1})
    history.saver._runtime.run(history.saver._engine.flush("thread"))
    view = history.saver._engine.process.thread("thread").view
    assert view is not None
    assert not any(info.overrides for info in view.segments())


def test_a_step_of_many_tasks(where: str, tmp_path: Path) -> None:
    """Their writes do not fit into the header, which still knows which checkpoint is the latest, and what is new."""
    storage = CountingStorage(open_storage("memory://" if where == "memory" else tmp_path.as_uri(), fsync=False))
    history = History("small", storage, opened(storage))
    branch = Branch(history.saver, "thread")
    branch.superstep({"count": 0, "note": "before"})
    tasks = 300
    for compacted in (False, True):
        for task in range(tasks):
            branch.write({"count": task}, task=task)
        history.saver._runtime.run(history.saver._engine.flush("thread"))
        branch.write({"count": tasks}, task=tasks)
        if compacted:
            history.saver._runtime.run(history.saver._engine.compact("thread"))
        view = history.saver._engine.process.thread("thread").view
        assert view is not None
        assert view.header.partial == ("",)
        saver = history.cold()

        found = saver.get_tuple(at("thread"))

        assert found is not None
        assert found.checkpoint["id"] == branch.id
        assert [value for _, _, value in found.pending_writes or ()] == list(range(tasks + 1))
        assert storage.rounds <= 3
        branch.superstep({"count": 1, "note": "after"})
        history.saver._runtime.run(history.saver._engine.flush("thread"))
        view = history.saver._engine.process.thread("thread").view
        assert view is not None
        assert not view.header.partial
        assert not any(info.overrides for info in view.segments())


@EVERY_KIND
@pytest.mark.parametrize("limit", [1, 10, 100])
def test_listing_some(histories: Make, where: str, kind: str, length: int, limit: int) -> None:
    history = histories(where, kind, length)
    middle = at("thread", sorted(history.ids)[length // 2])
    every_space: Any = {"configurable": {"thread_id": "thread"}}
    for config, before in itertools.product((at("thread"), every_space), (None, middle)):
        saver = history.cold()

        found = list(saver.list(config, before=before, limit=limit))

        assert len(found) >= min(limit, length // 2)
        assert history.storage.rounds <= 3


@EVERY_KIND
def test_listing_by_a_filter_with_one_match(histories: Make, where: str, kind: str, length: int) -> None:
    """Three rounds, and one more in a hundred: so often a segment's filter has what the segment has not."""
    history = histories(where, kind, length)
    taken = []
    for number in sorted({0, length // 3, length // 2 // 10 * 10, length - 1}):
        saver = history.cold()

        found = list(saver.list(at("thread"), filter={"label": f"label-{number}"}))

        assert [each.checkpoint["id"] for each in found] == [history.ids[number]]
        taken.append(history.storage.rounds)
    *most, last = sorted(taken)
    assert max(most) <= 3
    assert last <= 4


@pytest.mark.parametrize("length", [100, 600, slow(5000)])
def test_delta_history(histories: Make, where: str, length: int) -> None:
    history = histories(where, "deltas", length)
    for id_ in (None, history.ids[-1], history.ids[length // 2]):
        saver = history.cold()

        found = saver.get_delta_channel_history(config=at("thread", id_), channels=["log"])

        depth = length // 2 if id_ == history.ids[length // 2] else length - 1
        assert found["log"]["seed"] == []
        assert [value for _, _, value in found["log"]["writes"]] == [[f"line {step}"] for step in range(1, depth + 1)]
        assert history.storage.rounds <= 4


@pytest.mark.parametrize("length", [500, slow(10_000)])
def test_latest_of_namespaces(histories: Make, where: str, length: int) -> None:
    """Two rounds for those written last, three for all others."""
    history = histories(where, "subgraphs", length)
    listed = history.saver.list({"configurable": {"thread_id": "thread"}})
    spaces = [space for each in listed if (space := each.config["configurable"]["checkpoint_ns"])]
    assert len(spaces) == length - 1
    for space, rounds in [(spaces[0], 2), *((spaces[n], 3) for n in (length // 4, length // 2, length - 2))]:
        saver = history.cold()

        assert saver.get_tuple(at("thread", namespace=space)) is not None
        assert history.storage.rounds <= rounds

    saver = history.cold()
    assert saver.get_tuple(at("thread", namespace="no such")) is None
    assert history.storage.rounds <= 3


@pytest.mark.parametrize("length", [10, 1000, slow(100_000)])
def test_a_new_process_goes_on(histories: Make, where: str, length: int) -> None:
    """Its first write looks at the root, beside the manifest; then it is warm."""
    history = histories(where, "small", length)
    saver = history.cold()
    found = saver.get_tuple(at("thread"))
    assert found is not None
    branch = Branch(saver, "thread")
    branch.config, branch.step = found.config, length
    branch.values, branch.versions = found.checkpoint["channel_values"], found.checkpoint["channel_versions"]
    history.storage.reset()

    branch.write({"count": 1})
    assert history.storage.rounds == 2
    history.storage.reset()
    branch.put({"count": 1})
    branch.write({"count": 2})
    assert history.storage.rounds == len(history.storage.commits) == 2
    found = history.cold().get_tuple(at("thread"))
    assert found is not None
    assert found.checkpoint["id"] == branch.id
    assert [write[1:] for write in found.pending_writes or ()] == [("count", 2)]
    history.ids.append(branch.id)


@pytest.mark.parametrize("length", [10, 1000, slow(100_000)])
def test_large_values_take_two(histories: Make, where: str, length: int) -> None:
    history = histories(where, "small", length)
    branch = history.branch
    assert branch is not None
    history.saver.get_tuple(at("thread"))  # the test above has written from another process
    large, others = ({"one": os.urandom(100_000), "other": os.urandom(3 << 20)} for _ in range(2))
    # What has just been written is there, when a channel takes it over.
    for call, rounds in (
        (partial(branch.write, large), 2),
        (partial(branch.put, large), 1),
        (partial(branch.put, others), 2),
    ):
        history.storage.reset()

        call()

        assert history.storage.rounds == rounds
        assert len(history.storage.commits) == 1
    history.storage.reset()
    branch.write({"count": 1})
    branch.put({"count": 1})  # the large ones are there, and cost no more
    assert history.storage.rounds == 2
    assert history.storage.sent < 2 * SMALL_COMMIT
    history.ids.append(branch.id)


class Gate(CountingStorage):
    """A storage of which the first commit waits until it is let through."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.reached, self.open = threading.Event(), threading.Event()

    def execute(self, request: Any) -> Any:
        if isinstance(request, Append):
            self.reached.set()
            assert self.open.wait(30)
        return super().execute(request)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_parallel_writes_are_grouped(where: str, tmp_path: Path, asynchronous: bool) -> None:
    """Of one that is under way and eight that come meanwhile."""
    gate = Gate(open_storage("memory://" if where == "memory" else tmp_path.as_uri()))
    saver = opened(gate)
    branch = Branch(saver, "thread")
    branch.put({"count": 0})
    thread = saver._engine.process.thread("thread")
    gate.reset()

    def write(task: int) -> None:
        if asynchronous:
            asyncio.run(saver.aput_writes(branch.config, [("count", task)], f"task-{task}"))
        else:
            saver.put_writes(branch.config, [("count", task)], f"task-{task}")

    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(write, 0)
        assert gate.reached.wait(30)
        rest = [pool.submit(write, task) for task in range(1, 9)]
        until(lambda: len(thread.queue) == 8)
        gate.open.set()
        for each in (first, *rest):
            each.result(30)

    assert len(gate.commits) == 2
    found = saver.get_tuple(at("thread"))
    assert found is not None
    assert sorted(value for _, _, value in found.pending_writes or ()) == list(range(9))
    saver.close()


@pytest.mark.parametrize("length", [10, 300])
def test_deleting_a_thread(where: str, tmp_path: Path, length: int) -> None:
    """Two rounds, and the removal of the segments. On buckets the second writes a tombstone, which goes with them
    (`test_requests_to_s3`)."""
    storage = CountingStorage(open_storage("memory://" if where == "memory" else tmp_path.as_uri(), fsync=False))
    history = History("small", storage, opened(storage))
    history.grow(length)
    saver = history.cold()

    saver.delete_thread("thread")

    segments = storage.kinds["Delete"]
    assert storage.kinds == {"Get": 1, "List": 1, "DeleteIf": 1} | ({"Delete": segments} if segments else {})
    assert storage.rounds == 2 + (segments > 0)
    assert saver.get_tuple(at("thread")) is None


def test_requests_to_s3(s3: S3) -> None:
    """What goes over the wire is what was counted: a request for each."""
    with S3Proxy(s3.server.endpoint) as proxy:
        storage = CountingStorage(open_storage(s3.url(), store_options=store_options(proxy.endpoint)))
        history = History("small", storage, opened(storage))
        history.grow(120)
        assert history.unusual == []
        assert history.sent / history.commits <= SMALL_COMMIT
        assert history.branch is not None

        def count(call: Callable[[LSMSaver], Any], saver: LSMSaver | None = None) -> list[tuple[str, int]]:
            saver = saver or history.cold()
            storage.reset()
            before = len(proxy.requests)
            call(saver)
            seen = proxy.requests[before:]
            assert sum(request.bytes_in for request in seen if request.method == "PUT") == storage.sent
            return [(request.method, request.status) for request in seen]

        branch = history.branch
        assert count(lambda _: branch.write({"count": 1}), history.saver) == [("PUT", 200)]
        assert count(lambda _: branch.put({"count": 1}), history.saver) == [("PUT", 200)]
        assert count(lambda _: branch.put({"blob": os.urandom(50_000)}), history.saver) == [("PUT", 200)] * 2
        assert count(lambda saver: saver.get_tuple(at("thread"))) == [("GET", 200), ("GET", 206)]
        assert count(lambda saver: saver.get_tuple(at("thread")), history.saver) == [("GET", 304)]
        by_id = count(lambda saver: saver.get_tuple(at("thread", history.ids[10])))
        assert by_id == [("GET", 200), ("GET", 206), ("GET", 206)]
        found = count(lambda saver: list(saver.list(at("thread"), filter={"label": "label-10"})))
        assert found == [("GET", 200), ("GET", 206), ("GET", 206)]
        deleted = count(lambda saver: saver.delete_thread("thread"))
        assert sorted(deleted) == sorted([("GET", 200)] * 2 + [("PUT", 200)] + [("POST", 200)])
