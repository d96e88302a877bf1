"""`concurrent_runs="refuse"`: of two runs that go on from one head one goes on, and all that is meant goes on, too.

A race is made certain by runs that wait until all of them have read the same head.
"""

from __future__ import annotations

import asyncio
import json
import operator
import pickle
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.graph import START, StateGraph
from langgraph.types import Command

from langgraph.checkpoint.lsm import LSMSaver
from lsm.errors import ConcurrentRunError
from tests.conftest import Backend
from tests.support.checkpoints import at, chain, checkpoint, ids, listed, put
from tests.support.compare import exact
from tests.support.graphs import DURABILITIES, SCENARIOS, Run, chat, delta, finish, line, nested, review, said
from tests.support.processes import output, running

pytestmark = pytest.mark.processes

LOCAL = pytest.mark.parametrize("backend", ["memory", "file"], indirect=True)


def everything(saver: LSMSaver) -> list[Any]:
    return [exact(found) for found in saver.list(None)]


# The rule, call by call.


@pytest.mark.parametrize("flushed", [False, True], ids=["in the manifest", "in segments"])
def test_a_put_that_does_not_go_on_from_the_head_is_refused(backend: Backend, flushed: bool) -> None:
    with backend.open(concurrent_runs="refuse") as saver, backend.open(concurrent_runs="refuse") as other:
        first = put(saver, at("thread"), {"a": 1})
        second = put(saver, first, {"a": 2})
        if flushed:
            saver.flush("thread")
        before = everything(saver)
        for one in (saver, other):
            for parent, expected in ((at("thread", ids([first])[0]), ids([first])[0]), (at("thread"), None)):
                made = checkpoint({"a": 3})
                with pytest.raises(ConcurrentRunError) as refused:
                    one.put(parent, made, {"source": "loop", "step": 9}, {"a": 1})
                error = refused.value
                assert (error.thread_id, error.namespace) == ("thread", "")
                assert (error.expected, error.found) == (expected, ids([second])[0])
                for part in ("'thread'", "''", repr(expected), repr(ids([second])[0])):
                    assert part in str(error)
                assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
                assert one.get_tuple(at("thread", made["id"])) is None
        assert everything(saver) == everything(other) == before
        # Other namespaces and threads have heads of their own.
        put(other, at("thread", namespace="child"), {"a": 1})
        put(other, at("elsewhere"), {"a": 1})
        third = put(other, at("thread", ids([second])[0]), {"a": 3}, source="loop")
        assert listed(saver, at("thread")) == ids([third, second, first])


def test_the_default_is_to_fork(backend: Backend) -> None:
    with backend.open() as saver:
        first = put(saver, at("thread"), {"a": 1})
        made = [saver.put(first, checkpoint({"a": n}), {"source": "loop", "step": 1}, {"a": 1}) for n in (2, 3)]
        assert listed(saver, at("thread")) == ids([*made[::-1], first])


@pytest.mark.parametrize("source", ["update", "fork"])
def test_what_is_meant_is_accepted(backend: Backend, source: str) -> None:
    with backend.open(concurrent_runs="refuse") as saver:
        configs = chain(saver, "thread", [{"a": 1}, {"a": 2}, {"a": 3}])
        made = saver.put(configs[0], checkpoint({"a": 4}), {"source": source, "step": 1}, {"a": 1})  # type: ignore[typeddict-item]
        assert saver.get_tuple(at("thread")).config == made  # type: ignore[union-attr]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_a_checkpoint_that_was_asked_for_by_its_id_is_addressed(backend: Backend, asynchronous: bool) -> None:
    with backend.open(concurrent_runs="refuse") as saver, backend.open(concurrent_runs="refuse") as other:
        configs = chain(saver, "thread", [{"a": 1}, {"a": 2}, {"a": 3}])
        assert (await saver.aget_tuple(configs[0]) if asynchronous else saver.get_tuple(configs[0])) is not None
        metadata: Any = {"source": "input", "step": 1}
        with pytest.raises(ConcurrentRunError):
            other.put(configs[0], checkpoint({"a": 4}), metadata, {"a": 1})  # another process has not asked
        made = checkpoint({"a": 4})
        if asynchronous:
            await saver.aput(configs[0], made, metadata, {"a": 1})
        else:
            saver.put(configs[0], made, metadata, {"a": 1})
        assert listed(saver, at("thread"))[0] == made["id"]


