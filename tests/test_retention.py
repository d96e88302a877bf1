"""Retention: what has expired is invisible at once, and physically gone after the next rewrite.

The clock of the engine is turned by the tests: it is what `Now` answers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lsm.drive
from langgraph.checkpoint.lsm import LSMSaver, Retention
from lsm.steps import DeleteIf, PutIf
from tests.conftest import Backend
from tests.support.checkpoints import at, checkpoint, ids, listed, put
from tests.support.compare import exact
from tests.support.graphs import Run, delta, finish, line, nested

DAY = 86_400.0


class Clock:
    """The `time` of `lsm.drive`, set ahead of the real one by `ahead` seconds."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.ahead = 0.0

    def time(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lsm.drive, "time", clock)
    return clock


def expire(saver: LSMSaver, thread_id: str = "thread") -> bool:
    return saver._runtime.run(saver._engine.expire(thread_id))


def collect(saver: LSMSaver) -> None:
    saver._runtime.run(saver._engine.collect(0))


def daily(saver: LSMSaver, clock: Clock, count: int, namespace: str = "", **metadata: Any) -> list[Any]:
    """A chain with a checkpoint a day, each with a write. The clock is a day after the last one in the end."""
    configs: list[Any] = []
    for number in range(count):
        parent = configs[-1] if configs else at("thread", namespace=namespace)
        configs.append(put(saver, parent, {"day": number}, step=number, **metadata))
        saver.put_writes(configs[-1], [("day", f"write of day {number}")], "task")
        clock.ahead += DAY
    return configs


def everything(saver: LSMSaver) -> list[Any]:
    return [exact(found) for found in saver.list(None)]


def without_parents_that_went(saver: LSMSaver) -> list[Any]:
    return [exact(found._replace(parent_config=None)) for found in saver.list(None)]


@pytest.mark.parametrize("flushed", [True, False], ids=["in segments", "in the manifest"])
def test_by_age(backend: Backend, clock: Clock, flushed: bool) -> None:
    with (
        backend.open(retention=Retention(max_age=timedelta(days=2, hours=12))) as saver,
        backend.open() as other,
    ):
        configs = daily(saver, clock, 5)
        if flushed:
            saver.flush("thread")
        # Now is day 5. What was put on days 3 and 4 is younger than two days and a half.
        assert listed(saver, at("thread")) == ids(configs)[:2:-1]
        assert listed(saver, None) == ids(configs)[:2:-1]
        assert listed(saver, at("thread"), before=configs[3]) == []
        assert listed(saver, at("thread"), filter={"step": 2}) == []
        assert listed(saver, at("thread"), limit=1) == ids(configs)[4:]
        for number, config in enumerate(configs):
            assert (saver.get_tuple(config) is not None) == (number >= 3)
            assert other.get_tuple(config) is not None, "a reader without retention sees what is still there"
        assert listed(other, at("thread")) == ids(configs)[::-1]
        shown = without_parents_that_went(saver)

        assert expire(saver)
        assert listed(other, at("thread")) == ids(configs)[:2:-1]
        assert without_parents_that_went(saver) == without_parents_that_went(other) == shown
        assert not expire(saver), "there was nothing left to remove"

        clock.ahead += 1000 * DAY
        assert listed(saver, at("thread")) == ids(configs)[4:], "the latest does not grow old"
        assert expire(saver)
        found = other.get_tuple(at("thread"))
        assert found is not None
        assert found.pending_writes == [("task", "day", "write of day 4")]
        assert found.checkpoint["channel_values"] == {"day": 4}
        assert listed(other, at("thread")) == ids(configs)[4:]

        # The thread goes on from there.
        again = put(saver, configs[4], {"day": 5}, step=5)
        assert listed(saver, at("thread")) == ids([again])
        assert listed(other, at("thread")) == ids([again, configs[4]])


def test_by_count_in_every_namespace(backend: Backend, clock: Clock) -> None:
    with backend.open(retention=Retention(max_checkpoints=2)) as saver, backend.open() as other:
        root, child = daily(saver, clock, 4), daily(saver, clock, 3, "child")
        once = daily(saver, clock, 1, "once")
        expected = sorted(ids([*root[2:], *child[1:], *once]), reverse=True)
        assert listed(saver, None) == expected
        assert len(listed(other, None)) == 8
        assert expire(saver)
        assert listed(other, None) == listed(saver, None) == expected
        # The count moves on with every new checkpoint, and at once.
        new = put(saver, root[3], {"day": 9}, step=9)
        assert listed(saver, at("thread")) == ids([new, root[3]])
        assert saver.get_tuple(root[2]) is None


