"""LangGraph graphs as people build them, each with a script of what is done with it.

Rules of this module:

- Every script gives the same result on every run, whatever saver it runs on: message ids are given, models are
  scripted, and what depends on the clock (checkpoint ids) is not in what `seen` returns.
- Scripts are coroutines that are driven with the sync methods of a graph as well as with the async ones: see `Run`.
"""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.cache.memory import InMemoryCache
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import CachePolicy, Command, Send, StateSnapshot, interrupt


@dataclass
class Run:
    """One graph on one thread, driven by its sync or its async methods; either way each call is awaited.

    Attributes:
        graph: A compiled graph.
        thread_id: The thread.
        durability: LangGraph's durability mode.
        asynchronous: Whether the async methods are called.
    """

    graph: Any
    thread_id: str
    durability: str
    asynchronous: bool

    def at(self, checkpoint: StateSnapshot | None = None) -> Any:
        return checkpoint.config if checkpoint is not None else {"configurable": {"thread_id": self.thread_id}}

    async def invoke(self, given: Any, checkpoint: StateSnapshot | None = None) -> Any:
        if self.asynchronous:
            return await self.graph.ainvoke(given, self.at(checkpoint), durability=self.durability)
        return self.graph.invoke(given, self.at(checkpoint), durability=self.durability)

    async def update(self, values: Any, as_node: str | None = None, checkpoint: StateSnapshot | None = None) -> Any:
        if self.asynchronous:
            return await self.graph.aupdate_state(self.at(checkpoint), values, as_node)
        return self.graph.update_state(self.at(checkpoint), values, as_node)

    async def state(self, *, subgraphs: bool = False) -> StateSnapshot:
        if self.asynchronous:
            return await self.graph.aget_state(self.at(), subgraphs=subgraphs)
        return self.graph.get_state(self.at(), subgraphs=subgraphs)

    async def history(self) -> list[StateSnapshot]:
        if self.asynchronous:
            return [state async for state in self.graph.aget_state_history(self.at())]
        return list(self.graph.get_state_history(self.at()))

    async def seen(self) -> Any:
        """The latest state with its subgraphs, and the whole history, without what depends on the clock."""
        latest = plain(await self.state(subgraphs=True))
        return latest, [plain(state) for state in await self.history()]


def plain(state: StateSnapshot) -> Any:
    """A state as nested lists, without ids and times."""
    tasks = [
        [task.name, repr(task.error), [one.value for one in task.interrupts], task.result, _inner(task.state)]
        for task in state.tasks
    ]
    counters = state.metadata.get("counters_since_delta_snapshot") if state.metadata else None
    about = [state.metadata.get("source"), state.metadata.get("step"), counters] if state.metadata else None
    return [state.values, list(state.next), about, state.parent_config is None, tasks]


def _inner(state: Any) -> Any:
    if isinstance(state, StateSnapshot):
        return plain(state)
    return sorted(set(state["configurable"]) - {"thread_id"}) if state else None


