"""Many processes on one thread id, each with many threads: writers, readers, compactors and collectors at once.

All that was acknowledged is there, every reader got right answers all the time, and what is left is whole. How much was
written is printed (`pytest -s`), not judged.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from lsm.process import refresh
from lsm.verify import verify_store
from tests.conftest import Backend
from tests.support.checkpoints import at, checkpoint
from tests.support.processes import output, running

pytestmark = pytest.mark.processes

SECONDS = float(os.environ.get("LSM_TEST_SECONDS", "60"))
GRACE = 15.0
PATIENCE = 240.0  # of commits, in seconds: how busy the machine is, is not what is tested


def opened(url: str, options: dict[str, Any]) -> LSMSaver:
    """A saver whose garbage may be collected soon, so that readers meet collectors."""
    saver = LSMSaver.from_conn_string(url, **options)
    limits = saver._engine.process.limits
    saver._engine.process.limits = replace(limits, grace=GRACE, commit_deadline=PATIENCE)
    return saver


def values(name: str, number: int) -> dict[str, Any]:
    """What a checkpoint holds: something small, something that grows, and now and then something large."""
    size = 15_000 if number % 20 == 19 else 100
    return {"count": number, "text": f"{name} " * number, "bytes": random.Random(f"{name} {number}").randbytes(size)}


def check(found: Any) -> None:
    """A checkpoint holds what its name says."""
    metadata = found.metadata
    assert found.checkpoint["channel_values"] == values(metadata["name"], metadata["step"])
    # Its own write may be there or not yet, but then whole.
    assert found.pending_writes in ([], [("task", "count", metadata["step"])])


class Crew:
    """The threads of one process."""

    def __init__(self, url: str, options: dict[str, Any], name: str, seconds: float) -> None:
        self.saver = opened(url, options)
        self.name = name
        self.end = time.monotonic() + seconds
        # The S3 server answers one request at a time: a hundred readers without a rest would keep the writers out.
        self.rest = 1.0 if url.startswith("s3:") else 0.02
        self.acknowledged: list[Any] = []
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []

    def run(self, threads: int) -> None:
        duties = [self.collect, self.compact, *[self.read] * (threads // 4)]
        duties += [self.write] * (threads - len(duties))
        crew = [threading.Thread(target=self.work, args=(duty, number)) for number, duty in enumerate(duties)]
        for each in crew:
            each.start()
        for each in crew:
            each.join()
        self.saver.close()

    def work(self, duty: Callable[[int], None], number: int) -> None:
        try:
            duty(number)
        except BaseException as error:  # noqa: BLE001 (told at the end)
            self.errors.append(f"{duty.__name__} {number}: {error!r}")
            self.end = 0

    def write(self, line: int) -> None:
        name, parent, number = f"{self.name}/{line}", None, 0
        while time.monotonic() < self.end:
            made = checkpoint(values(name, number), version=f"{name}-{number}")
            metadata: Any = {"source": "loop", "step": number, "name": name}
            config = self.saver.put(at("shared", parent), made, metadata, made["channel_versions"])
            self.saver.put_writes(config, [("count", number)], "task")
            self.acknowledged.append([made["id"], parent, name, number])
            parent, number = made["id"], number + 1

    def read(self, number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < self.end:
            known = len(self.acknowledged)
            latest = self.saver.get_tuple(at("shared"))
            if known:
                assert latest is not None
                assert latest.checkpoint["id"] >= max(id_ for id_, *_ in self.acknowledged[:known])
                id_, _, name, step = self.acknowledged[chance.randrange(known)]
                found = self.saver.get_tuple(at("shared", id_))
                assert found is not None, f"{name} {step} was acknowledged and is gone"
                assert found.pending_writes == [("task", "count", step)]
                check(found)
            if latest is not None:
                check(latest)
            listed = list(self.saver.list(at("shared"), limit=10))
            assert len(listed) >= min(known, 10)
            for each in listed:
                check(each)
            self.counts["reads"] += 2 + len(listed)
            time.sleep(self.rest)

    def compact(self, number: int) -> None:
        while time.monotonic() < self.end:
            self.saver.compact("shared")
            self.counts["rewrites"] += 1
            time.sleep(0.2)

    def collect(self, number: int) -> None:
        while time.monotonic() < self.end:
            removed = self.saver._runtime.run(self.saver._engine.collect(GRACE))
            self.counts["objects removed"] += removed.objects
            time.sleep(1)


PROCESS = """
import time
from pathlib import Path
from tests.test_many_processes import Crew

