"""What is measured, as LangGraph drives a saver.

Rules of this module:

- It runs in every peer's interpreter, against `BaseCheckpointSaver` only; it knows no peer.
- `prepare` stores what a workload starts from, unmeasured. Each *operation* is then measured on its own.
- An answer is checked before its time counts.
- What a measurement answers: seconds per unit, one entry per sample, in one or more named series; and how many units
  were done in all, by which requests and bytes are divided.
"""

from __future__ import annotations

import asyncio
import operator
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, TypedDict

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import START, StateGraph

from tools.bench import conversation
from tools.bench.loop import Superstep, Thread

Saver = BaseCheckpointSaver[Any]


class WrongAnswer(Exception):
    """The saver answered, but not with what was stored."""


class LeftOut(Exception):
    """This would take longer than it may; the message says how long. It is no failure of the saver."""


def paced(steps: range, budget: float, what: str) -> Iterator[int]:
    """The steps one by one, for as long as all of them can be expected to be done within `budget` seconds.

    Args:
        steps: The numbers to yield.
        budget: Seconds.
        what: What is being done, for the message.

    Raises:
        LeftOut: At the pace so far they would take longer. This is told after a tenth of the budget at the earliest,
            so that a slow beginning (connections are made) does not count for much.

    Example:
        for number in paced(range(1_000), 60.0, "filling"):
            ...
    """
    began = time.perf_counter()
    for done, step in enumerate(steps):
        taken = time.perf_counter() - began
        if taken > budget / 10 and (expected := taken / max(done, 1) * len(steps)) > budget:
            raise LeftOut(f"{what} would take {expected:,.0f} s")
        yield step


@dataclass(frozen=True)
class Sampling:
    """How many samples to take: `count` at most, as many as fit into `seconds`, one at least.

    A sample that can be given up half way is, where it would take longer than `budget` seconds.
    """

    count: int
    seconds: float
    budget: float = float("inf")

    def __iter__(self) -> Iterator[None]:
        deadline = time.perf_counter() + self.seconds
        for number in range(self.count):
            if number and time.perf_counter() > deadline:
                return
            yield


@dataclass(frozen=True)
class Session:
    """A peer's saver, opened.

    Attributes:
        saver: For sync callers.
        open_async: Opens the saver for async callers, in a running event loop.
        compact: Compacts a thread, where the peer can.
        sampling: How many samples to take.
    """

    saver: Saver
    open_async: Callable[[], AbstractAsyncContextManager[Saver]]
    compact: Callable[[str], None]
    sampling: Sampling


@dataclass
class Measured:
    """What one measurement answers: see the rules above."""

    series: dict[str, list[float]]
    units: int


class Workload:
    """What all workloads have in common.

    Attributes:
        family: What kind of workload it is; with `size`, it names it.
        size: How large: messages, checkpoints, tasks, ...; compared with a peer's limit of that family.
        operations: What is measured, in this order; each is a method that takes a `Session`.
        cold: Operations before each sample of which the saver is opened anew.
        each_round: Whether `prepare` is called before each round, rather than once.
        weighed: Whether the bytes that are stored after `prepare`, and after `compact`, are a result; what does not
            change between rounds is measured in one.
    """

    family: ClassVar[str]
    size: int
    operations: ClassVar[tuple[str, ...]] = ()
    cold: ClassVar[frozenset[str]] = frozenset()
    each_round: ClassVar[bool] = False
    weighed: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """What results call it."""
        return f"{self.family}-{self.size}"

    def prepare(self, saver: Saver, budget: float) -> None:
        """Store what the workload starts from.

        Raises:
            LeftOut: It would take longer than `budget` seconds.
        """

    def warm(self, operation: str, session: Session) -> None:
        """Called before a measurement, not part of it."""


