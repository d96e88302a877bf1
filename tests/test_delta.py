"""A `DeltaChannel` holds what a plain channel with the same data holds, whatever was done to the thread.

The saver keeps a delta channel's writes, not its value; LangGraph rebuilds the value from the writes on the way from
the last snapshot. The graph writes the same lines to both kinds of channel, so that each checkpoint says itself
whether its value is right.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Overwrite, StateSnapshot

from langgraph.checkpoint.lsm import LSMSaver
from tests.conftest import Backend
from tests.support.checkpoints import at, chain, ids, listed, put
from tests.support.compare import exact
from tests.support.graphs import DURABILITIES, Run, delta, finish, line

# Never a snapshot within a test, now and then, at every update.
FREQUENCIES = {"no snapshots": 1000, "some": 4, "always": 1}
CASES = pytest.mark.parametrize(
    ("backend", "frequency", "durability"),
    [
        *(
            pytest.param("memory", frequency, durability, id=f"memory-{name}-{durability}")
            for name, frequency in FREQUENCIES.items()
            for durability in DURABILITIES
        ),
        *(pytest.param("file", 4, durability, id=f"file-some-{durability}") for durability in DURABILITIES),
        pytest.param("s3", 4, "async", id="s3-some-async"),
    ],
    indirect=["backend"],
)
LOCAL = pytest.mark.parametrize("backend", ["memory", "file"], indirect=True)


def history(graph: Any, thread_id: str) -> list[StateSnapshot]:
    return list(graph.get_state_history(at(thread_id)))


def assert_right(graph: Any, *thread_ids: str) -> None:
    """Each checkpoint holds the same in both channels; the later ones hold something."""
    for thread_id in thread_ids:
        states = history(graph, thread_id)
        assert [state.values.get("log", []) for state in states] == [state.values.get("plain", []) for state in states]
        assert graph.get_state(at(thread_id)).values["log"]


def assert_history_is_that_of_the_contract(saver: LSMSaver) -> None:
    """One read of the chain gives what the base class finds by walking it, checkpoint by checkpoint."""
    channels = ["log", "plain", "__start__", "absent"]
    for found in saver.list(None):
        expected = BaseCheckpointSaver.get_delta_channel_history(saver, config=found.config, channels=channels)
        got = saver.get_delta_channel_history(config=found.config, channels=channels)
        assert exact(dict(got)) == exact(dict(expected))


def talk(graph: Any, thread_id: str, *texts: str, durability: str, checkpoint: StateSnapshot | None = None) -> Any:
    run = Run(graph, thread_id, durability, asynchronous=False)
    for text in texts:
        state = finish(run.invoke(line(text), checkpoint))
        assert state["log"] == state["plain"]
        assert text in state["log"]
    return state


@CASES
def test_over_forks(backend: Backend, frequency: int, durability: str) -> None:
    with backend.open() as saver:
        graph = delta(saver, frequency)
        talk(graph, "thread", *"abcd", durability=durability)
        for place in (1, -1, len(history(graph, "thread")) // 2):
            old = history(graph, "thread")[place]
            talk(graph, "thread", f"fork at {place}", durability=durability, checkpoint=old)
            graph.update_state(old.config, line(f"edit at {place}"), "zebra")
            finish(Run(graph, "thread", durability, asynchronous=False).invoke(None))
            assert_right(graph, "thread")
        assert_history_is_that_of_the_contract(saver)
    with backend.open() as saver:
        assert_right(delta(saver, frequency), "thread")


@CASES
def test_over_flushes_and_rewrites(backend: Backend, frequency: int, durability: str) -> None:
    with backend.open(compaction="off") as saver:
        graph = delta(saver, frequency)
        for number in range(6):
            talk(graph, "thread", f"turn {number}", durability=durability)
            (saver.flush if number % 2 else saver.compact)("thread")
            assert_right(graph, "thread")
            assert_history_is_that_of_the_contract(saver)


@CASES
def test_over_copies(backend: Backend, frequency: int, durability: str) -> None:
    with backend.open() as saver:
        graph = delta(saver, frequency)
        talk(graph, "thread", *"abc", durability=durability)
        old = history(graph, "thread")[2]
        talk(graph, "thread", "fork", durability=durability, checkpoint=old)
        before = [exact(state.values) for state in history(graph, "thread")]
        saver.copy_thread("thread", "copy")
        assert [exact(state.values) for state in history(graph, "copy")] == before
        assert_history_is_that_of_the_contract(saver)
        talk(graph, "copy", "only in the copy", durability=durability)
        talk(graph, "thread", "only in the source", durability=durability)
        saver.delete_thread("thread")
        talk(graph, "copy", "on its own", durability=durability)
        assert_right(graph, "copy")
        assert "only in the source" not in graph.get_state(at("copy")).values["log"]


@CASES
def test_over_prune(backend: Backend, frequency: int, durability: str) -> None:
    with backend.open() as saver:
        graph = delta(saver, frequency)
        for number in range(3):
            talk(graph, "thread", *(f"{letter}{number}" for letter in "abc"), durability=durability)
            kept = graph.get_state(at("thread"))
            saver.prune(["thread"])
            assert ids([state.config for state in history(graph, "thread")]) == ids([kept.config])
            assert graph.get_state(at("thread")).values == kept.values
            assert_right(graph, "thread")
            if number == 1:
                saver.compact("thread")
                assert_right(graph, "thread")
                saver.copy_thread("thread", "copy")
                assert graph.get_state(at("copy")).values == kept.values
                talk(graph, "copy", "in the copy", durability=durability)
                assert_right(graph, "copy")
        # A fork from the one checkpoint that was kept.
        talk(graph, "thread", "next", durability=durability)
        talk(graph, "thread", "fork", durability=durability, checkpoint=history(graph, "thread")[-1])
        assert_right(graph, "thread")
    with backend.open() as saver:
        assert_right(delta(saver, frequency), "thread", "copy")


@CASES
def test_over_deleted_runs(backend: Backend, frequency: int, durability: str) -> None:
    with backend.open() as saver:
        graph = delta(saver, frequency)
        for number in range(4):
            config = {**at("thread"), "metadata": {"run_id": f"run-{number}"}}
            graph.invoke(line(f"run {number}"), config, durability=durability)
        kept = {state.config["configurable"]["checkpoint_id"]: state for state in history(graph, "thread")}
        saver.delete_for_runs(["run-0", "run-2"])
        assert {found.metadata["run_id"] for found in saver.list(at("thread"))} == {"run-1", "run-3"}
        for state in history(graph, "thread"):
            assert state.values == kept[state.config["configurable"]["checkpoint_id"]].values
        assert_right(graph, "thread")
        talk(graph, "thread", "goes on", durability=durability)
        saver.compact("thread")
        assert_right(graph, "thread")


@LOCAL
@pytest.mark.parametrize("frequency", FREQUENCIES.values(), ids=FREQUENCIES)
def test_in_a_subgraph_with_its_own_memory(backend: Backend, frequency: int) -> None:
    def extend(state: list[str], writes: Sequence[list[str]]) -> list[str]:
        return [*state, *(one for write in writes for one in write)]

    log = Annotated[list[str], DeltaChannel(extend, snapshot_frequency=frequency)]
    inner_state: Any = TypedDict("Inner", {"text": str, "log": log, "plain": Annotated[list[str], operator.add]})  # type: ignore[valid-type]
    inner = StateGraph(inner_state)
    inner.add_node("note", lambda state: {"log": [state["text"]], "plain": [state["text"]]})
    inner.add_node("check", lambda state: {"text": "equal" if state["log"] == state["plain"] else "different"})
    inner.add_edge(START, "note")
    inner.add_edge("note", "check")
    outer_state: Any = TypedDict("Outer", {"text": str})
    outer = StateGraph(outer_state)
    outer.add_node("inner", inner.compile(checkpointer=True))
    outer.add_edge(START, "inner")
    with backend.open() as saver:
        graph = outer.compile(checkpointer=saver)
        for number in range(7):
            assert graph.invoke({"text": f"turn {number}"}, at("thread")) == {"text": "equal"}
            if number == 4:
                saver.prune(["thread"])
            if number == 5:
                saver.compact("thread")
        newest = saver.get_tuple(at("thread", namespace="inner"))
        assert newest.checkpoint["channel_values"]["plain"] == [f"turn {number}" for number in range(7)]


def test_a_thread_that_began_with_a_plain_channel(backend: Backend) -> None:
    # The value that the plain channel left is the seed of the delta channel.
    class Plain(TypedDict):
        log: Annotated[list[str], operator.add]
        plain: Annotated[list[str], operator.add]

    with backend.open() as saver:
        builder = StateGraph(Plain)
        builder.add_node("zebra", lambda state: line("before"))
        builder.add_edge(START, "zebra")
        builder.compile(checkpointer=saver).invoke(line("first"), at("thread"))
        graph = delta(saver, 1000)
        talk(graph, "thread", "second", "third", durability="async")
        assert graph.get_state(at("thread")).values["log"][:3] == ["first", "before", "second"]
        assert_right(graph, "thread")
        saver.prune(["thread"])
        assert_right(graph, "thread")


@LOCAL
def test_an_overwritten_channel(backend: Backend) -> None:
    with backend.open() as saver:
        graph = delta(saver, 1000)
        talk(graph, "thread", *"ab", durability="sync")
        graph.update_state(at("thread"), {"log": Overwrite(["new"]), "plain": Overwrite(["new"])}, "zebra")
        assert graph.get_state(at("thread")).values["log"] == ["new"]
        talk(graph, "thread", "c", durability="sync")
        saver.prune(["thread"])
        assert_right(graph, "thread")


def test_the_history_follows_parents_to_the_nearest_value(backend: Backend) -> None:
    with backend.open() as saver:
        root = put(saver, at("thread"), {"a": "seed of a"})
        saver.put_writes(root, [("a", 1), ("b", 2)], "task")
        middle = put(saver, root, {"c": "seed of c"})
        saver.put_writes(middle, [("a", 3), ("c", 4)], "task")
        side = put(saver, root)
        saver.put_writes(side, [("a", "on the side")], "task")
        tip = put(saver, middle)
        saver.put_writes(tip, [("a", "pending")], "task")

        got = saver.get_delta_channel_history(config=tip, channels=["a", "b", "c", "d"])
        # `a` has a version in `middle` and `tip` as well: they inherit it, and it is a value there, too.
        assert got["a"] == {"seed": "seed of a", "writes": [("task", "a", 3)]}
        assert got["b"] == {"writes": [("task", "b", 2)]}
        assert got["c"] == {"seed": "seed of c", "writes": [("task", "c", 4)]}
        assert got["d"] == {"writes": []}
        assert saver.get_delta_channel_history(config=root, channels=["a"]) == {"a": {"writes": []}}
        assert saver.get_delta_channel_history(config=at("nowhere"), channels=["a"]) == {"a": {"writes": []}}
        assert saver.get_delta_channel_history(config=tip, channels=[]) == {}
        latest = saver.get_delta_channel_history(config=at("thread"), channels=["a", "b", "c", "d"])
        assert latest == got
        assert_history_is_that_of_the_contract(saver)


@pytest.mark.timeout(60)
def test_a_loop_of_parents_ends(backend: Backend) -> None:
    # A checkpoint stored again under a descendant of its own. InMemorySaver walks such a chain for ever.
    with backend.open() as saver:
        configs = chain(saver, "thread", [{"a": 1}, {}, {}])
        for config in configs:
            saver.put_writes(config, [("b", config["configurable"]["checkpoint_id"])], "task")
        first = saver.get_tuple(configs[0])
        saver.put(configs[-1], first.checkpoint, first.metadata, {})
        looped = saver.get_tuple(configs[0])
        assert looped.parent_config["configurable"]["checkpoint_id"] == ids(configs)[-1]

        for config in [*configs, at("thread")]:
            for channels in (["a"], ["b"], ["a", "b", "absent"]):
                found = saver.get_delta_channel_history(config=config, channels=channels)
                assert set(found) == set(channels)
        last = saver.get_delta_channel_history(config=configs[-1], channels=["b"])["b"]
        assert [value for _, _, value in last["writes"]][-1] == ids(configs)[1]
        assert listed(saver, at("thread")) == ids(configs)[::-1]

        itself = put(saver, at("own parent"))
        saver.put(itself, saver.get_tuple(itself).checkpoint, {}, {})
        assert saver.get_delta_channel_history(config=itself, channels=["a"])["a"]["writes"] == []
        for thread_id in ("thread", "own parent"):
            saver.compact(thread_id)
            saver.copy_thread(thread_id, f"copy of {thread_id}")
            saver.prune([thread_id])
            assert len(listed(saver, at(thread_id))) == 1
