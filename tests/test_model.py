"""LSMSaver and InMemorySaver, driven side by side with the same calls: every answer is the same, to the letter.

Two savers are open on one store, each call goes to either of them, through its sync or its async method; in
between, tails are flushed, segments rewritten and savers opened anew. What InMemorySaver gets wrong is not
generated here (a loop of parents hangs it; tests of their own cover that) or compared by the contract (`list`
goes by checkpoint id over all namespaces and threads, InMemorySaver namespace by namespace).
"""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.checkpoint.memory import InMemorySaver

from langgraph.checkpoint.lsm import LSMSaver
from tests.support.compare import exact

# What comes first is drawn most, so that calls meet.
THREADS = ["t", "t", "t", "t", "T", "../é"]
NAMESPACES = ["", "", "", "", "child", "child:1|grand:2"]
# Ids that sort like LangGraph's, and some that sort anywhere: no order of theirs is the order of the chain.
CHECKPOINT_IDS = [f"1f0ab{n:03x}-0000-6000-8000-0123456789ab" for n in (7, 1, 0xF00, 7, 1)] + ["é/1", "0"]
CHANNELS = ["messages", "a", "b.c", "q\"u'ote", "__start__"]
SPECIAL = ["__error__", "__interrupt__", "__resume__", "__scheduled__"]
TASKS = ["task-1", "task-2"]
TASK_PATHS = ["~__pregel_pull, b", "~__pregel_pull, a", ""]
METADATA_KEYS = ["source", "step", "a.b", 'q"', "user", "nested", "run_id"]

scalars = st.sampled_from([None, True, False, 0, 1, 1.0, -1, 2.5, "", "1", "loop", "nul\x00nul", "é"])
metadata_values = scalars | st.sampled_from([{"x": 1}, {"x": 1.0, "y": None}, {"y": {"z": [1, 2]}}, [1, 2], (1, 2), []])
metadata = st.dictionaries(st.sampled_from(METADATA_KEYS), metadata_values, max_size=4)
values = (
    scalars
    | st.binary(max_size=20)
    | st.sampled_from([{"k": [1, {"x": (1, 2)}]}, {1, 2}, uuid.UUID(int=7)])
    # A list that grows and one large text: what is stored as a patch, and what does not fit beside a commit.
    | st.integers(1, 60).map(lambda n: [{"role": "user", "content": f"message number {i} of some"} for i in range(n)])
    | st.integers(0, 2).map(lambda n: "".join(str((i * 7919 + n) % 1000003) for i in range(30_000)))
)
versions = (
    st.integers(1, 4)
    | st.sampled_from([0.5, 1.5, 2.5])
    | st.tuples(st.integers(1, 4), st.sampled_from([0.25, 0.75])).map(lambda v: f"{v[0]:032}.{v[1]:016}")
)