def test_what_is_meant_does_not_hang_on_the_cache(backend: Backend) -> None:
    with backend.open(concurrent_runs="refuse", cache_bytes=0) as saver:
        configs = chain(saver, "thread", [{"a": 1}, {"a": 2}])
        chain(saver, "another", [{"a": 1}, {"a": 2}])
        assert saver.get_tuple(configs[0]) is not None
        assert len(listed(saver, None)) == 4
        made = saver.put(configs[0], checkpoint({"a": 4}), {"source": "loop", "step": 1}, {"a": 1})
        assert saver.get_tuple(at("thread")).config == made  # type: ignore[union-attr]


def test_the_head_that_was_asked_for_by_its_id_is_not_addressed(backend: Backend) -> None:
    """A run that was started with the head's config is a run on the head."""
    with backend.open(concurrent_runs="refuse") as saver, backend.open(concurrent_runs="refuse") as other:
        head = put(saver, at("thread"), {"a": 1})
        assert saver.get_tuple(head) is not None
        new = checkpoint({"a": 2})
        other.put(head, new, {"source": "loop", "step": 1}, {"a": 1})
        with pytest.raises(ConcurrentRunError):
            saver.put(head, checkpoint({"a": 3}), {"source": "loop", "step": 1}, {"a": 1})
        assert listed(saver, at("thread")) == [new["id"], *ids([head])]


def test_the_same_checkpoint_again_is_no_other_run(backend: Backend) -> None:
    with backend.open(concurrent_runs="refuse") as saver:
        first = put(saver, at("thread"), {"a": 1})
        made = checkpoint({"a": 2})
        for _ in range(2):
            saver.put(first, made, {"source": "loop", "step": 1}, {"a": 1})
        assert listed(saver, at("thread")) == [made["id"], *ids([first])]


def test_writes_are_never_refused(backend: Backend) -> None:
    with backend.open(concurrent_runs="refuse") as saver:
        configs = chain(saver, "thread", [{"a": 1}, {"a": 2}])
        saver.put_writes(configs[0], [("a", "late")], "task")
        assert saver.get_tuple(configs[0]).pending_writes == [("task", "a", "late")]  # type: ignore[union-attr]


def test_one_member_of_a_group_is_refused_alone(backend: Backend) -> None:
    """Puts that are committed together: each is judged by what comes before it in the group, too."""
    with backend.open(concurrent_runs="refuse") as saver:
        head = put(saver, at("thread"), {"a": 1})
        made = [checkpoint({"a": number}) for number in range(12)]
        outcomes: dict[str, Any] = {}
        start = threading.Barrier(24)

        def race(number: int, namespace: str) -> None:
            start.wait()
            try:
                parent = head if not namespace else at("thread", namespace=namespace)
                saver.put(parent, made[number], {"source": "loop", "step": 1}, {"a": 1})
                outcomes[f"{namespace}{number}"] = None
            except ConcurrentRunError as error:
                outcomes[f"{namespace}{number}"] = error

        racers = [threading.Thread(target=race, args=(number, name)) for number in range(12) for name in ("", "other")]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join(60)
        for namespace in ("", "other"):
            won = [name for name, error in outcomes.items() if error is None and name.removeprefix("other").isdigit()]
            mine = [name for name in won if name.startswith("other") == bool(namespace)]
            assert len(mine) == 1
            expected = [made[int(mine[0].removeprefix("other"))]["id"], *([] if namespace else ids([head]))]
            assert listed(saver, at("thread", namespace=namespace)) == expected
        assert len(outcomes) == 24


# Graphs, undisturbed: everything that works works as without the guard.


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_single_run_is_unhindered(scenario: str, durability: str, asynchronous: bool) -> None:
    build, script = SCENARIOS[scenario]
    seen = []
    for mode in ("fork", "refuse"):
        with LSMSaver.from_conn_string("memory://", concurrent_runs=mode) as saver:
            run = Run(build(saver), "thread", durability, asynchronous)
            if asynchronous:
                seen.append([await script(run), await run.seen()])
            else:
                seen.append([finish(script(run)), finish(run.seen())])  # type: ignore[arg-type]
    assert repr(seen[1]) == repr(seen[0])


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("backend", ["file", "s3"], indirect=True)
def test_time_travel_from_every_old_checkpoint(backend: Backend, durability: str) -> None:
    with backend.open(concurrent_runs="refuse") as saver:
        run = Run(chat(saver), "thread", durability, asynchronous=False)
        for number in range(2):
            finish(run.invoke(said(number)))
    with backend.open(concurrent_runs="refuse") as saver:  # a process that knows nothing yet
        run = Run(chat(saver), "thread", durability, asynchronous=False)
        for number, old in enumerate(finish(run.history())):
            if old.values["messages"]:
                finish(run.update({"turns": 1}, "model", old))  # an edit
                finish(run.invoke(None))
            finish(run.invoke(said(10 + number), old))  # new input
            finish(run.invoke(None, old))  # a replay
            finish(run.invoke(said(20 + number)))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("durability", DURABILITIES)