def _timed(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[float, Any]:
    """The seconds that a call took, and its answer."""
    began = time.perf_counter()
    answer = call(*arguments, **options)
    return time.perf_counter() - began, answer


def _new_thread(saver: Saver, kind: str) -> Thread:
    return Thread(f"{kind}-{uuid.uuid4()}", saver.get_next_version)


def _small_values(number: int) -> dict[str, Any]:
    return {"count": number, "topic": f"Order {number} of customer 4711", "done": False}


def _small_superstep(thread: Thread, **metadata: Any) -> Superstep:
    """Two small channels of three change."""
    number = len(thread.ids)
    update = {"count": number, "topic": f"Order {number} of customer 4711"}
    return thread.superstep(update, update, **metadata)


@dataclass
class OneSuperstep(Workload):
    """`put_writes` and `put` of a step: on a small state, or on a chat that gains one message in it."""

    size: int
    family = "superstep"
    operations = ("superstep",)
    each_round = True

    @property
    def name(self) -> str:
        return f"superstep-chat-{self.size}" if self.size else "superstep-small"

    def prepare(self, saver: Saver, budget: float) -> None:
        self._thread = _new_thread(saver, "superstep")
        self._messages = conversation.messages(self.size)
        self._thread.begin(saver, {"messages": self._messages} if self.size else _small_values(0))

    def warm(self, operation: str, session: Session) -> None:
        for _ in range(3):
            self._next().save(session.saver)

    def superstep(self, session: Session) -> Measured:
        writes, puts = [], []
        for _ in session.sampling:
            step = self._next()
            writes.append(_timed(step.put_writes, session.saver)[0])
            puts.append(_timed(step.put, session.saver)[0])
        both = [write + put for write, put in zip(writes, puts, strict=True)]
        return Measured({"put_writes": writes, "put": puts, "superstep": both}, len(both))

    def _next(self) -> Superstep:
        if not self.size:
            return _small_superstep(self._thread)
        said = conversation.message(len(self._messages))
        self._messages = [*self._messages, said]
        return self._thread.superstep({"messages": [said]}, {"messages": self._messages})


class _State(TypedDict):
    turns: Annotated[int, operator.add]
    answers: Annotated[dict[str, str], operator.or_]


_THREADS = 64
"""Threads of LangGraph's pool. Its default is the number of cores and four: on a small machine eight tasks and their
eight `put_writes` would wait for each other there, whatever the saver does."""


@dataclass
class GraphRun(Workload):
    """A whole run of a real graph, each superstep of which has `size` tasks in parallel.

    It has so many supersteps that the first reads and the last write, once in each run, count for little.
    """

    durability: str
    size: int
    supersteps: int
    family = "graph"
    operations = ("run",)

    @property
    def name(self) -> str:
        return f"graph-{self.durability}-{self.size}"

    def warm(self, operation: str, session: Session) -> None:
        replace(self, supersteps=2).run(replace(session, sampling=Sampling(1, 0.0)))  # connections are made

    def run(self, session: Session) -> Measured:
        graph = self._graph().compile(checkpointer=session.saver)
        seconds = []
        for _ in session.sampling:
            config: Any = {
                "configurable": {"thread_id": str(uuid.uuid4())},
                "recursion_limit": 10_000,
                "max_concurrency": _THREADS,
            }
            given: Any = {"turns": 0, "answers": {}}
            self._pace = paced(range(self.supersteps), session.sampling.budget, "one run")
            taken, answer = _timed(graph.invoke, given, config, durability=self.durability)
            if answer["turns"] != self.size * self.supersteps:
                raise WrongAnswer(f"the graph ended after {answer['turns']} turns")
            seconds.append(taken / self.supersteps)
        return Measured({"superstep": seconds}, len(seconds) * self.supersteps)

    def _graph(self) -> Any:
        builder: Any = StateGraph(_State)
        # A task's branch sees its own turn, and those of the supersteps before.
        goes_on = self.size * (self.supersteps - 1)
        for task in range(self.size):
            name = f"agent-{task}"
            said = str(conversation.message(task).content)
            builder.add_node(name, partial(self._agent, name, said))
            builder.add_edge(START, name)
            builder.add_conditional_edges(
                name, lambda state, name=name: name if state["turns"] <= goes_on else "__end__", [name, "__end__"]
            )
        return builder

    def _agent(self, name: str, said: str, state: Any) -> dict[str, Any]:
        if name == "agent-0":
            next(self._pace)
        return {"turns": 1, "answers": {name: said}}


@dataclass
class History(Workload):
    """Reads of a thread of `size` checkpoints, with a small state."""

    size: int
    family = "history"
    operations = ("latest_cold", "latest_warm", "by_id", "list_10", "filter_one")
    cold = frozenset({"latest_cold"})

    def prepare(self, saver: Saver, budget: float) -> None:
        self._thread = _new_thread(saver, "history")
        self._thread.begin(saver, _small_values(0))
        self._match = self.size // 2
        for number in paced(range(1, self.size), budget, "filling"):
            _small_superstep(self._thread, note="here" if number == self._match else "elsewhere").save(saver)

    def warm(self, operation: str, session: Session) -> None:
        if operation == "latest_warm":
            self._get(session, None, -1)

    def latest_cold(self, session: Session) -> Measured:
        return self._repeat(session, lambda: self._get(session, None, -1))

    def latest_warm(self, session: Session) -> Measured:
        return self._repeat(session, lambda: self._get(session, None, -1))

    def by_id(self, session: Session) -> Measured:
        wanted = iter(range(10**9))
        return self._repeat(session, lambda: self._by_id(session, next(wanted)))

    def list_10(self, session: Session) -> Measured:
        return self._repeat(session, lambda: self._list(session, self._thread.ids[:-11:-1], limit=10))

    def filter_one(self, session: Session) -> Measured:
        match = {"note": "here"}
        return self._repeat(session, lambda: self._list(session, [self._thread.ids[self._match]], filter=match))

    def _by_id(self, session: Session, turn: int) -> None:
        """Another checkpoint each time, near and far."""
        number = (turn * 7919 + 1) % self.size
        self._get(session, self._thread.ids[number], number)

    def _get(self, session: Session, checkpoint_id: str | None, number: int) -> None:
        found = session.saver.get_tuple(self._thread.config(checkpoint_id))
        if found is None or found.checkpoint["id"] != self._thread.ids[number]:
            raise WrongAnswer(f"get_tuple of {checkpoint_id or 'the latest'} gave another checkpoint, or none")
        if found.checkpoint["channel_values"]["count"] != number % self.size:
            raise WrongAnswer("get_tuple gave other values than were stored")

    def _list(self, session: Session, expected: list[str], **options: Any) -> None:
        found = [found.checkpoint["id"] for found in session.saver.list(self._thread.config(), **options)]
        if found != expected:
            raise WrongAnswer(f"list({options}) gave {len(found)} checkpoints, not the {len(expected)} expected")

    @staticmethod
    def _repeat(session: Session, call: Callable[[], None]) -> Measured:
        seconds = [_timed(call)[0] for _ in session.sampling]
        return Measured({"seconds": seconds}, len(seconds))


@dataclass
class DeltaHistory(Workload):
    """`get_delta_channel_history` of a channel whose snapshot is `size` checkpoints back."""

    size: int
    family = "delta"
    operations = ("history",)

    def prepare(self, saver: Saver, budget: float) -> None:
        from langgraph.checkpoint.serde.types import _DeltaSnapshot  # LangGraph before 1.2 has none

        self._thread = _new_thread(saver, "delta")
        self._thread.begin(saver, {"log": _DeltaSnapshot([])})
        for number in paced(range(1, self.size + 1), budget, "filling"):
            said = [conversation.message(number)]
            step = self._thread.superstep(
                {"log": said}, {}, bumped=("log",), counters_since_delta_snapshot={"log": (number, number)}
            )
            step.checkpoint["channel_values"].pop("log")
            step.save(saver)

    def history(self, session: Session) -> Measured:
        config: Any = self._thread.config(self._thread.ids[-1])
        seconds = []
        for _ in session.sampling:
            taken, found = _timed(session.saver.get_delta_channel_history, config=config, channels=["log"])
            if len(found["log"]["writes"]) != self.size or "seed" not in found["log"]:
                raise WrongAnswer(f"the history has {len(found['log']['writes'])} writes, not {self.size}")
            seconds.append(taken)
        return Measured({"seconds": seconds}, len(seconds))


@dataclass
class DeleteThread(Workload):
    """`delete_thread` of a thread of `size` checkpoints."""

    size: int
    family = "delete"
    operations = ("delete_thread",)
    each_round = True

    def prepare(self, saver: Saver, budget: float) -> None:
        self._thread = _new_thread(saver, "delete")
        self._thread.begin(saver, _small_values(0))
        for _ in paced(range(1, self.size), budget, "filling"):
            _small_superstep(self._thread).save(saver)

    def delete_thread(self, session: Session) -> Measured:
        taken, _ = _timed(session.saver.delete_thread, self._thread.thread_id)
        if session.saver.get_tuple(self._thread.config()) is not None:  # type: ignore[arg-type]
            raise WrongAnswer("the deleted thread is still there")
        return Measured({"seconds": [taken]}, 1)


@dataclass
class AtOnce(Workload):
    """Supersteps of `size` threads of conversation at once: from threads, and as tasks of an event loop."""

    size: int
    family = "at-once"
    operations = ("threads", "tasks")

    def warm(self, operation: str, session: Session) -> None:
        self._runs = [_new_thread(session.saver, "at-once") for _ in range(self.size)]
        with ThreadPoolExecutor(self.size) as pool:
            list(pool.map(lambda run: run.begin(session.saver, _small_values(0)), self._runs))
        if operation == "threads":
            self._in_threads(session.saver, 0.0)  # connections are made

    def threads(self, session: Session) -> Measured:
        began = time.perf_counter()
        done = self._in_threads(session.saver, session.sampling.seconds)
        return Measured({"superstep": [(time.perf_counter() - began) / done]}, done)

    def tasks(self, session: Session) -> Measured:
        return asyncio.run(self._in_tasks(session))

    def _in_threads(self, saver: Saver, seconds: float) -> int:
        """Each thread does supersteps until the time is up, one at least. Answers how many were done."""
        with ThreadPoolExecutor(self.size) as pool:
            deadline = time.perf_counter() + seconds
            return sum(pool.map(lambda run: self._until(deadline, run, saver), self._runs))

    @staticmethod
    def _until(deadline: float, run: Thread, saver: Saver) -> int:
        done = 0
        while not done or time.perf_counter() < deadline:
            _small_superstep(run).save(saver)
            done += 1
        return done

    async def _in_tasks(self, session: Session) -> Measured:
        async with session.open_async() as saver:
            first = sum(await asyncio.gather(*(self._until_async(0.0, run, saver) for run in self._runs)))
            began = time.perf_counter()
            deadline = began + session.sampling.seconds
            done = sum(await asyncio.gather(*(self._until_async(deadline, run, saver) for run in self._runs)))
            return Measured({"superstep": [(time.perf_counter() - began) / done]}, first + done)

    @staticmethod
    async def _until_async(deadline: float, run: Thread, saver: Saver) -> int:
        done = 0
        while not done or time.perf_counter() < deadline:
            await _small_superstep(run).asave(saver)
            done += 1
        return done


@dataclass
class Stored(Workload):
    """Bytes on disk: of a chat, of a state with images, of a large value that never changes."""

    kind: str
    size: int
    value: int = 0
    family = "stored"
    operations = ("compact",)
    weighed = True

    @property
    def name(self) -> str:
        return f"stored-{self.kind}-{self.size}"

    def prepare(self, saver: Saver, budget: float) -> None:
        thread = self._thread = _new_thread(saver, "stored")
        steps = paced(range(1, self.size), budget, "filling")
        match self.kind:
            case "chat":
                said = conversation.messages(1)
                thread.begin(saver, {"messages": said})
                for number in steps:
                    said = [*said, conversation.message(number)]
                    thread.superstep({"messages": said[-1:]}, {"messages": said}).save(saver)
            case "images":
                images: list[str] = []
                thread.begin(saver, {"images": images})
                for number in steps:
                    images = [*images, conversation.image(number, self.value)]
                    thread.superstep({"images": images[-1:]}, {"images": images}).save(saver)
            case "static":
                document = conversation.image(0, self.value)[: self.value]
                thread.begin(saver, {"document": document, "count": 0})
                for number in steps:
                    thread.superstep({"count": number}, {"count": number}).save(saver)
            case _:
                raise ValueError(self.kind)

    def compact(self, session: Session) -> Measured:
        taken, _ = _timed(session.compact, self._thread.thread_id)
        found = session.saver.get_tuple(self._thread.config())  # type: ignore[arg-type]
        if found is None or found.checkpoint["id"] != self._thread.ids[-1]:
            raise WrongAnswer("after compaction, the latest checkpoint is another one")
        return Measured({"seconds": [taken]}, self.size)


_FAMILIES: dict[str, type[Workload]] = {
    kind.family: kind for kind in (OneSuperstep, GraphRun, History, DeltaHistory, DeleteThread, AtOnce, Stored)
}


def make(family: str, **arguments: Any) -> Workload:
    """The workload of a family with these arguments, as `plan` and the worker's protocol name it.

    Example:
        make("history", size=1000).name == "history-1000"
    """
    return _FAMILIES[family](**arguments)


_SUPERSTEPS = 32


def plan(*, quick: bool) -> list[dict[str, Any]]:
    """All that is measured, as arguments of `make`, in order."""
    if quick:
        chats, runs, histories, deltas = (0, 100), (("sync", 1), ("async", 8)), (10,), (5,)
        deleted, at_once, stored = 5, (4,), (50, 30_000, 200_000)
    else:
        chats, histories, deltas = (0, 10, 100, 1_000), (10, 100, 1_000, 100_000), (100, 5_000)
        runs = tuple((durability, tasks) for durability in ("sync", "async", "exit") for tasks in (1, 8))
        deleted, at_once, stored = 100, (1, 8, 64), (1_000, 300_000, 20_000_000)
    return [
        *({"family": "superstep", "size": size} for size in chats),
        *({"family": "graph", "durability": how, "size": tasks, "supersteps": _SUPERSTEPS} for how, tasks in runs),
        *({"family": "history", "size": size} for size in histories),
        *({"family": "delta", "size": size} for size in deltas),
        {"family": "delete", "size": deleted},
        *({"family": "at-once", "size": size} for size in at_once),
        {"family": "stored", "kind": "chat", "size": stored[0]},
        {"family": "stored", "kind": "images", "size": 20, "value": stored[1]},
        {"family": "stored", "kind": "static", "size": 20, "value": stored[2]},
    ]