class Comparison(RuleBasedStateMachine):
    """The calls, and the comparison of their answers."""

    def __init__(self) -> None:
        super().__init__()
        self.url = self.make_url()
        self.model = InMemorySaver()
        self.savers = [self.open(), self.open()]
        self.copies = 0
        self.runs = 0

    def make_url(self) -> str:
        return f"memory://{uuid.uuid4().hex}"

    def open(self) -> LSMSaver:
        return LSMSaver.from_conn_string(self.url, fsync=False, compaction="off")

    def teardown(self) -> None:
        try:
            self.compare_everything((self.copies % 2, self.runs % 2 == 1))
        finally:
            for saver in self.savers:
                saver.close()

    def call(self, how: tuple[int, bool], method: str, *args: Any, **kwargs: Any) -> Any:
        """Call one of the savers, by its sync or its async method."""
        number, asynchronous = how
        saver = self.savers[number]
        if not asynchronous:
            return getattr(saver, method)(*args, **kwargs)

        async def ask() -> Any:
            return await getattr(saver, f"a{method}")(*args, **kwargs)

        return asyncio.run(ask())

    def list_with(self, how: tuple[int, bool], *args: Any, **kwargs: Any) -> list[CheckpointTuple]:
        number, asynchronous = how
        saver = self.savers[number]
        if not asynchronous:
            return list(saver.list(*args, **kwargs))

        async def ask() -> list[CheckpointTuple]:
            return [found async for found in saver.alist(*args, **kwargs)]

        return asyncio.run(ask())

    def threads(self) -> list[str]:
        return THREADS + [f"copy-{number}" for number in range(self.copies)]

    def stored(self, thread_id: str, namespace: str) -> dict[str, Any]:
        """The model's checkpoints of a namespace: id to (checkpoint, metadata, parent's id)."""
        return self.model.storage.get(thread_id, {}).get(namespace, {})

    def pick_thread(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(self.threads()), label="thread")

    def pick_id(self, data: st.DataObject, thread_id: str, namespace: str | None) -> str:
        """The id of a checkpoint that is mostly there."""
        stored = list(self.stored(thread_id, namespace or ""))[-3:]
        return data.draw(st.sampled_from([*stored, *stored, *CHECKPOINT_IDS[:3]]), label="checkpoint")

    def pick_parent(self, data: st.DataObject, thread_id: str, namespace: str, checkpoint_id: str) -> str | None:
        """A parent that closes no loop; mostly one that exists, at times none, or one that is not there yet."""
        stored = self.stored(thread_id, namespace)
        parent = data.draw(st.sampled_from([*stored, *stored, None, *CHECKPOINT_IDS[:2]]), label="parent")
        ancestor, seen = parent, set()
        while ancestor is not None and ancestor not in seen:
            if ancestor == checkpoint_id:
                return None
            seen.add(ancestor)
            ancestor = stored[ancestor][2] if ancestor in stored else None
        return parent

    def live_versions(self, thread_id: str, namespace: str, channel: str) -> list[Any]:
        """The versions of a channel that checkpoints refer to. Others may be gone after a rewrite."""
        found = []
        for checkpoint, _, _ in self.stored(thread_id, namespace).values():
            version = self.model.serde.loads_typed(checkpoint)["channel_versions"].get(channel)
            if version is not None and version not in found:
                found.append(version)
        return found

    hows = st.tuples(st.sampled_from([0, 1]), st.booleans())

    @initialize()
    def start_empty(self) -> None:
        assert list(self.savers[0].list(None)) == []

    @rule(
        data=st.data(), how=hows, namespace=st.sampled_from(NAMESPACES), checkpoint_id=st.sampled_from(CHECKPOINT_IDS)
    )
    def put(self, data: st.DataObject, how: tuple[int, bool], namespace: str, checkpoint_id: str) -> None:
        thread_id = self.pick_thread(data)
        parent = self.pick_parent(data, thread_id, namespace, checkpoint_id)
        channel_values, channel_versions, new_versions = {}, {}, {}
        for channel in data.draw(st.lists(st.sampled_from(CHANNELS), unique=True), label="channels"):
            live = self.live_versions(thread_id, namespace, channel)
            if live and data.draw(st.booleans(), label=f"{channel} is as it was"):
                channel_versions[channel] = live[-1]  # left out of the new versions: its value is the one stored before
                channel_values[channel] = "not to be stored"
                continue
            # At times a version that has a value already: the last one counts, for all who refer to it.
            version = data.draw(
                st.sampled_from(live[:2]) | versions if live else versions, label=f"version of {channel}"
            )
            channel_versions[channel] = new_versions[channel] = version
            if data.draw(st.sampled_from([True, True, True, False]), label="has a value"):
                channel_values[channel] = data.draw(values, label=f"value of {channel}")
        config: dict[str, Any] = {
            "configurable": {
                "thread_id": thread_id,
                "checkpoint_ns": namespace,
                "__pregel_internal": "left out of the metadata",
                **({"checkpoint_id": parent} if parent is not None else {}),
                **data.draw(st.sampled_from([{}, {"user": "configured"}, {"object": object, "user": 7}])),
            },
            **data.draw(st.sampled_from([{}, {"metadata": {"source": "config", "a.b": "x\x00y", "list": [1]}}])),
        }
        checkpoint: Any = {
            "v": 4,
            "id": checkpoint_id,
            "ts": "2026-01-01T00:00:00+00:00",
            "channel_values": channel_values,
            "channel_versions": channel_versions,
            "versions_seen": {"node": dict(channel_versions)},
            "updated_channels": data.draw(st.sampled_from([None, ["a"]])),
        }
        given = data.draw(metadata, label="metadata")
        expected = self.model.put(config, checkpoint, given, new_versions)  # type: ignore[arg-type]
        assert exact(self.call(how, "put", config, checkpoint, given, new_versions)) == exact(expected)

    @rule(data=st.data(), how=hows, namespace=st.sampled_from(NAMESPACES), steps=st.integers(2, 8))
    def run(self, data: st.DataObject, how: tuple[int, bool], namespace: str, steps: int) -> None:
        """A chain as a graph makes it: a channel that grows, one that changes, one that is known by its writes."""
        thread_id = self.pick_thread(data)
        stored = self.stored(thread_id, namespace)
        parent = max(stored, default=None)
        channel_versions: dict[str, Any] = {}
        said: list[str] = []
        for step in range(steps):
            self.runs += 1
            config = self.config(thread_id, namespace, parent)
            said = [*said, f"message {self.runs} of the run, some words long"]
            new_versions: dict[str, Any] = {"messages": f"{self.runs:032}.5"}
            if step % 3 == 0:
                new_versions["a"] = f"{self.runs:032}.5"
            channel_versions = {**channel_versions, **new_versions, "delta": f"{self.runs:032}.5"}
            checkpoint: Any = {
                "v": 4,
                "id": f"1f0ac{self.runs:03x}-0000-6000-8000-0123456789ab",
                "ts": "2026-01-01T00:00:00+00:00",
                "channel_values": {"messages": said, "a": self.runs},
                "channel_versions": channel_versions,
                "versions_seen": {},
                "updated_channels": ["messages"],
            }
            given: Any = {"source": "loop", "step": step, "run_id": f"run-{step % 3}"}
            for saver in (self.model.put, lambda *args: self.call(how, "put", *args)):
                last = saver(config, checkpoint, given, new_versions)
            for task_id in TASKS:
                for again in range(
                    2 if step == steps - 1 else 1
                ):  # of what is written twice, either the first or the last
                    writes = [("delta", self.runs), ("a", (task_id, again)), ("__resume__", again)]
                    path = TASK_PATHS[(self.runs + again) % 3]
                    self.model.put_writes(last, writes, task_id, path)
                    self.call(how, "put_writes", last, writes, task_id, path)
            parent = checkpoint["id"]

    @rule(
        data=st.data(),
        how=hows,
        namespace=st.sampled_from(NAMESPACES),
        writes=st.lists(st.tuples(st.sampled_from(CHANNELS + SPECIAL), values), max_size=4),
        kind=st.sampled_from([list, tuple, deque]),
        task_id=st.sampled_from(TASKS),
        task_path=st.sampled_from(TASK_PATHS),
    )
    def put_writes(
        self,
        data: st.DataObject,
        how: tuple[int, bool],
        namespace: str,
        writes: list[tuple[str, Any]],
        kind: type,
        task_id: str,
        task_path: str,
    ) -> None:
        thread_id = self.pick_thread(data)
        config = self.config(thread_id, namespace, self.pick_id(data, thread_id, namespace))
        self.model.put_writes(config, writes, task_id, task_path)
        assert self.call(how, "put_writes", config, kind(writes), task_id, task_path) is None

    def config(self, thread_id: str, namespace: str | None, checkpoint_id: str | None = None) -> Any:
        configurable = {"thread_id": thread_id, "checkpoint_ns": namespace, "checkpoint_id": checkpoint_id}
        return {"configurable": {key: value for key, value in configurable.items() if value is not None}}

    @rule(how=hows)
    def compare_everything(self, how: tuple[int, bool]) -> None:
        """Every checkpoint of every thread, by each way that leads to it."""
        self.compare_lists(how, None)
        for thread_id in dict.fromkeys(self.threads()):
            metadata: dict[str, Any] = {}
            for namespace in dict.fromkeys(NAMESPACES):
                stored = self.stored(thread_id, namespace)
                if not stored and namespace:
                    continue
                for checkpoint_id in [None, "", "no such id", *stored]:
                    config = self.config(thread_id, namespace or None, checkpoint_id)  # the root's may be left out
                    config["configurable"]["more"] = "than an address"
                    assert exact(self.call(how, "get_tuple", config)) == exact(self.model.get_tuple(config))
                    self.compare_histories(how, config, [*CHANNELS, "delta", "__error__"])
                for _, packed, _ in stored.values():
                    metadata |= self.model.serde.loads_typed(packed)
            config = self.config(thread_id, None)
            for limit in (None, 0, 1):
                self.compare_lists(how, config, limit=limit, before=[None, *self.stored(thread_id, "")][-1])
            for key, value in metadata.items():
                self.compare_lists(how, config, wanted={key: value}, limit=3)
                self.compare_lists(how, config, wanted={key: None, "absent": None})
                self.compare_lists(how, config, wanted={key: float(value) if isinstance(value, int) else value})

    def compare_lists(
        self,
        how: tuple[int, bool],
        config: Any,
        *,
        wanted: dict[str, Any] | None = None,
        before: str | None = None,
        limit: int | None = None,
    ) -> None:
        cursor: Any = None if before is None else self.config("", None, before)
        expected = list(self.model.list(config, filter=wanted, before=cursor))
        got = self.list_with(how, config, filter=wanted, before=cursor, limit=limit)
        ids = sorted((found.checkpoint["id"] for found in expected), reverse=True)
        assert [found.checkpoint["id"] for found in got] == ids[:limit]
        # Among equal ids of several namespaces or threads, any order will do.
        by_config = {repr(found.config): exact(found) for found in expected}
        assert [exact(found) for found in got] == [by_config[repr(found.config)] for found in got]
        assert len({repr(found.config) for found in got}) == len(got)

    def compare_histories(self, how: tuple[int, bool], config: Any, channels: list[str]) -> None:
        expected = self.model.get_delta_channel_history(config=config, channels=channels)
        got = self.call(how, "get_delta_channel_history", config=config, channels=channels)
        assert exact(dict(got)) == exact(dict(expected))

    @rule(
        data=st.data(),
        how=hows,
        namespace=st.sampled_from([*NAMESPACES, None, None]),
        everywhere=st.sampled_from([False, False, False, True]),
        checkpoint_id=st.sampled_from([None, None, None, *CHECKPOINT_IDS[:2]]),
        before=st.sampled_from([None, None, *CHECKPOINT_IDS]),
        limit=st.sampled_from([None, None, 0, 1, 2, 5]),
        wanted=st.none() | st.dictionaries(st.sampled_from([*METADATA_KEYS, "absent"]), metadata_values, max_size=2),
    )
    def list_checkpoints(
        self,
        data: st.DataObject,
        how: tuple[int, bool],
        namespace: str | None,
        everywhere: bool,
        checkpoint_id: str | None,
        before: str | None,
        limit: int | None,
        wanted: dict[str, Any] | None,
    ) -> None:
        config = None if everywhere else self.config(self.pick_thread(data), namespace, checkpoint_id)
        self.compare_lists(how, config, wanted=wanted, before=before, limit=limit)

    @rule(data=st.data(), how=hows, rarely=st.sampled_from([False, False, False, True]))
    def delete_thread(self, data: st.DataObject, how: tuple[int, bool], rarely: bool) -> None:
        thread_id = self.pick_thread(data) if rarely else "T"
        self.model.delete_thread(thread_id)
        assert self.call(how, "delete_thread", thread_id) is None

    @rule(data=st.data(), how=hows)
    @precondition(lambda self: self.copies < 3)
    def copy_thread(self, data: st.DataObject, how: tuple[int, bool]) -> None:
        source, target = self.pick_thread(data), f"copy-{self.copies}"
        self.copies += 1
        for namespace, checkpoints in list(self.model.storage.get(source, {}).items()):
            if checkpoints:
                self.model.storage[target][namespace].update(checkpoints)
        for (thread_id, *rest), writes in list(self.model.writes.items()):
            if thread_id == source:
                self.model.writes[(target, *rest)].update(writes)  # type: ignore[index]
        for (thread_id, *rest), blob in list(self.model.blobs.items()):
            if thread_id == source:
                self.model.blobs[(target, *rest)] = blob  # type: ignore[index]
        assert self.call(how, "copy_thread", source, target) is None

    @rule(data=st.data(), how=hows, method=st.sampled_from(["flush", "compact"]))
    def rearrange(self, data: st.DataObject, how: tuple[int, bool], method: str) -> None:
        self.call(how, method, self.pick_thread(data))

    @rule(number=st.sampled_from([0, 1]))
    def reopen(self, number: int) -> None:
        opened = self.open()  # before the other is closed: a store in memory lives on
        self.savers[number].close()
        self.savers[number] = opened


class ComparisonOnFiles(Comparison):
    """The same in a directory."""

    def make_url(self) -> str:
        self.folder = tempfile.TemporaryDirectory()
        return Path(self.folder.name, "store").as_uri()

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


MACHINES = pytest.mark.parametrize("machine", [Comparison, ComparisonOnFiles])
FAST = settings(
    max_examples=25, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
LONG = settings(FAST, max_examples=200, stateful_step_count=60, derandomize=False, print_blob=True)


@MACHINES
def test_every_answer_is_that_of_the_saver_in_memory(machine: type[Comparison]) -> None:
    run_state_machine_as_test(machine, settings=FAST)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@MACHINES
def test_every_answer_is_that_of_the_saver_in_memory_at_length(machine: type[Comparison]) -> None:
    run_state_machine_as_test(machine, settings=LONG)