async def test_time_travel_into_subgraphs(durability: str, asynchronous: bool) -> None:
    with LSMSaver.from_conn_string("memory://", concurrent_runs="refuse") as saver:
        run = Run(nested(saver), "thread", durability, asynchronous)

        async def travel() -> None:
            for number in range(2):
                await run.invoke({"note": f"note {number}"})
                await run.invoke(Command(resume=f"answer {number}"))
            for old in await run.history():
                await run.invoke(None, old)
                if (await run.state()).interrupts:
                    await run.invoke(Command(resume="another answer"))
            await run.invoke({"note": "in the end"})
            waiting = (await run.state(subgraphs=True)).tasks[0].state
            edited = await run.update({"calls": ["from the side"]}, "first", waiting)
            assert edited["configurable"]["thread_id"] == "thread"
            await run.invoke(Command(resume="the last answer"))

        if asynchronous:
            await travel()
        else:
            finish(travel())


@pytest.mark.parametrize("durability", DURABILITIES)
@LOCAL
def test_interrupts_are_resumed_by_another_process(backend: Backend, durability: str) -> None:
    def fresh(saver: LSMSaver) -> Run:
        return Run(review(saver), "thread", durability, asynchronous=False)

    with backend.open(concurrent_runs="refuse") as saver:
        finish(fresh(saver).invoke({"text": "draft"}))
    for _ in range(3):
        with backend.open(concurrent_runs="refuse") as saver:
            run = fresh(saver)
            waiting = finish(run.state()).interrupts
            if waiting:
                finish(run.invoke(Command(resume={one.id: f"yes to {one.value}" for one in waiting})))
    with backend.open() as saver:
        assert finish(fresh(saver).state()).values["verdicts"][-1] == "published"


# Two runs from one head.


class Log(TypedDict):
    log: Annotated[list[str], operator.add]


def worker(saver: LSMSaver, name: str) -> Any:
    """A graph of two steps that sign with a name."""
    builder = StateGraph(Log)
    builder.add_node("begin", lambda state: {"log": [f"{name} begins"]})
    builder.add_node("end", lambda state: {"log": [f"{name} ends"]})
    builder.add_edge(START, "begin")
    builder.add_edge("begin", "end")
    return builder.compile(checkpointer=saver)


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_two_threads_of_one_process(backend: Backend, durability: str, asynchronous: bool) -> None:
    outcomes: dict[str, Any] = {}
    both_read = threading.Barrier(2)
    original = LSMSaver.get_tuple

    with backend.open(concurrent_runs="refuse") as saver:
        worker(saver, "before").invoke({"log": ["first"]}, at("thread"))
        before = saver.get_tuple(at("thread"))
        assert before is not None

        def first_read(self: LSMSaver, config: Any) -> Any:
            found = original(self, config)
            if not hasattr(reading, "done"):
                reading.done = True
                both_read.wait(60)
            return found

        reading = threading.local()

        class Meeting(type(saver)):  # type: ignore[misc]
            get_tuple = first_read

            async def aget_tuple(self, config: Any) -> Any:
                return self.get_tuple(config)

        saver.__class__ = Meeting

        def go(name: str) -> None:
            graph = worker(saver, name)
            try:
                if asynchronous:
                    outcomes[name] = asyncio.run(graph.ainvoke({"log": [name]}, at("thread"), durability=durability))
                else:
                    outcomes[name] = graph.invoke({"log": [name]}, at("thread"), durability=durability)
            except ConcurrentRunError as error:
                outcomes[name] = error

        racers = [threading.Thread(target=go, args=(name,)) for name in ("alpha", "beta")]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join(60)
        lost = [name for name, outcome in outcomes.items() if isinstance(outcome, ConcurrentRunError)]
        assert len(outcomes) == 2
        assert len(lost) == 1, outcomes
        won = ({"alpha", "beta"} - set(lost)).pop()
        error = outcomes[lost[0]]
        assert (error.thread_id, error.namespace) == ("thread", "")
        assert error.expected == before.checkpoint["id"]
        assert error.found in listed(saver, at("thread"))
        expected = ["first", "before begins", "before ends", won, f"{won} begins", f"{won} ends"]
        assert outcomes[won]["log"] == expected
        found = list(saver.list(None))
        assert found[0].checkpoint["channel_values"]["log"] == expected
        for each in found:
            assert lost[0] not in repr(each.checkpoint["channel_values"])
            assert lost[0] not in repr(each.pending_writes)


