"""Names without number: thousands of channels, writes and namespaces, long ids. All of it just works, and no manifest
and no header outgrows its bound."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from operator import add
from random import Random
from typing import Annotated, Any, TypedDict

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from langgraph.graph import StateGraph
from langgraph.types import Send

from langgraph.checkpoint.lsm import LSMSaver
from lsm.format.manifest import PRELUDE_SIZE
from lsm.limits import FILES, HEADER, MANIFEST, OBJECTS
from lsm.storage.memory import MemoryStorage
from lsm.verify import verify_store
from tests.conftest import Backend
from tests.support.checkpoints import at, checkpoint, ids, listed, put


class Measured(MemoryStorage):
    """A storage that refuses what no manifest may be."""

    def _store(self, key: str, body: bytes) -> Any:
        if key.startswith("manifests/"):
            _, _, length, _ = struct.unpack_from("<6sHI8s", body)
            assert PRELUDE_SIZE + length <= HEADER, f"a header of {PRELUDE_SIZE + length:,} bytes"
            assert len(body) <= MANIFEST, f"a manifest of {len(body):,} bytes"
        return super()._store(key, body)


def _sound(saver: LSMSaver) -> None:
    assert saver._runtime.run(verify_store(saver._engine.process)).problems == {}


def _check_thread(open_saver: Any, thread_id: str, expected: list[Any]) -> None:
    """A thread, as a process finds it that was not there, before and after it is compacted: (id, values, writes) of
    its checkpoints, the newest first."""
    for compacted in (False, True):
        with open_saver() as saver:
            if compacted:
                saver.compact(thread_id)
            latest = saver.get_tuple(at(thread_id))
            assert latest is not None
            assert latest.checkpoint["id"] == expected[0][0]
            assert [_described(found) for found in saver.list(at(thread_id))] == expected
            for id_, values, writes in expected:
                assert _described(saver.get_tuple(at(thread_id, id_))) == (id_, values, writes)
            _sound(saver)


def _described(found: Any) -> Any:
    return found.checkpoint["id"], found.checkpoint["channel_values"], found.pending_writes


def _writes(number: int, channels: int) -> list[tuple[str, Any]]:
    return [(f"channel-{each % channels}", each) for each in range(number)]


@pytest.mark.parametrize("channels", [1, 1000])
def test_writes_by_the_thousand_in_one_call(backend: Backend, channels: int) -> None:
    _many_writes(backend, 5000, channels)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 100_000])
def test_100_000_writes_in_one_call(backend: Backend, channels: int) -> None:
    _many_writes(backend, 100_000, channels)


def _many_writes(backend: Backend, number: int, channels: int) -> None:
    writes = _writes(number, channels)
    with backend.open(compaction="off") as saver:
        config = put(saver, at("t"), {"a": 1})
        saver.put_writes(config, writes, "task")
        saver.put_writes(config, writes[:10], "task")  # again: the first counts
    pending = [("task", channel, value) for channel, value in writes]
    _check_thread(lambda: backend.open(compaction="off"), "t", [(*ids([config]), {"a": 1}, pending)])


def test_channels_by_the_thousand(backend: Backend) -> None:
    _many_channels(backend, 3000)


@pytest.mark.slow
def test_20_000_channels(backend: Backend) -> None:
    _many_channels(backend, 20_000)


def _many_channels(backend: Backend, number: int) -> None:
    state: dict[str, Any] = {f"channel-{each}": each for each in range(number)}
    expected = []
    with backend.open(compaction="off") as saver:
        config = put(saver, at("t"), state)
        expected.append((*ids([config]), dict(state), []))
        for step in range(3):
            state["channel-7"] = f"step {step}"
            held = checkpoint(state)
            before = saver.get_tuple(config)
            assert before is not None
            version = saver.get_next_version(before.checkpoint["channel_versions"]["channel-7"], None)  # type: ignore[arg-type]
            held["channel_versions"] = {**before.checkpoint["channel_versions"], "channel-7": version}
            config = saver.put(config, held, {}, {"channel-7": version})
            saver.put_writes(config, [("channel-8", step)], "task")
            expected.append((*ids([config]), dict(state), [("task", "channel-8", step)]))
    _check_thread(lambda: backend.open(compaction="off"), "t", expected[::-1])


class Fan(TypedDict):
    """What the nodes of a fan tell."""

    seen: Annotated[list[int], add]


def test_4_000_sends_from_one_node(backend: Backend) -> None:
    builder = StateGraph(Fan)
    builder.add_node("start", lambda state: {"seen": []})
    builder.add_node("one", lambda number: {"seen": [number]})
    builder.set_entry_point("start")
    builder.add_conditional_edges("start", lambda state: [Send("one", number) for number in range(4000)], ["one"])
    config: Any = {"configurable": {"thread_id": "t"}, "max_concurrency": 16}
    with backend.open(compaction="off") as saver:
        graph = builder.compile(checkpointer=saver, interrupt_before=["one"])
        graph.invoke({"seen": []}, config)
    with backend.open(compaction="off") as saver:
        state = builder.compile(checkpointer=saver).get_state(config)
        assert len(state.tasks) == 4000
        _sound(saver)
        saver.compact("t")
        found = saver.get_tuple(config)
        assert found is not None
        assert [value.arg for _, _, value in found.pending_writes or []] or state.next.count("one") == 4000


def test_a_state_of_1_500_keys(backend: Backend) -> None:
    keys = [f"key_{number}" for number in range(1500)]
    wide: Any = TypedDict("Wide", dict.fromkeys(keys, int))  # type: ignore[misc]
    builder = StateGraph(wide)
    builder.add_node("all", lambda state: dict.fromkeys(keys, 1))
    builder.add_node("some", lambda state: dict.fromkeys(keys[::100], 2))
    builder.set_entry_point("all")
    builder.add_edge("all", "some")
    config: Any = {"configurable": {"thread_id": "t"}}
    expected = dict.fromkeys(keys, 1) | dict.fromkeys(keys[::100], 2)
    with backend.open(compaction="off") as saver:
        graph = builder.compile(checkpointer=saver)
        assert graph.invoke({keys[0]: 0}, config) == expected
        assert graph.invoke({keys[0]: 0}, config) == expected
    with backend.open(compaction="off") as saver:
        graph = builder.compile(checkpointer=saver)
        states = [state.values for state in graph.get_state_history(config)]
        assert states[0] == expected
        assert len(states) == 8
        saver.compact("t")
        assert [state.values for state in graph.get_state_history(config)] == states
        _sound(saver)


# Any names at all.

LONG = st.builds(
    lambda text, times: text * times, st.sampled_from(["a", "b\0", "é", "\U0010ffff"]), st.integers(0, 3000)
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["put", "writes", "wide", "spaces", "flush", "compact", "grown"]),
        LONG,
        LONG,
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("examples", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_no_names_make_a_manifest_or_header_outgrow_its_bound(examples: int) -> None:
    options: Any = {"derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck)}
    # Without shrinking, which takes minutes here.
    settings(max_examples=examples, phases=[Phase.generate], **options)(given(CALLS, st.booleans())(_check_bounds))()


def _text(length: int, seed: int) -> str:
    """A text that hardly compresses."""
    return "".join(chr(33 + each) for each in Random(seed).choices(range(90), k=length))


LARGE, OTHER = _text(150_000, 1), _text(150_000, 2)
SEQUENCES: dict[str, list[Any]] = {
    "large ids and parents": [("put", "", "first", 1), ("put", "", LARGE, 1), ("put", "", OTHER, 1)] * 2,
    "many ids and parents": [("spaces", "a", LARGE[:4000], 40), ("spaces", "a", OTHER[:4000], 40)] * 2,
    "large namespaces": [("spaces", LARGE, "a", 3), ("put", OTHER, "", 1), ("put", "", "", 1)] * 2,
    "a wide state": [("wide", LARGE[:9], OTHER[:99], 40)] * 4,
    "many strays": [("writes", LARGE[:4000], OTHER[:4000], 40)] * 3,
    "large tasks": [("put", "", "", 1), ("writes", "0", LARGE, 2), ("writes", LARGE, OTHER, 2)] * 2,
    "patches on long chains": [("grown", LARGE[:99], "a", 40), ("put", "", "a", 1), ("compact", "", "", 1)] * 3,
    "names above all others": [("spaces", "\U0010ffff" * 3000, "a", 20), ("flush", "", "", 1), ("compact", "", "", 1)],
}


@pytest.mark.parametrize("objects", [False, True], ids=["file", "objects"])
@pytest.mark.parametrize("calls", SEQUENCES.values(), ids=SEQUENCES.keys())
def test_manifest_and_header_keep_their_bounds(calls: list[Any], objects: bool) -> None:
    _check_bounds(calls, objects)


def _check_bounds(calls: list[Any], objects: bool) -> None:
    storage = Measured()
    saver = LSMSaver.from_storage(storage, compaction="off")
    saver._engine.process.limits = OBJECTS if objects else FILES
    stored = set()
    for number, (kind, name, other, size) in enumerate(calls):
        stored.update(_call(saver, kind, number, name, other, size))
    fresh = LSMSaver.from_storage(storage, compaction="off")
    assert sorted(listed(fresh, at("t", namespace=None))) == sorted(stored)  # type: ignore[arg-type]
    _sound(fresh)


def _call(saver: LSMSaver, kind: str, number: int, name: str, other: str, size: int) -> Iterator[str]:
    id_ = f"{number:05}-{other}"
    if kind == "put":
        yield _put(saver, name, id_, other or None, {"a": number})
    elif kind == "writes":
        for each in range(size):
            saver.put_writes(at("t", f"{each}-{name}", namespace=other), [(name, each)], f"task-{each}", other)
    elif kind == "wide":
        yield _put(saver, "", id_, name or None, {f"{other[:200]}{each}": each for each in range(size * 30)})
    elif kind == "spaces":
        for each in range(size):
            yield _put(saver, f"{name}|{each}", f"{each}-{id_}", other or None, {"a": each})
    elif kind == "grown":
        parent = None
        for each in range(5):
            values: Any = {f"{name[:99]}{channel}": "x" * 700 * (each + 1) for channel in range(size)}
            parent = _put(saver, "grown", f"{each}-{id_}", parent, values, version=f"{number:05}.{each}")
            yield parent
    elif kind == "flush":
        saver.flush("t")
    else:
        saver.compact("t")


def _put(
    saver: LSMSaver, namespace: str, id_: str, parent: str | None, values: dict[str, Any], version: Any = None
) -> str:
    made = checkpoint(values, version=version or id_[:40])
    made["id"] = id_
    parents = {"": parent} if parent else {}
    saver.put(at("t", parent, namespace=namespace), made, {"parents": parents}, dict(made["channel_versions"]))
    return id_