class Chat(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    turns: Annotated[int, operator.add]


def chat(saver: BaseCheckpointSaver[Any]) -> Any:
    """A scripted model that answers what it was told, and a tool that it calls at every second turn."""

    def model(state: Chat) -> Any:
        number = len(state["messages"])
        if state["turns"] % 2 and not str(state["messages"][-1].content).startswith("tool"):
            return {"messages": [AIMessage("call the tool", id=f"call-{number}")]}
        return {"messages": [AIMessage(f"answer to {state['messages'][-1].content}", id=f"ai-{number}")], "turns": 1}

    def tool(state: Chat) -> Any:
        return {"messages": [AIMessage(f"tool result {'x' * 500}", id=f"tool-{len(state['messages'])}")]}

    def route(state: Chat) -> str:
        return "tool" if state["messages"][-1].content == "call the tool" else END

    builder = StateGraph(Chat)
    builder.add_node(model)
    builder.add_node(tool)
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", route, ["tool", END])
    builder.add_edge("tool", "model")
    return builder.compile(checkpointer=saver)


def said(number: int) -> Any:
    return {"messages": [HumanMessage(f"question {number}", id=f"human-{number}")]}


async def talk(run: Run) -> Any:
    return [await run.invoke(said(number)) for number in range(4)]


async def travel(run: Run) -> Any:
    """Replay, fork by new input, fork by an edit: three branches from old checkpoints."""
    for number in range(3):
        await run.invoke(said(number))
    old = [state for state in await run.history() if state.next == ("model",)]
    replayed = await run.invoke(None, old[-1] if run.durability != "exit" else None)
    earlier = (await run.history())[-1]
    forked = await run.invoke(said(7), earlier)
    edited = await run.update({"messages": [HumanMessage("edited", id="human-0")]}, "tool", earlier)
    after_edit = await run.invoke(None)
    assert edited["configurable"]["thread_id"] == run.thread_id
    return replayed, forked, after_edit


class Work(TypedDict):
    items: list[int]
    squares: Annotated[list[int], operator.add]
    total: int


def fan_out(saver: BaseCheckpointSaver[Any]) -> Any:
    """Parallel branches by `Send`, a dozen at once."""

    def spread(state: Work) -> list[Send]:
        return [Send("square", {"item": item}) for item in state["items"]]

    builder = StateGraph(Work)
    builder.add_node("square", lambda state: {"squares": [state["item"] ** 2]})
    builder.add_node("sum", lambda state: {"total": sum(state["squares"])})
    builder.add_conditional_edges(START, spread, ["square"])
    builder.add_edge("square", "sum")
    builder.add_edge("sum", END)
    return builder.compile(checkpointer=saver)


async def map_and_reduce(run: Run) -> Any:
    return [await run.invoke({"items": list(range(count))}) for count in (12, 3)]


class Inner(TypedDict):
    note: str
    calls: Annotated[list[str], operator.add]


class Outer(TypedDict):
    note: str
    log: Annotated[list[str], operator.add]


def nested(saver: BaseCheckpointSaver[Any]) -> Any:
    """A subgraph that forgets and one that remembers (`checkpointer=True`); the one that remembers asks back."""

    def inner(name: str, *, asks: bool, **compiled: Any) -> Any:
        def first(state: Inner) -> Any:
            return {"calls": [f"{name} got {state['note']}"]}

        def second(state: Inner) -> Any:
            answer = interrupt(f"{name} asks") if asks else "nothing asked"
            return {"note": f"{state['note']}, {answer}, call {len(state['calls'])}"}

        builder = StateGraph(Inner)
        builder.add_node(first)
        builder.add_node(second)
        builder.add_edge(START, "first")
        builder.add_edge("first", "second")
        return builder.compile(**compiled)

    builder = StateGraph(Outer)
    builder.add_node("start", lambda state: {"log": [f"start {state['note']}"]})
    builder.add_node("forgets", inner("forgets", asks=False))
    builder.add_node("remembers", inner("remembers", asks=True, checkpointer=True))
    builder.add_node("end", lambda state: {"log": [f"end {state['note']}"]})
    for one, other in [(START, "start"), ("start", "forgets"), ("forgets", "remembers"), ("remembers", "end")]:
        builder.add_edge(one, other)
    return builder.compile(checkpointer=saver)


async def call_subgraphs(run: Run) -> Any:
    results = []
    for number in range(3):
        await run.invoke({"note": f"note {number}"})
        asked = await run.state(subgraphs=True)
        results.append(plain(asked))
        results.append(await run.invoke(Command(resume=f"answer {number}")))
    return results


class Review(TypedDict):
    text: str
    verdicts: Annotated[list[str], operator.add]


def review(saver: BaseCheckpointSaver[Any]) -> Any:
    """Two reviewers that both wait for a person, one of them twice."""

    def editor(state: Review) -> Any:
        return {"verdicts": [f"editor: {interrupt('edit?')}"]}

    def lawyer(state: Review) -> Any:
        return {"verdicts": [f"lawyer: {interrupt('legal?')} and {interrupt('sure?')}"]}

    builder = StateGraph(Review)
    builder.add_node("write", lambda state: {"text": state["text"].upper()})
    builder.add_node(editor)
    builder.add_node(lawyer)
    builder.add_node("publish", lambda state: Command(update={"verdicts": ["published"]}))
    builder.add_edge(START, "write")
    builder.add_edge("write", "editor")
    builder.add_edge("write", "lawyer")
    builder.add_edge(["editor", "lawyer"], "publish")
    return builder.compile(checkpointer=saver)


async def ask_people(run: Run) -> Any:
    await run.invoke({"text": "draft"})
    results = [plain(await run.state())]
    for _ in range(2):
        waiting = (await run.state()).interrupts
        results.append(await run.invoke(Command(resume={one.id: f"yes to {one.value}" for one in waiting})))
        results[-1].pop("__interrupt__", None)  # their ids come from the clock
    await run.update({"verdicts": ["a note from the side"]}, "publish")
    return results


def delta(saver: BaseCheckpointSaver[Any], snapshot_frequency: int = 4) -> Any:
    """The same data in a `DeltaChannel` and in a plain channel; parallel writers, so that their order shows."""

    def extend(state: list[str], writes: Sequence[list[str]]) -> list[str]:
        return [*state, *(line for write in writes for line in write)]

    def writer(name: str) -> Callable[[Any], Any]:
        def write(state: Any) -> Any:
            line = [f"{name} after {len(state['log'])} {len(state['plain'])}"]
            return {"log": line, "plain": line}

        return write

    log = Annotated[list[str], DeltaChannel(extend, snapshot_frequency=snapshot_frequency)]
    plain = Annotated[list[str], operator.add]
    builder = StateGraph(TypedDict("Delta", {"log": log, "plain": plain}))  # type: ignore[operator]
    for name in ("zebra", "ant", "mole"):
        builder.add_node(name, writer(name))
    builder.add_edge(START, "zebra")
    builder.add_edge("zebra", "ant")
    builder.add_edge("zebra", "mole")
    return builder.compile(checkpointer=saver)


def line(text: str) -> dict[str, list[str]]:
    """Input of `delta`: one line, for both channels."""
    return {"log": [text], "plain": [text]}


async def grow(run: Run) -> Any:
    for number in range(5):
        state = await run.invoke(line(f"input {number}"))
        assert state["log"] == state["plain"]
    return [state.values for state in await run.history()]


class Cached(TypedDict):
    number: int
    result: str


def cached(saver: BaseCheckpointSaver[Any]) -> Any:
    """A node whose results are kept in a cache; how often it ran is part of what it returns."""
    ran: list[int] = []

    def slow(state: Cached) -> Any:
        ran.append(state["number"])
        return {"result": f"{state['number']} computed in run {len(ran)}"}

    builder = StateGraph(Cached)
    builder.add_node("slow", slow, cache_policy=CachePolicy(key_func=lambda state: str(state["number"])))
    builder.add_edge(START, "slow")
    return builder.compile(checkpointer=saver, cache=InMemoryCache())


async def compute(run: Run) -> Any:
    return [await run.invoke({"number": number}) for number in (1, 2, 1, 3, 2)]


Script = Callable[[Run], Awaitable[Any]]
SCENARIOS: dict[str, tuple[Callable[[BaseCheckpointSaver[Any]], Any], Script]] = {
    "chat": (chat, talk),
    "time travel": (chat, travel),
    "parallel branches": (fan_out, map_and_reduce),
    "subgraphs": (nested, call_subgraphs),
    "interrupts": (review, ask_people),
    "delta channel": (delta, grow),
    "cached nodes": (cached, compute),
}
DURABILITIES: Sequence[str] = ("sync", "async", "exit")


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that waits for nothing, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a script waited for something in its sync form")
