"""Whatever is accepted can be read by every process; what cannot be stored is refused, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from langgraph.checkpoint.lsm import LSMSaver
from lsm.format.records import MOST_CHANNELS, MOST_NAMES, MOST_WRITES, Writes, check, pack, runs_of, unpack
from tests.support.checkpoints import at, checkpoint
from tests.support.compare import exact


class Name(StrEnum):
    """A name that is derived from `str`."""

    CHANNEL = "channel"


class Number(IntEnum):
    """A number that is derived from `int`."""

    SEVEN = 7


class Third(float):
    """A number whose `repr` is not a float's, as NumPy's."""

    def __repr__(self) -> str:
        return "third"


class Misnaming(JsonPlusSerializer):
    """A serialiser that answers as it is told."""

    def __init__(self, answer: Any):
        super().__init__()
        self.answer = answer

    def dumps_typed(self, obj: Any) -> Any:
        return self.answer


REFUSED: dict[str, Callable[[LSMSaver], Any]] = {
    "no metadata": lambda saver: saver.put(at("t"), checkpoint({"a": 1}), None, {"a": 1}),  # type: ignore[arg-type]
    "no versions": lambda saver: saver.put(at("t"), checkpoint({"a": 1}), {}, None),  # type: ignore[arg-type]
    "no checkpoint": lambda saver: saver.put(at("t"), None, {}, {}),  # type: ignore[arg-type]
    "a list of values": lambda saver: saver.put(at("t"), {**checkpoint(), "channel_values": [1]}, {}, {}),  # type: ignore[typeddict-item]
    "a version that is a tuple": lambda saver: saver.put(at("t"), checkpoint({"a": 1}), {}, {"a": (1,)}),  # type: ignore[dict-item]
    "a version of 2**64": lambda saver: saver.put(at("t"), checkpoint({"a": 1}), {}, {"a": 1 << 64}),
    "a version below -2**63": lambda saver: saver.put(at("t"), checkpoint({"a": 1}, version=-(1 << 63) - 1), {}, {}),
    "a version of 5,000 digits": lambda saver: saver.put(at("t"), checkpoint({"a": 1}), {}, {"a": 10**5000}),
    "a channel that is a number": lambda saver: saver.put(at("t"), checkpoint(), {}, {7: 1}),  # type: ignore[dict-item]
    "a channel of writes that is bytes": lambda saver: saver.put_writes(at("t", "1"), [(b"a", 1)], "task"),  # type: ignore[list-item]
    "a task path that is a tuple": lambda saver: saver.put_writes(at("t", "1"), [("a", 1)], "task", ("a",)),  # type: ignore[arg-type]
    "names without end": lambda saver: saver.put_writes(at("t", "1"), [("a" * (MOST_NAMES + 1), 1)], "task"),
    "channels without end": lambda saver: saver.put(
        at("t"), {**checkpoint(), "channel_versions": dict.fromkeys(map(str, range(MOST_CHANNELS + 1)), 1)}, {}, {}
    ),
    "a thread id without end": lambda saver: saver.put_writes(at("t" * 5000, "1"), [("a", 1)], "task"),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_read_is_refused_before_it_is_stored(call: Callable[[LSMSaver], Any]) -> None:
    saver = LSMSaver.from_conn_string("memory://")
    with pytest.raises((ValueError, TypeError)):
        call(saver)
    assert list(saver.list(None)) == []


@pytest.mark.parametrize("answer", [(7, b"a"), (None, b"a"), ("msgpack", 1 << 20), ("msgpack", "text"), (b"json", b"")])
def test_a_serialiser_that_makes_no_named_bytes_is_refused(answer: Any) -> None:
    saver = LSMSaver.from_conn_string("memory://", serde=Misnaming(answer))
    with pytest.raises(TypeError, match="serialiser"):
        saver.put_writes(at("t", "1"), [("a", 1)], "task")
    with pytest.raises(TypeError, match="serialiser"):
        saver.put(at("t"), checkpoint({"a": 1}), {}, {"a": 1})
    assert list(saver.list(None)) == []


def test_the_error_for_a_version_names_it_and_its_channel() -> None:
    saver = LSMSaver.from_conn_string("memory://")
    with pytest.raises(ValueError, match="'messages' has version 18446744073709551616"):
        saver.put(at("t"), checkpoint({"messages": 1}), {}, {"messages": 1 << 64})


def test_the_writes_of_one_call_are_counted_before_they_are_stored() -> None:
    many = Writes("", "1", "task", "", 0, ((0, MOST_WRITES + 1, "a"),), bytes(3 * MOST_WRITES + 3))
    with pytest.raises(ValueError, match="is the most"):
        check(many)
    many.runs = ((0, MOST_WRITES, "a"),)
    check(many)
    many.value = many.value[: 3 * MOST_WRITES - 1]
    with pytest.raises(ValueError, match="do not fit"):
        check(many)


@given(st.lists(st.tuples(st.integers(-5, 30), st.sampled_from("ab"))))
@settings(derandomize=True, deadline=None)
def test_entries_are_the_same_as_runs(entries: list[tuple[int, str]]) -> None:
    writes = Writes("", "1", "task", "", 0, runs_of(entries), bytes(3 * len(entries)))
    assert writes.entries == entries
    found = unpack(pack(writes), "here")
    assert isinstance(found, Writes)
    assert (found.entries, found.count) == (entries, len(entries))


# Odd inputs. Each is stored by a saver, and by LangGraph's own in memory; a process that was not there reads it.

TEXTS = st.one_of(
    st.text(max_size=5), st.sampled_from(["", "\0", "\ud800", "a" * 70, "\U0010ffff" * 60, Name.CHANNEL, "__error__"])
)
INTEGERS = st.one_of(st.integers(-9, 9), st.sampled_from([-(1 << 63), -(1 << 63) - 1, (1 << 64) - 1, 1 << 64, 10**300]))
FLOATS = st.one_of(
    st.sampled_from([0.5, -0.0, 1e300, 7.0, float("nan"), float("inf"), -float("inf")]), st.just(Third(0.25))
)
VERSIONS = st.one_of(TEXTS, INTEGERS, FLOATS, st.booleans(), st.just(Number.SEVEN), st.none(), st.just(b"1"))
CHANNELS = st.one_of(TEXTS, TEXTS, TEXTS, st.none(), st.just(b"a"), st.just(1))
VALUES = st.one_of(st.none(), INTEGERS.filter(lambda each: abs(each) < 1 << 60), TEXTS, st.just(b"\xff"), st.just([1]))
COUNTERS = st.one_of(st.none(), st.dictionaries(st.one_of(TEXTS, st.integers(0, 3), st.none()), st.integers(0, 3)))
METADATA = st.one_of(
    st.none(),
    st.just([("a", 1)]),
    st.fixed_dictionaries(
        {},
        optional={
            "counters_since_delta_snapshot": COUNTERS,
            "parents": st.one_of(st.none(), st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers(0, 3)))),
            "source": VALUES,
            "step": st.one_of(st.integers(0, 3), FLOATS),
        },
    ),
)
PUTS = st.fixed_dictionaries(
    {
        "id": st.one_of(st.sampled_from(["1", "2", "3"]), TEXTS, st.none(), st.just(7)),
        "namespace": st.one_of(st.just(""), TEXTS, st.none()),
        "parent": st.one_of(st.none(), st.sampled_from(["1", "2"]), TEXTS),
        "versions": st.dictionaries(CHANNELS, VERSIONS, max_size=3),
        "values": st.dictionaries(TEXTS, VALUES, max_size=3),
        "new": st.one_of(st.none(), st.dictionaries(CHANNELS, VERSIONS, max_size=3), st.just("same")),
        "metadata": METADATA,
    }
)
WRITES = st.fixed_dictionaries(
    {
        "id": st.one_of(st.sampled_from(["1", "2", "3"]), TEXTS, st.none()),
        "namespace": st.one_of(st.just(""), TEXTS),
        "task": st.one_of(TEXTS, st.just(7)),
        "path": st.one_of(TEXTS, st.none()),
        "writes": st.lists(st.tuples(CHANNELS, VALUES), max_size=4),
    }
)


def _store(saver: Any, call: dict[str, Any]) -> Any:
    """Make a call. Returns the config of what it is about."""
    if "task" in call:
        config = at("t", call["id"], namespace=call["namespace"])
        saver.put_writes(config, call["writes"], call["task"], call["path"])
        return config
    made: Any = checkpoint()
    made.update(id=call["id"], channel_values=dict(call["values"]), channel_versions=dict(call["versions"]))
    new = dict(call["versions"]) if call["new"] == "same" else call["new"]
    return saver.put(at("t", call["parent"], namespace=call["namespace"]), made, call["metadata"], new)


def _read(saver: Any, namespace: str, id_: str | None) -> Any:
    found = saver.get_tuple(at("t", id_, namespace=namespace))
    if found is None:
        return None
    versions = sorted(
        (str.__str__(name), repr(_plain(each))) for name, each in found.checkpoint["channel_versions"].items()
    )
    values = {str.__str__(name): value for name, value in found.checkpoint["channel_values"].items()}
    return exact(
        (
            versions,
            values,
            found.metadata,
            found.parent_config and found.parent_config["configurable"]["checkpoint_id"],
            sorted(found.pending_writes or [], key=repr),
        )
    )


def _plain(version: Any) -> Any:
    """A version without the class that it may have lost."""
    if isinstance(version, str):
        return str.__str__(version)
    return float.__pos__(version) if isinstance(version, float) else int(version)


@given(st.lists(st.one_of(PUTS, WRITES), min_size=1, max_size=4), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@example(
    [
        {
            "id": "1",
            "namespace": "",
            "parent": None,
            "versions": {"a": Third(0.25)},
            "values": {"a": "x"},
            "new": "same",
            "metadata": {"counters_since_delta_snapshot": {7: 1, "a": 2}},
        }
    ],
    True,
)
def test_what_is_accepted_is_read_as_langgraph_reads_it(
    tmp_path_factory: pytest.TempPathFactory, calls: list[dict[str, Any]], flushed: bool
) -> None:
    url = (tmp_path_factory.mktemp("odd") / "store").as_uri()
    reference, stored, compared = InMemorySaver(), [], True
    with LSMSaver.from_conn_string(url, fsync=False, compaction="off") as saver:
        for call in calls:
            try:
                _store(saver, call)
            except (ValueError, TypeError):
                continue
            stored.append((call["namespace"], call["id"]))
            try:
                _store(reference, call)
            except (ValueError, TypeError):  # what LangGraph's serialiser cannot pack, such as a lone surrogate
                compared = False
        if flushed:
            saver.flush("t")
    with LSMSaver.from_conn_string(url, fsync=False, compaction="off") as fresh:
        places = {(namespace, id_) for namespace, found in stored for id_ in (found, None)}
        for namespace, id_ in sorted(places, key=repr):
            found = _read(fresh, namespace, id_)
            assert not compared or found == _read(reference, namespace, id_)
        assert not compared or len(list(fresh.list(None))) == len(list(reference.list(None)))


def test_names_that_are_derived_from_text_are_taken_as_that(tmp_path: Path) -> None:
    with LSMSaver.from_conn_string(tmp_path.as_uri()) as saver:
        made = checkpoint({Name.CHANNEL: 1}, version=Third(0.25))
        saver.put(at(Name.CHANNEL), made, {}, dict(made["channel_versions"]))
        saver.flush(Name.CHANNEL)
    with LSMSaver.from_conn_string(tmp_path.as_uri()) as fresh:
        found = fresh.get_tuple(at("channel"))
        assert found is not None
        assert found.checkpoint["channel_values"] == {"channel": 1}
        assert {type(each) for each in found.checkpoint["channel_versions"].values()} == {float}


def test_only_text_among_the_counters_names_channels() -> None:
    saver = LSMSaver.from_conn_string("memory://odd-counters")
    metadata: Any = {"counters_since_delta_snapshot": {7: 1, None: 2, "a": [1, 0]}}
    saver.put(at("t"), checkpoint({"a": 1}), metadata, {"a": 1})
    found = LSMSaver.from_conn_string("memory://odd-counters").get_tuple(at("t"))
    assert found is not None
    assert found.metadata == metadata