RACER = """
import time
from pathlib import Path
from langgraph.checkpoint.lsm import LSMSaver
from lsm.errors import ConcurrentRunError
from tests.support.checkpoints import at
from tests.support.graphs import delta, finish, line

class Meeting(LSMSaver):
    read = False

    def get_tuple(self, config):
        found = super().get_tuple(config)
        if not Meeting.read:  # until all have read the same head
            Meeting.read = True
            Path(ARGS["ready"]).touch()
            while not Path(ARGS["go"]).exists():
                time.sleep(0.001)
        return found

saver = Meeting.from_conn_string(ARGS["url"], concurrent_runs="refuse", **ARGS["options"])
try:
    state = delta(saver, ARGS["frequency"]).invoke(line(ARGS["name"]), at("thread"), durability=ARGS["durability"])
    print(json.dumps(["won", state["log"] == state["plain"]]))
except ConcurrentRunError as error:
    print(json.dumps(["lost", error.thread_id, error.namespace, error.expected, error.found]))
saver.close()
"""


@pytest.mark.parametrize(
    ("backend", "durability"), [("file", "sync"), ("file", "exit"), ("s3", "async")], indirect=["backend"]
)
def test_several_processes(backend: Backend, tmp_path: Path, durability: str) -> None:
    """On a graph with a `DeltaChannel`."""
    with backend.open(concurrent_runs="refuse") as saver:
        graph = delta(saver, 4)
        graph.invoke(line("first"), at("thread"))
        head = saver.get_tuple(at("thread"))
        assert head is not None
        go = tmp_path / "go"
        names = ["alpha", "beta"]
        with ExitStack() as stack:
            processes = {}
            for name in names:
                arguments = {"url": backend.url, "options": backend.options, "name": name, "durability": durability}
                arguments |= {"ready": str(tmp_path / name), "go": str(go), "frequency": 4}
                processes[name] = stack.enter_context(running(RACER, arguments))
            while not all((tmp_path / name).exists() for name in names):
                assert all(process.poll() is None for process in processes.values()), "one ended early"
                time.sleep(0.01)
            go.touch()
            told = {name: json.loads(output(process)) for name, process in processes.items()}
        won = [name for name in names if told[name] == ["won", True]]
        assert len(won) == 1, told
        for name in set(names) - set(won):
            _, thread_id, namespace, expected, found = told[name]
            assert (thread_id, namespace, expected) == ("thread", "", head.checkpoint["id"])
            assert found in listed(saver, at("thread"))
            assert name not in repr(everything(saver))
        # The history is one line, and the thread goes on.
        parents = [each.parent_config for each in saver.list(at("thread"))]
        assert [each and ids([each])[0] for each in parents] == [*listed(saver, at("thread"))[1:], None]
        state = graph.invoke(line("afterwards"), at("thread"))
        assert state["log"] == state["plain"]
        assert won[0] in state["log"]


def test_the_refused_run_may_try_again(backend: Backend) -> None:
    with backend.open(concurrent_runs="refuse") as saver, backend.open(concurrent_runs="refuse") as other:
        first = put(saver, at("thread"), {"a": 1})
        put(other, at("thread", ids([first])[0]), {"a": 2})
        with pytest.raises(ConcurrentRunError):
            saver.put(first, checkpoint({"a": 3}), {"source": "loop", "step": 1}, {"a": 1})
        head = saver.get_tuple(at("thread"))
        assert head is not None
        again = saver.put(head.config, checkpoint({"a": 3}), {"source": "loop", "step": 2}, {"a": 1})
        assert saver.get_tuple(at("thread")).config == again  # type: ignore[union-attr]
