"""Real graphs, in every durability mode, sync and async: what a new saver or process reads is what the run left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver

from tests.conftest import Backend
from tests.support.checkpoints import at
from tests.support.compare import exact
from tests.support.graphs import DURABILITIES, SCENARIOS, Run, finish
from tests.support.processes import run as run_process

pytestmark = pytest.mark.processes


def drive(scenario: str, saver: BaseCheckpointSaver[Any], durability: str, asynchronous: bool, thread_id: str) -> Any:
    """Run the script; answer its result, and what the run itself sees of its thread at the end."""
    build, script = SCENARIOS[scenario]
    run = Run(build(saver), thread_id, durability, asynchronous)

    async def all_of_it() -> Any:
        return await script(run), await run.seen()

    return asyncio.run(all_of_it()) if asynchronous else finish(all_of_it())


def seen(scenario: str, saver: BaseCheckpointSaver[Any], asynchronous: bool, thread_id: str) -> Any:
    """What another run would see of the thread."""
    looking = Run(SCENARIOS[scenario][0](saver), thread_id, "sync", asynchronous).seen()
    return asyncio.run(looking) if asynchronous else finish(looking)


def check(scenario: str, backend: Backend, durability: str, asynchronous: bool) -> None:
    expected = drive(scenario, InMemorySaver(), durability, asynchronous, "thread")
    with backend.open() as saver:
        got = drive(scenario, saver, durability, asynchronous, "thread")
        stored = [exact(found) for found in saver.list(None)]
    assert got == expected
    with backend.open() as saver:
        assert seen(scenario, saver, asynchronous, "thread") == expected[1]
        assert seen(scenario, saver, not asynchronous, "thread") == expected[1]
        assert [exact(found) for found in saver.list(at("thread", namespace=None))] == stored  # type: ignore[arg-type]


MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["invoke", "ainvoke"])


@pytest.mark.parametrize("backend", ["file"], indirect=True)
@MODES
@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_graph_leaves_what_it_leaves_in_memory(
    scenario: str, durability: str, asynchronous: bool, backend: Backend
) -> None:
    check(scenario, backend, durability, asynchronous)


@pytest.mark.parametrize("backend", ["memory", "s3"], indirect=True)
@pytest.mark.parametrize(
    ("durability", "asynchronous"), [("async", True), ("sync", False)], ids=["ainvoke async", "invoke sync"]
)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_so_it_does_on_other_backends(scenario: str, durability: str, asynchronous: bool, backend: Backend) -> None:
    check(scenario, backend, durability, asynchronous)


READER = """
from langgraph.checkpoint.lsm import LSMSaver
from tests.support.graphs import SCENARIOS, Run, finish

with LSMSaver.from_conn_string(ARGS["url"], **ARGS["options"]) as saver:
    seen = {name: finish(Run(build(saver), name, "sync", False).seen()) for name, (build, _) in SCENARIOS.items()}
print(json.dumps({name: repr(state) for name, state in seen.items()}))
"""


@pytest.mark.parametrize("backend", ["file", "s3"], indirect=True)
def test_another_process_reads_the_same_states(backend: Backend) -> None:
    import json

    with backend.open() as saver:
        states = {name: repr(drive(name, saver, "async", True, name)[1]) for name in SCENARIOS}
    printed = run_process(READER, {"url": backend.url, "options": backend.options})
    assert json.loads(printed) == states


ONE_MORE_TURN = """
from langgraph.checkpoint.lsm import LSMSaver
from tests.support.graphs import Run, chat, finish, said

with LSMSaver.from_conn_string(ARGS["url"], **ARGS["options"]) as saver:
    print(repr(finish(Run(chat(saver), "thread", "sync", False).invoke(said(ARGS["turn"])))))
"""


@pytest.mark.parametrize("backend", ["file"], indirect=True)
def test_a_conversation_goes_on_in_one_process_after_the_other(backend: Backend) -> None:
    from tests.support.graphs import chat, said

    memory = Run(chat(InMemorySaver()), "thread", "sync", False)
    expected = [repr(finish(memory.invoke(said(turn)))) for turn in range(3)]
    with backend.open() as saver:
        here = Run(chat(saver), "thread", "sync", False)
        got = [repr(finish(here.invoke(said(0))))]
        arguments = {"url": backend.url, "options": backend.options, "turn": 1}
        got.append(run_process(ONE_MORE_TURN, arguments).strip())
        got.append(repr(finish(here.invoke(said(2)))))  # this saver has seen the thread before, and must look again
    assert got == expected