def test_the_latest_is_the_highest_id_not_the_youngest(backend: Backend, clock: Clock) -> None:
    with backend.open(retention=Retention(max_age=timedelta(days=1))) as saver:
        made = [checkpoint({"a": number}) for number in range(3)]
        for number in (2, 1, 0):  # the highest id is the oldest
            saver.put(at("thread"), made[number], {"source": "loop", "step": number}, {"a": 1})
            clock.ahead += 10 * DAY
        assert listed(saver, at("thread")) == [made[2]["id"]]
        expire(saver)
        assert listed(saver, at("thread")) == [made[2]["id"]]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_readers_of_both_kinds(backend: Backend, clock: Clock, asynchronous: bool) -> None:
    with backend.open(retention=Retention(max_checkpoints=1)) as saver:
        old, new = daily(saver, clock, 2)
        if asynchronous:
            assert await saver.aget_tuple(old) is None
            assert [found.config async for found in saver.alist(at("thread"))] == [new]
            history = await saver.aget_delta_channel_history(config=old, channels=["day"])
        else:
            assert saver.get_tuple(old) is None
            assert [found.config for found in saver.list(at("thread"))] == [new]
            history = saver.get_delta_channel_history(config=old, channels=["day"])
        assert history == {"day": {"writes": []}}


def test_what_expired_is_physically_gone(tmp_path: Path, clock: Clock) -> None:
    url = tmp_path.as_uri()
    with LSMSaver.from_conn_string(url, compression="none", retention=Retention(max_checkpoints=1)) as saver:
        configs: list[Any] = []
        for number in range(4):
            # Values of both kinds: those that lie among the records, and those that get segments of their own.
            values = {"small": f"small-{number}", "large": f"large-{number}" * 10_000}
            configs.append(put(saver, configs[-1] if configs else at("thread"), values, mark=f"metadata-{number}"))
            saver.put_writes(configs[-1], [("small", f"written-{number}")], f"task-{number}")
        marks = [f"{kind}-{number}" for kind in ("small", "large", "metadata", "written") for number in range(4)]
        assert left(tmp_path, marks) == set(marks)
        expire(saver)
        collect(saver)
        assert left(tmp_path, marks) == {"small-3", "large-3", "metadata-3", "written-3"}
        assert left(tmp_path, ids(configs)) == set(ids(configs)[2:])  # the parent's id is the child's own, too
        found = saver.get_tuple(at("thread"))
        assert found is not None
        assert found.checkpoint["channel_values"] == {"small": "small-3", "large": "large-3" * 10_000}


def left(folder: Path, marks: list[str]) -> set[str]:
    """Which of the marks are in some file."""
    stored = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return {mark for mark in marks if mark.encode() in stored}


def test_idle_threads_are_removed_with_all_of_their_objects(tmp_path: Path, clock: Clock) -> None:
    url = (tmp_path / "store").as_uri()
    retention = Retention(idle=timedelta(days=30))
    with LSMSaver.from_conn_string(url, retention=retention) as saver, LSMSaver.from_conn_string(url) as other:
        config = put(saver, at("thread"), {"large": "x" * 100_000})
        saver.flush("thread")
        put(saver, at("busy"), {"a": 1})
        clock.ahead += 29 * DAY
        put(saver, at("busy"), {"a": 2})
        assert not expire(saver)
        saver.put_writes(config, [("large", 1)], "late")  # a write is activity, too
        clock.ahead += 29 * DAY
        assert not expire(saver)
        assert saver.get_tuple(at("thread")) is not None
        clock.ahead += 2 * DAY
        assert saver.get_tuple(at("thread")) is None
        assert listed(saver, at("thread")) == []
        assert other.get_tuple(at("thread")) is not None
        expire(saver, "busy")
        assert expire(saver)
        assert not expire(saver)
        assert other.get_tuple(at("thread")) is None
        assert [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()] == ["lsm.json"]

        # The id is free. What is stored now is not idle.
        again = put(saver, at("thread"), {"a": 1})
        assert listed(saver, at("thread")) == listed(other, None) == ids([again])