Path(ARGS["ready"]).touch()
while not Path(ARGS["go"]).exists():
    time.sleep(0.01)
crew = Crew(ARGS["url"], ARGS["options"], ARGS["name"], ARGS["seconds"])
crew.run(ARGS["threads"])
print(json.dumps([crew.errors, crew.acknowledged, crew.counts]))
"""


@pytest.mark.parametrize(
    ("backend", "processes", "threads", "seconds"),
    [
        pytest.param("file", 2, 10, 4.0, id="file-few"),
        pytest.param(
            "file", 8, 50, SECONDS, id="file-many", marks=[pytest.mark.slow, pytest.mark.timeout(300 + 3 * SECONDS)]
        ),
        pytest.param(
            "s3", 8, 50, SECONDS, id="s3-many", marks=[pytest.mark.slow, pytest.mark.timeout(300 + 3 * SECONDS)]
        ),
    ],
    indirect=["backend"],
)
def test_all_at_once(backend: Backend, tmp_path: Path, processes: int, threads: int, seconds: float) -> None:
    go = tmp_path / "go"
    names = [f"process-{number}" for number in range(processes)]
    with ExitStack() as stack:
        started = []
        for name in names:
            arguments = {"url": backend.url, "options": backend.options, "name": name, "seconds": seconds}
            arguments |= {"threads": threads, "ready": str(tmp_path / name), "go": str(go)}
            started.append(stack.enter_context(running(PROCESS, arguments)))
        while not all((tmp_path / name).exists() for name in names):
            assert all(process.poll() is None for process in started), "a process ended early"
            time.sleep(0.01)
        go.touch()
        told = [json.loads(output(process, seconds=PATIENCE + 2 * seconds)) for process in started]

    counts: Counter[str] = Counter()
    acknowledged: list[Any] = []
    for errors, its_own, its_counts in told:
        assert errors == []
        assert its_own, "a process wrote nothing"
        acknowledged += its_own
        counts.update(its_counts)
    told_at_the_end = (
        f"{backend.name}: {processes} processes with {threads} threads each, {seconds:g} s: {len(acknowledged)} puts "
        f"and as many put_writes, {2 * len(acknowledged) / seconds:.0f} a second; {dict(counts)}"
    )
    print(f"\n{told_at_the_end}")  # noqa: T201 (what was asked for with -s)

    with opened(backend.url, {**backend.options, "compaction": "off"}) as saver:
        found = {each.checkpoint["id"]: each for each in saver.list(at("shared"))}
        assert len(found) == len(acknowledged)
        for id_, parent, name, number in acknowledged:
            each = found[id_]
            assert (each.metadata["name"], each.metadata["step"]) == (name, number)
            assert each.pending_writes == [("task", "count", number)]
            check(each)
            above = each.parent_config and each.parent_config["configurable"]["checkpoint_id"]
            assert above == parent
        report = saver._runtime.run(verify_store(saver._engine.process))
        assert report.problems == {}
        saver.compact("shared")
        view = saver._runtime.run(refresh(saver._engine.process, saver._engine.process.thread("shared")))
        assert view is not None
        assert len(view.segments()) <= 32
        saver._runtime.run(saver._engine.collect(0))
        assert saver._runtime.run(verify_store(saver._engine.process)).garbage.objects == 0
    if seconds > 3 * GRACE:
        assert counts["objects removed"] > 0, "no collector has met anything"
    assert counts["rewrites"] >= processes
