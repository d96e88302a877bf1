"""A process that runs a graph on a directory is killed in the middle of a step; the next one goes on from there.

Tasks write a line to a file of their own when they are done, so that what ran twice can be counted.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from tests.support.checkpoints import at
from tests.support.processes import output, run, running

pytestmark = pytest.mark.processes

# One graph for both processes. In the step after `plan`, three tasks run side by side: `quick` and `quicker` end,
# `stuck` waits for a file that appears only after the kill.
GRAPH = """
import asyncio, operator, os, time
from pathlib import Path
from typing import Annotated, TypedDict
from langgraph.graph import END, START, StateGraph
from langgraph.checkpoint.lsm import LSMSaver

folder = Path(ARGS["folder"])

def done(task):
    with open(folder / "done", "a") as file:
        file.write(task + "\\n")

class State(TypedDict):
    log: Annotated[list, operator.add]

def plan(state):
    done("plan")
    return {"log": ["plan"]}

def quick(state):
    done("quick")
    return {"log": ["quick"]}

def quicker(state):
    done("quicker")
    return {"log": ["quicker"]}

def stuck(state):
    (folder / "stuck").touch()
    while not (folder / "go").exists():
        time.sleep(0.005)
    done("stuck")
    return {"log": ["stuck"]}

def finish(state):
    done("finish")
    return {"log": ["finish"]}

builder = StateGraph(State)
for node in (plan, quick, quicker, stuck, finish):
    builder.add_node(node)
builder.add_edge(START, "plan")
for node in ("quick", "quicker", "stuck"):
    builder.add_edge("plan", node)
builder.add_edge(["quick", "quicker", "stuck"], "finish")
builder.add_edge("finish", END)
saver = LSMSaver.from_conn_string(ARGS["url"])
graph = builder.compile(checkpointer=saver)
config = {"configurable": {"thread_id": "job"}}

def go(given):
    if ARGS["asynchronous"]:
        return asyncio.run(graph.ainvoke(given, config, durability=ARGS["durability"]))
    return graph.invoke(given, config, durability=ARGS["durability"])
"""


@pytest.mark.parametrize("asynchronous", [False, True], ids=["invoke", "ainvoke"])
@pytest.mark.parametrize("durability", ["sync", "async"])
def test_a_killed_run_resumes_without_repeating_finished_tasks(
    tmp_path: Path, durability: str, asynchronous: bool
) -> None:
    url = (tmp_path / "store").as_uri()
    arguments = {"folder": str(tmp_path), "url": url, "durability": durability, "asynchronous": asynchronous}
    if asynchronous:
        # A node that blocks would block the loop, and with it the commits of the others.
        graph = GRAPH.replace("def stuck(state):", "async def stuck(state):").replace(
            "time.sleep", "await asyncio.sleep"
        )
    else:
        graph = GRAPH

    with running(graph + 'go({"log": []})', arguments) as process:
        wait_until_stored(process, url, tasks=2)
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
    assert (tmp_path / "stuck").exists()
    assert sorted((tmp_path / "done").read_text().split()) == ["plan", "quick", "quicker"]

    (tmp_path / "go").touch()
    state = json.loads(run(graph + "print(json.dumps(go(None)))", arguments))
    assert state == {"log": ["plan", "quick", "quicker", "stuck", "finish"]}
    assert sorted((tmp_path / "done").read_text().split()) == ["finish", "plan", "quick", "quicker", "stuck"]


def wait_until_stored(process, url: str, *, tasks: int) -> None:
    """Wait until the latest checkpoint of the job has the writes of so many tasks to the log."""
    deadline = time.monotonic() + 60
    with LSMSaver.from_conn_string(url, compaction="off") as reader:
        while time.monotonic() < deadline:
            assert process.poll() is None, output(process)
            latest = reader.get_tuple(at("job"))
            if latest is not None and sum(channel == "log" for _, channel, _ in latest.pending_writes) >= tasks:
                return
            time.sleep(0.01)
    raise AssertionError("the tasks' writes were never stored")


WRITER = """
from langgraph.checkpoint.lsm import LSMSaver
from tests.support.checkpoints import at, put

saver = LSMSaver.from_conn_string(ARGS["url"])
parent = at("job")
number = 0
while True:
    parent = put(saver, parent, {"count": number, "text": "x" * (number % 7 * 3000)}, step=number)
    print(number, parent["configurable"]["checkpoint_id"], flush=True)
    number += 1
"""


@pytest.mark.parametrize(
    "rounds", [6, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=["few", "many"]
)
def test_what_was_acknowledged_before_a_kill_is_there(tmp_path: Path, rounds: int) -> None:
    # The writer is killed at a moment that is no moment of its own: after it has said so many lines.
    for number in range(rounds):
        url = (tmp_path / f"store-{number}").as_uri()
        with running(WRITER, {"url": url}) as process:
            lines = [process.stdout.readline() for _ in range(1 + number * 7 % 60)]
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.read().splitlines()
        acknowledged = [line.split()[1] for line in lines if len(line.split()) == 2]
        with LSMSaver.from_conn_string(url) as saver:
            found = list(saver.list(at("job")))[::-1]
            assert [kept.checkpoint["id"] for kept in found][: len(acknowledged)] == acknowledged
            assert len(found) <= len(acknowledged) + 1  # one commit may have been under way
            for step, kept in enumerate(found):
                assert kept.checkpoint["channel_values"] == {"count": step, "text": "x" * (step % 7 * 3000)}
            # A torn end does not stop the next writer.
            saver.put_writes(found[-1].config, [("count", -1)], "after")
            assert saver.get_tuple(at("job")).pending_writes == [("after", "count", -1)]