def test_a_thread_that_was_written_meanwhile_is_not_removed(
    backend: Backend, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with backend.open(retention=Retention(idle=timedelta(days=1))) as saver, backend.open() as other:
        put(saver, at("thread"), {"a": 1})
        clock.ahead += 2 * DAY
        execute, late = saver._storage.execute, []

        def meddle(request: Any) -> Any:
            if isinstance(request, DeleteIf | PutIf) and not late:  # just before the manifest would go
                late.append(put(other, at("thread"), {"a": 2}))
            return execute(request)

        monkeypatch.setattr(saver._storage, "execute", meddle)
        assert not expire(saver)
        assert ids(late)[0] in listed(other, at("thread"))


def test_calls_of_subgraphs_expire_with_the_root_that_they_started_from(backend: Backend, clock: Clock) -> None:
    with backend.open(retention=Retention(max_age=timedelta(days=1))) as saver, backend.open() as other:
        run = Run(nested(saver), "thread", "sync", asynchronous=False)
        finish(run.invoke({"note": "note 0"}))
        finish(run.update({"log": ["answered from the side"]}, "end"))
        namespaces = {found.config["configurable"]["checkpoint_ns"] for found in saver.list(None)}
        calls = {namespace for namespace in namespaces if ":" in namespace}
        assert calls
        clock.ahead += 2 * DAY
        finish(run.invoke({"note": "note 1"}))
        shown = {found.config["configurable"]["checkpoint_ns"] for found in saver.list(None)}
        assert shown & calls == set(), "their root checkpoints have expired"
        assert {"", "remembers"} < shown
        assert any(":" in namespace for namespace in shown), "those of the new run are there"
        for call in calls:
            assert saver.get_tuple(at("thread", namespace=call)) is None
            assert other.get_tuple(at("thread", namespace=call)) is not None
        before = without_parents_that_went(saver)
        waiting = finish(run.state(subgraphs=True))
        expire(saver)
        assert without_parents_that_went(other) == before
        still = finish(run.state(subgraphs=True))
        assert (still.values, still.next, still.interrupts) == (waiting.values, waiting.next, waiting.interrupts)


@pytest.mark.parametrize("frequency", [1000, 4], ids=["no snapshots", "some"])
def test_what_a_delta_channel_is_rebuilt_from_stays_hidden(backend: Backend, clock: Clock, frequency: int) -> None:
    with backend.open(retention=Retention(max_checkpoints=2)) as saver, backend.open() as other:
        graph = delta(saver, frequency)
        run = Run(graph, "thread", "sync", asynchronous=False)
        for number in range(5):
            finish(run.invoke(line(f"turn {number}")))
            if number % 2:
                expire(saver)
            states = finish(run.history())
            assert len(states) == 2
            for state in states:
                assert state.values["log"] == state.values["plain"]
        expire(saver)
        collect(saver)
        assert [exact(found) for found in other.list(None)] == everything(saver)
        assert len(everything(other)) == 2
        state = finish(Run(delta(other, frequency), "thread", "sync", asynchronous=False).state())
        assert state.values["log"] == state.values["plain"]
        assert len(state.values["log"]) == 5 * 4


# What is shown and what is kept.

NAMESPACES = st.sampled_from(["", "", "memory", "call:1", "call:2", "memory|call:3"])
PUT = st.tuples(NAMESPACES, st.integers(0, 9), st.integers(0, 4), st.integers(0, 9))  # id, hours passed, root


@given(
    st.lists(PUT, min_size=1, max_size=14),
    st.none() | st.integers(1, 20),
    st.none() | st.integers(1, 4),
    st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_shown_is_what_is_kept(
    puts: list[tuple[str, int, int, int]], hours: int | None, count: int | None, flushed: bool
) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    retention = Retention(max_age=timedelta(hours=hours) if hours else None, max_checkpoints=count)
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lsm.drive, "time", clock)
        with LSMSaver.from_conn_string(url, retention=retention) as saver, LSMSaver.from_conn_string(url) as other:
            for namespace, number, later, root in puts:
                made = checkpoint({})
                made["id"] = f"id-{number}"
                metadata: Any = {"source": "loop", "step": 0}
                if namespace:
                    metadata["parents"] = {"": f"id-{root}"}
                saver.put(at("thread", namespace=namespace), made, metadata, {})
                clock.ahead += later * 3600 + 1  # not the very hour that is the limit: the clock goes on meanwhile
            if flushed:
                saver.flush("thread")
            for namespace in {namespace for namespace, *_ in puts}:
                latest = saver.get_tuple(at("thread", namespace=namespace))
                if ":" not in namespace.rsplit("|", 1)[-1]:
                    assert latest is not None, "the latest of a live namespace stays"
            shown = everything(saver)
            expire(saver)
            assert everything(other) == shown
            assert everything(saver) == shown


@pytest.mark.parametrize(
    "make",
    [
        lambda: Retention(max_age=timedelta(0)),
        lambda: Retention(max_age=3600),  # type: ignore[arg-type]
        lambda: Retention(max_checkpoints=0),
        lambda: Retention(max_checkpoints=True),
        lambda: Retention(max_checkpoints=2.0),  # type: ignore[arg-type]
        lambda: Retention(idle=timedelta(days=-1)),
    ],
)
def test_retentions_that_make_no_sense_are_refused(make: Callable[[], Retention]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()


def test_a_retention_is_one() -> None:
    with pytest.raises(TypeError, match="retention must be a Retention"):
        LSMSaver.from_conn_string("memory://", retention={"max_age": 1})
