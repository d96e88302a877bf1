"""What survives a rewrite: enough for every kept checkpoint, and nothing beside.

A checkpoint's answer for a channel is what `get_delta_channel_history` says of it: the writes of its ancestors, back to
the nearest stored value. Here it is defined once more, naively: walk the parents, for one checkpoint and one channel at
a time. `lsm.lineage` shares walks between checkpoints and channels; these tests hold it to the naive ones.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from langgraph.checkpoint.lsm import LSMSaver
from lsm.lineage import KeepLatest, Node, Without, keep_all, needed
from tests.support.checkpoints import at, checkpoint, listed
from tests.support.compare import exact

CHANNELS = ("a", "b", "c")
Nodes = Mapping[str, Node]
Answer = tuple[list[str], str | None]


# The naive definition.


def ancestors(nodes: Nodes, id_: str) -> list[str]:
    """The ancestors of a checkpoint, nearest first; a loop of parents ends them, as an absent parent does."""
    found: list[str] = []
    parent = nodes[id_].parent
    while parent in nodes and parent not in (id_, *found):
        found.append(parent)
        parent = nodes[parent].parent
    return found


def answer(nodes: Nodes, id_: str, channel: str) -> Answer:
    """Which ancestors contribute writes to a channel, nearest first, and which one the stored value."""
    writers: list[str] = []
    for ancestor in ancestors(nodes, id_):
        if channel in nodes[ancestor].written:
            writers.append(ancestor)
        if channel in nodes[ancestor].stored:
            return writers, ancestor
    return writers, None


def rebuilt(nodes: Nodes, id_: str) -> set[str]:
    """The channels that a checkpoint is rebuilt from ancestors for."""
    node = nodes[id_]
    if node.deltas is not None:
        return set(node.deltas - node.stored)
    return {channel for above in ancestors(nodes, id_) for channel in nodes[above].written} - set(node.versions)


def answers(nodes: Nodes, live: Iterable[str], original: Nodes) -> dict[tuple[str, str], Answer]:
    """All answers about the channels that the live checkpoints were rebuilt from ancestors for in the beginning."""
    return {(id_, channel): answer(nodes, id_, channel) for id_ in live for channel in rebuilt(original, id_)}


def kept(nodes: Nodes, live: set[str], channels: Mapping[str, set[str]]) -> dict[str, Node]:
    """The checkpoints after a rewrite: the live ones as they were, the others with what they were kept for."""
    after = {}
    for id_, node in nodes.items():
        if id_ in live:
            after[id_] = node
        elif id_ in channels:
            after[id_] = replace(
                node,
                versions={channel: node.versions[channel] for channel in channels[id_] & node.stored},
                stored=node.stored & channels[id_],
                written=node.written & channels[id_],
                deltas=None,
                hidden=True,
            )
    return after


# Random histories.


@st.composite
def histories(draw: st.DrawFn, *, loops: bool) -> dict[str, Node]:
    """Checkpoints with forks, whose ids do not sort in the order of the chain, with or without loops of parents."""
    count = draw(st.integers(1, 9))
    ids = draw(st.permutations([f"id-{number}" for number in range(count)]))
    some = st.frozensets(st.sampled_from(CHANNELS))
    nodes = {}
    for number, id_ in enumerate(ids):
        before = ids if loops else ids[:number]
        # Mostly the one before, for long chains; now and then a fork, a root, or a parent that is not there.
        near = [ids[number - 1]] * 4 if number else []
        stored, written = draw(some), draw(some)
        inherited = draw(some)
        nodes[id_] = Node(
            parent=draw(st.sampled_from([*near, *before, None, "absent"])),
            versions=dict.fromkeys(stored | inherited, 1),
            stored=stored if draw(st.booleans()) else frozenset(),
            written=written,
            deltas=draw(st.none() | some),
        )
    return nodes


def subset(ids: Iterable[str]) -> st.SearchStrategy[set[str]]:
    return st.sets(st.sampled_from(sorted(ids)))


@pytest.mark.parametrize("loops", [False, True], ids=["trees", "loops"])
@given(st.data())
@settings(max_examples=120, deadline=None)
def test_every_live_checkpoint_is_answered_as_before(loops: bool, data: st.DataObject) -> None:
    nodes = data.draw(histories(loops=loops))
    live = data.draw(subset(nodes))
    after = kept(nodes, live, needed(nodes, sorted(live)))
    assert answers(after, live, nodes) == answers(nodes, live, nodes)

    fewer = data.draw(subset(live)) if live else set()
    last = kept(after, fewer, needed(after, sorted(fewer)))
    assert answers(last, fewer, nodes) == answers(nodes, fewer, nodes)


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_nothing_is_kept_that_no_live_checkpoint_needs(data: st.DataObject) -> None:
    nodes = data.draw(histories(loops=False))
    live = data.draw(subset(nodes))
    channels = needed(nodes, sorted(live))
    after = kept(nodes, live, channels)
    before = answers(nodes, live, nodes)
    for id_ in after.keys() - live:
        without = {each: node for each, node in after.items() if each != id_}
        assert answers(without, live, nodes) != before, f"{id_} is kept for nothing"
        for channel in channels[id_]:
            node = after[id_]
            if channel in node.written | node.stored:
                poorer = replace(node, written=node.written - {channel}, stored=node.stored - {channel})
                assert answers({**after, id_: poorer}, live, nodes) != before, f"{channel} of {id_} is kept for nothing"


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_an_ancestor_is_needed_as_far_as_the_last_contribution(data: st.DataObject) -> None:
    """The same as an equation, channel by channel, links included."""
    nodes = data.draw(histories(loops=False))
    live = data.draw(subset(nodes))
    expected: dict[str, set[str]] = {}
    for id_ in live:
        for channel in rebuilt(nodes, id_):
            writers, seed = answer(nodes, id_, channel)
            line = ancestors(nodes, id_)
            for ancestor in line[: max((line.index(each) + 1 for each in (*writers, seed) if each), default=0)]:
                expected.setdefault(ancestor, set()).add(channel)
    assert needed(nodes, sorted(live)) == expected


@given(histories(loops=True), st.data())
def test_the_order_in_which_checkpoints_are_live_does_not_matter(nodes: dict[str, Node], data: st.DataObject) -> None:
    live = data.draw(subset(nodes))
    first, second = (data.draw(st.permutations(sorted(live))) for _ in range(2))
    one, other = (kept(nodes, live, needed(nodes, order)) for order in (first, second))
    assert answers(one, live, nodes) == answers(other, live, nodes) == answers(nodes, live, nodes)


def test_walks_into_one_loop_do_not_stand_for_each_other() -> None:
    """One enters the loop of a, b and c at a, and needs nothing of c; the other enters at b, and must pass c."""
    log = frozenset({"a"})
    nodes = {
        "a": Node("b", written=log, deltas=log),
        "b": Node("c", written=log, deltas=log),
        "c": Node("a", deltas=log),
        "at a": Node("a", deltas=log),
        "at b": Node("b", deltas=log),
    }
    live = {"at a", "at b"}
    after = kept(nodes, live, needed(nodes, ["at a", "at b"]))
    assert answers(after, live, nodes) == answers(nodes, live, nodes)
    assert answer(after, "at b", "a") == (["b", "a"], None)


def test_a_long_chain_is_walked_once_for_all_of_its_checkpoints() -> None:
    # Naively a walk for each: some 200 million steps. It would not end before the test's time is over.
    nodes = {str(n): Node(str(n - 1), written=frozenset("a"), deltas=frozenset("a")) for n in range(20_000)}
    assert len(needed(nodes, nodes)) == 19_999


# Keep-rules.


def test_rules_do_not_bring_back_what_was_hidden() -> None:
    nodes = {"1": Node(None), "2": Node("1"), "3": Node("2", hidden=True)}
    assert set(keep_all("", nodes)) == {"1", "2"}
    assert set(KeepLatest()("", nodes)) == {"2"}
    assert set(Without([("", "1"), ("elsewhere", "2")])("", nodes)) == {"2"}
    assert set(KeepLatest()("", {"3": nodes["3"]})) == set()


def test_a_call_of_a_subgraph_goes_with_its_root() -> None:
    rule = KeepLatest()
    assert set(rule("", {"1": Node(None), "2": Node("1")})) == {"2"}
    assert set(rule("agent:task", {"7": Node(None, root="1"), "8": Node("7", root="1")})) == set()
    assert set(rule("agent:other", {"7": Node(None, root="1"), "8": Node("7", root="2")})) == {"8"}
    assert set(rule("agent:unknown", {"7": Node(None)})) == {"7"}
    assert set(rule("agent:task|memory", {"7": Node(None, root="1")})) == {"7"}


# The same through the saver.

step = st.tuples(
    st.integers(0, 3),  # how far back the parent lies; of the first checkpoints, none
    st.lists(st.tuples(st.sampled_from(CHANNELS), st.integers(0, 1)), max_size=3),  # writes: channel, task
    st.dictionaries(st.sampled_from(CHANNELS), st.booleans()),  # new versions: with a value, or empty
    st.sampled_from(["run-1", "run-2"]),
    st.sampled_from(["", "", "", "flush", "compact"]),  # what happens next
)


def grow(saver: LSMSaver, steps: list[Any], shuffled: list[str], named: bool) -> dict[str, str]:
    """Store a tree of checkpoints with these ids; the runs of each."""
    runs: dict[str, str] = {}
    versions: dict[str | None, dict[str, Any]] = {None: {}}
    line: list[str | None] = [None]
    for number, (back, writes, changed, run, then) in enumerate(steps):
        parent = line[max(0, len(line) - 1 - back)]
        # Where nobody names the delta channels, one that has a version is a plain one: it has a value, too.
        new = {channel: f"v{number}" for channel, full in changed.items() if full or named}
        made = checkpoint({channel: f"{channel} at {number}" for channel in new if changed[channel]})
        made["id"] = shuffled[number]
        versions[made["id"]] = made["channel_versions"] = versions[parent] | new
        metadata: Any = {"source": "loop", "step": number, "run_id": run}
        if named:
            metadata["counters_since_delta_snapshot"] = dict.fromkeys(CHANNELS, (1, 1))
        config = saver.put(at("thread", parent), made, metadata, new)
        for task in (0, 1):
            mine = [(channel, f"{number} {channel}") for channel, by in writes if by == task]
            if mine:
                saver.put_writes(config, mine, f"task-{task}")
        runs[made["id"]] = run
        line.append(made["id"])
        if then:
            getattr(saver, then)("thread")
    return runs


def histories_of(saver: LSMSaver, thread_id: str, ids: Iterable[str]) -> Any:
    """The answers for some checkpoints, and their values; of channels that they store, only the values."""
    found = {}
    for id_ in ids:
        stored = saver.get_tuple(at(thread_id, id_))
        assert stored is not None, f"{id_} is gone"
        values = stored.checkpoint["channel_values"]
        counters = (stored.metadata or {}).get("counters_since_delta_snapshot")
        versions = stored.checkpoint["channel_versions"]
        asked = [each for each in CHANNELS if each not in (values if counters is not None else versions)]
        history = saver.get_delta_channel_history(config=at(thread_id, id_), channels=asked)
        found[id_] = exact([values, stored.pending_writes, dict(history)])
    return found


@given(st.lists(step, min_size=1, max_size=10), st.data(), st.booleans(), st.lists(st.sampled_from("dpc"), max_size=3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_through_the_saver(steps: list[Any], data: st.DataObject, named: bool, ends: list[str]) -> None:
    shuffled = data.draw(st.permutations([f"id-{number:02}" for number in range(len(steps))]))
    with LSMSaver.from_conn_string(f"memory://{uuid.uuid4().hex}", compaction="off") as saver:
        runs = grow(saver, steps, shuffled, named)
        before = histories_of(saver, "thread", runs)
        left = set(runs)
        name = "thread"
        for number, end in enumerate((*ends, "c")):
            match end:
                case "d":
                    saver.delete_for_runs(["run-1"])
                    left = {id_ for id_ in left if runs[id_] != "run-1"}
                case "p":
                    saver.prune([name])
                    left = {max(left)} if left else set()
                case "c":
                    saver.copy_thread(name, f"copy-{number}")
                    assert histories_of(saver, name, left) == {id_: before[id_] for id_ in left}
                    name = f"copy-{number}"
            assert listed(saver, at(name)) == sorted(left, reverse=True)
            assert histories_of(saver, name, left) == {id_: before[id_] for id_ in left}
