"""The simulator: on the engine as it is, which must pass; and on engines with planted faults, which must not."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from tests.support.plant import plant
from tools.simulation.run import simulate
from tools.simulation.scenario import make
from tools.simulation.shrink import shrink

ROOT = Path(__file__).resolve().parents[1]
SEEDS = [line for line in (ROOT / "tests/data/seeds.txt").read_text().splitlines() if line and not line.startswith("#")]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "lsm")


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_that_once_failed(seed: str) -> None:
    outcome = simulate(make(seed))
    assert outcome.failure is None, f"python tools/simulate.py --seed {seed}: {outcome.failure}"


def test_some_seeds() -> None:
    _pass(range(10_000, 10_080))


@pytest.mark.slow
def test_fresh_seeds(seed: str) -> None:
    first = Random(seed).randrange(1 << 40)
    _pass(range(first, first + 1000))


def _pass(seeds: range) -> None:
    for seed in seeds:
        outcome = simulate(make(seed))
        assert outcome.failure is None, f"python tools/simulate.py --seed {seed}: {outcome.failure}"


def test_a_seed_replays_byte_for_byte() -> None:
    for seed in range(40, 50):
        first, second = simulate(make(seed), told=True), simulate(make(seed), told=True)
        assert first.story == second.story
        assert first.story.count("\n") > 50


def test_a_seed_replays_in_another_process() -> None:
    command = [sys.executable, "tools/simulate.py", "--seed", "45", "--trace"]
    stories = [
        subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True, timeout=60
        ).stdout.rsplit(b"\n", 2)[0]
        for seed in ("1", "2")
    ]
    assert stories[0] == stories[1]
    assert simulate(make("45"), told=True).story.encode() in stories[0]


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        name: What it is.
        where: The function.
        old: The text of it.
        new: What stands there instead.
        quick: Whether it is found in a moment.
    """

    name: str
    where: str
    old: str
    new: str
    quick: bool = False


FAULTS = [
    # Those that the issue names.
    Fault(
        "the own commit is not looked for after an ambiguous answer",
        "lsm.commit:_attempt",
        "batch.sent and view.committed(batch.id)",
        "False",
    ),
    Fault(
        "acknowledged before the write",
        "lsm.commit:_send",
        "    batch.sent = True\n",
        "    batch.sent = True\n    _succeed(batch)\n",
        quick=True,
    ),
    Fault(
        "the ETag is dropped",
        "lsm.commit:_send",
        "    batch.sent = True\n",
        "    batch.sent = True\n"
        "    from lsm.steps import Get\n"
        "    newest = yield Get(thread.key)\n"
        "    request = replace(request, tag=newest.tag if newest is not None else None)\n",
        quick=True,
    ),
    Fault(
        "the first of special writes is taken",
        "lsm.read:settled",
        "if index < 0 or key not in winners:",
        "if key not in winners:",
        quick=True,
    ),
    Fault(
        "the writes of a seed are not kept",
        "lsm.lineage:needed",
        "path.append((ancestor, wanted))",
        "path.append((ancestor, wanted - nodes[ancestor].stored))",
    ),
    Fault(
        "collected without grace",
        "lsm.collect:_remove",
        "if since <= now - grace:",
        "if since <= now:",
        quick=True,
    ),
    Fault(
        "a stale pointer is followed",
        "lsm.view:View.hint",
        "if all(info.number == own for info in doubts):",
        "if True:",
    ),
    Fault(
        "the batch of an interrupted leader is lost",
        "lsm.commit:_lead",
        "own.outcome = own.outcome or _LEFT",
        "thread.batch, own.outcome = None, own.outcome or _LEFT",
        quick=True,
    ),
    # And others.
    Fault(
        "a cached manifest is not revalidated",
        "lsm.process:refresh",
        "    if view is None:\n",
        "    if view is not None:\n        return view\n    if view is None:\n",
        quick=True,
    ),
    Fault(
        "frames that came during a flush are dropped",
        "lsm.flush:landed",
        "view.tail.frames[old.count : view.count]",
        "[]",
        quick=True,
    ),
    Fault(
        "writes that come before their checkpoint are not carried",
        "lsm.flush:_strays",
        "return ([], True) if len(strays) > _MOST_STRAYS else (strays, False)",
        "return [], False",
        quick=True,
    ),
    Fault("a torn end is not cut off", "lsm.commit:_send", "view.tag is None or view.torn", "view.tag is None"),
    Fault(
        "a child is stored although writes of its parent failed",
        "lsm.engine:Engine.put",
        "if any(failed[:2] == (namespace, parent)",
        "if False and any(failed[:2] == (namespace, parent)",
        quick=True,
    ),
    Fault(
        "whoever leaves the queue keeps the lead",
        "lsm.commit:_leave",
        "    if leads:\n",
        "    if False:\n",
    ),
    Fault(
        "a concurrent run is not refused",
        "lsm.commit:_refuse",
        "if heads[namespace] in (parent, put.checkpoint.id):",
        "if True:",
        quick=True,
    ),
    Fault(
        "a rewrite takes numbers that frames have taken",
        "lsm.swap:swap",
        "view.header, view.next_number, made",
        "view.header, view.header.next_number, made",
        quick=True,
    ),
    Fault(
        "a rewrite drops the frames that came meanwhile",
        "lsm.swap:_carry",
        "rebased(blank, slim, process.compression, frames, slim.seq) if frames else blank",
        "blank",
        quick=True,
    ),
    Fault(
        "a rewrite forgets writes whose checkpoint is in a frame",
        "lsm.swap:_anchors",
        "all(found.seq > seq for found in",
        "all(False for found in",
    ),
    Fault(
        "writes that came before their checkpoint are no guests",
        "lsm.flush:prepare",
        "= key not in whole",
        "= not _is_new(view, *key)",
    ),
    Fault(
        "a lock is kept when the attempt fails",
        "lsm.turn:_in_turn",
        "    except BaseException:\n        yield Unlock(lock)\n        raise\n",
        "",
        quick=True,
    ),
    Fault(
        "a segment that a newer blob borrows from is dropped",
        "lsm.swap:_lenders",
        "return {left[place.segment] for place in borrowed if place.segment in left}",
        "return set()",
        quick=True,
    ),
    Fault("a prune keeps the oldest", "lsm.lineage:KeepLatest.__call__", "latest = max(", "latest = min("),
    Fault(
        "a chain ends before its seed",
        "lsm.history:walk",
        "            walks[channel].chain.append(item)\n",
        "            walks[channel].chain += [] if channel in stored else [item]\n",
        quick=True,
    ),
]


def _found(seeds: int) -> str | None:
    for seed in range(seeds):
        outcome = simulate(make(seed))
        if outcome.failure is not None:
            return outcome.failure
    return None


@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=() if each.quick else pytest.mark.slow, id=each.name) for each in FAULTS]
)
def test_planted_faults_are_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, fault.where, fault.old, fault.new)
    assert _found(1000) is not None, f"{fault.name}: not found"


def test_a_planted_fault_that_the_code_has_outgrown_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LookupError, match="plant the fault anew"):
        plant(monkeypatch, "lsm.commit:_send", "text that is not there", "")


def test_a_failure_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "lsm.flush:landed", "view.tail.frames[old.count : view.count]", "[]")
    failing = next(scenario for seed in range(500) if simulate(scenario := make(seed)).failure is not None)
    small = shrink(failing, 150)
    outcome = simulate(small, told=True)
    assert outcome.failure is not None
    assert f"FAILURE    {outcome.failure}" in outcome.story
    assert sum(map(len, small.phases)) <= sum(map(len, failing.phases))
