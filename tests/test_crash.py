"""Writers and compactors on a directory are killed at random moments: what was acknowledged is there, and it is whole.

A process that has imported everything forks a writer and a compactor for each round, kills both, and looks. Writers
acknowledge through a pipe, after the call has returned.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from lsm.verify import StoreReport, verify_store
from tests.support.checkpoints import at, checkpoint
from tests.support.processes import run

pytestmark = pytest.mark.processes

GRACE = 6.0
LINES = {"shared": 2, "own": 1}  # thread ids, and how many chains grow in each
VERSION = 1


def opened(url: str, fsync: bool, **options: Any) -> LSMSaver:
    """A saver that flushes after few commits, so that a kill meets flushes and rewrites, and not appends alone."""
    saver = LSMSaver.from_conn_string(url, fsync=fsync, **options)
    process = saver._engine.process
    process.limits = replace(process.limits, inline=2 << 10, frame=4 << 10, tail=8 << 10, directory=24, grace=GRACE)
    return saver


def values(name: str, number: int) -> dict[str, Any]:
    """What a checkpoint holds: a text that grows, and bytes of all sizes, some too large for a frame."""
    size = (50, 300, 3_000, 20_000)[number % 4]
    return {"text": f"{name} " * number, f"bytes-{number % 3}": random.Random(f"{name} {number}").randbytes(size)}


def write(url: str, fsync: bool, acknowledge: int, round_: int) -> None:
    """Store chains of checkpoints until killed."""
    saver = opened(url, fsync)

    def grow(thread_id: str, line: int) -> None:
        name, parent, number = f"{round_}/{thread_id}/{line}", None, 0
        while True:
            held = values(name, number)
            made = checkpoint(held, version=f"{name}-{number}")
            metadata: Any = {"source": "loop", "step": number, "name": name}
            config = saver.put(at(thread_id, parent), made, metadata, made["channel_versions"])
            told = json.dumps([thread_id, made["id"], parent, name, number, False])
            os.write(acknowledge, told.encode() + b"\n")
            saver.put_writes(config, [("text", number), ("more", name)], "task")
            os.write(acknowledge, json.dumps([thread_id, made["id"], parent, name, number, True]).encode() + b"\n")
            parent, number = made["id"], number + 1

    for thread_id, lines in LINES.items():
        for line in range(lines):
            threading.Thread(target=grow, args=(thread_id, line)).start()


def rewrite(url: str, fsync: bool, round_: int) -> None:
    """Rewrite and collect until killed."""
    saver, chance = opened(url, fsync, compaction="off"), random.Random(round_)
    while True:
        engine, thread_id = saver._engine, chance.choice(list(LINES))
        steps = chance.choice([engine.compact, engine.compact, engine.maintain, engine.flush])(thread_id)
        saver._runtime.run(steps)
        saver._runtime.run(engine.collect(GRACE))
        time.sleep(0.005)


def forked(work: Callable[[], None]) -> int:
    """The id of a child that does some work until it is killed."""
    child = os.fork()
    if not child:
        try:
            work()
            threading.Event().wait()
        except BaseException:  # noqa: BLE001 (the child must not go on with its parent's work)
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    return child


def killed(children: list[int]) -> None:
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "it ended by itself"


def one_round(url: str, fsync: bool, round_: int, seconds: float) -> list[Any]:
    """Let a writer and a compactor run for so long. What was acknowledged."""
    reading, writing = os.pipe()
    told = b""

    def listen() -> None:
        nonlocal told
        while more := os.read(reading, 1 << 16):
            told += more

    children = [forked(lambda: write(url, fsync, writing, round_)), forked(lambda: rewrite(url, fsync, round_))]
    os.close(writing)
    listener = threading.Thread(target=listen)
    listener.start()
    time.sleep(seconds)
    killed(children)
    listener.join()
    os.close(reading)
    return [json.loads(line) for line in told.splitlines()]


def verified(saver: LSMSaver) -> StoreReport:
    report = saver._runtime.run(verify_store(saver._engine.process))
    assert not report.problems, report.problems
    return report


def look(url: str, fsync: bool, acknowledged: list[Any]) -> StoreReport:
    """All that was acknowledged is there, and what is there is whole; the garbage can be removed. What `verify` says of
    the store as it was found."""
    with opened(url, fsync, compaction="off") as saver:
        report = verified(saver)
        found = read(saver)
        for thread_id, id_, parent, name, number, written in acknowledged:
            kept = found.get((thread_id, id_))
            assert kept is not None, f"{name} {number} was acknowledged and is gone"
            assert kept.metadata["name"] == name
            above = kept.parent_config and kept.parent_config["configurable"]["checkpoint_id"]
            assert above == parent
            if written:
                assert kept.pending_writes == [("task", "text", number), ("task", "more", name)]
        saver._runtime.run(saver._engine.collect(0))
        assert verified(saver).garbage.objects == 0
        assert read(saver) == found
    return report


def read(saver: LSMSaver) -> dict[tuple[str, str], Any]:
    """All checkpoints, each of which holds what its name says."""
    found = {}
    for kept in saver.list(None):
        metadata: Any = kept.metadata
        assert kept.checkpoint["channel_values"] == values(metadata["name"], metadata["step"])
        found[kept.config["configurable"]["thread_id"], kept.checkpoint["id"]] = kept
    return found


def rounds(folder: str, fsync: bool, count: int, seed: int) -> dict[str, int]:
    """So many rounds, five of them on each store. What happened."""
    chance = random.Random(seed)
    happened = {"acknowledged": 0, "torn": 0, "garbage": 0, "segments": 0}
    acknowledged: list[Any] = []
    for number in range(count):
        url = (Path(folder) / f"store-{number // 5}").as_uri()
        if number % 5 == 0:
            acknowledged = []
        acknowledged += one_round(url, fsync, number, chance.uniform(0.02, 0.6))
        try:
            report = look(url, fsync, acknowledged)
        except BaseException as error:
            error.add_note(f"round {number} of seed {seed} on {url}")
            raise
        happened["torn"] += report.torn > 0
        happened["garbage"] += report.garbage.objects
        happened["segments"] += report.segments
        happened["acknowledged"] += len(acknowledged)
    return happened


@pytest.mark.parametrize("fsync", [True, False], ids=["fsync", "no fsync"])
@pytest.mark.parametrize(
    "count", [6, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=["few", "many"]
)
def test_kill(tmp_path: Path, fsync: bool, count: int) -> None:
    seed = random.randrange(2**32)  # by `tests.support.chance`: the same for few, the run's for many
    script = "from tests.test_crash import rounds\nprint(json.dumps(rounds(**ARGS)))"
    arguments = {"folder": str(tmp_path), "fsync": fsync, "count": count, "seed": seed}
    happened = json.loads(run(script, arguments, seconds=110 if count < 100 else 1700))
    assert happened["acknowledged"] > 10 * count
    assert happened["segments"] > 0, "no kill came after the first flush"
    assert happened["garbage"] > 0, "no kill met an upload or a rewrite"
