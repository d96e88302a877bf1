"""The simulator: on the engine as it is, which must pass; and on engines with planted faults, which must not."""

from __future__ import annotations

import logging
import os
import re
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
MOST_SEEDS = 5000
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
        finds: A part of the report that must be given of it, as a regular expression: found for another reason, it
            proves nothing.
        quick: Whether it is found in a moment.
    """

    name: str
    where: str
    old: str
    new: str
    finds: str
    quick: bool = False


FAULTS = [
    # Those that the issue names.
    Fault(
        "the own commit is not looked for after an ambiguous answer",
        "lsm.commit:_attempt",
        "batch.sent and view.committed(batch.id)",
        "False",
        "was refused to store|which its directory does not have",
    ),
    Fault(
        "acknowledged before the write",
        "lsm.commit:_send",
        "    batch.sent = True\n",
        "    batch.sent = True\n    for entry in members:\n        _settle(entry, _STORED)\n",
        r"of call \d+ \(\w+, acked\) is lost",
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
        r"the latest of|acked\) is lost|both went on from",
        quick=True,
    ),
    Fault(
        "the first of special writes is taken",
        "lsm.read:settled",
        "if index < 0 or key not in winners:",
        "if key not in winners:",
        "write .* is stale: it shows",
        quick=True,
    ),
    Fault(
        "the writes of a seed are not kept",
        "lsm.lineage:needed",
        "path.append((ancestor, wanted))",
        "path.append((ancestor, wanted - nodes[ancestor].stored))",
        "the chain of",
    ),
    Fault(
        "collected without a fence",
        "lsm.collect:_remove",
        "and not (yield from _fence(process, view)):",
        "and False:",
        "which its directory does not have|referred to, and gone|is gone, although manifest",
        quick=True,
    ),
    Fault(
        "a commit does not compare the fence",
        "lsm.frame:ValueSegment.serves",
        "(self.incarnation, self.fence) == (view.incarnation, view.header.fence)",
        "self.incarnation == view.incarnation",
        "referred to, and gone|is gone, although manifest",
        quick=True,
    ),
    Fault(
        "a rewrite does not compare the fence",
        "lsm.swap:_store",
        "view.header.fence != made.fence",
        "False",
        "referred to, and gone|is gone, although manifest",
        quick=True,
    ),
    Fault(
        "an upload that was begun before a fence counts as begun after it",
        "lsm.frame:make_frame",
        "yield from upload(segment_key(thread.id, segment.info.ulid), segment.body, patient)",
        "yield from upload(segment_key(thread.id, segment.info.ulid), segment.body, patient)\n"
        "            from lsm.process import refresh\n"
        "            newest = yield from refresh(process, thread)\n"
        "            segment.fence = newest.header.fence if newest is not None else 0",
        "referred to, and gone|is gone, although manifest",
    ),
    Fault(
        "a stale pointer is followed",
        "lsm.view:View.hint",
        "if all(info.number == own for info in doubts):",
        "if True:",
        "is stale|has another seed",
    ),
    Fault(
        "the batch of an interrupted leader is lost",
        "lsm.commit:_lead",
        "own.outcome = own.outcome or _LEFT",
        "thread.batch, own.outcome = None, own.outcome or _LEFT",
        "wait for ever",
        quick=True,
    ),
    # And others.
    Fault(
        "a cached manifest is not revalidated",
        "lsm.process:refresh",
        "        if view is None:\n",
        "        if view is not None:\n            return view\n        if view is None:\n",
        "is lost|the latest of|is missing in a listing",
        quick=True,
    ),
    Fault(
        "frames that came during a flush are dropped",
        "lsm.flush:landed",
        "view.tail.frames[old.count : view.count]",
        "[]",
        "is lost|the latest of|is missing in a listing",
        quick=True,
    ),
    Fault(
        "writes that come before their checkpoint are not carried",
        "lsm.flush:_strays",
        "return ([], True) if len(strays) > _MOST_STRAYS else (strays, False)",
        "return [], False",
        "write .* is lost",
        quick=True,
    ),
    Fault(
        "a torn end is not cut off",
        "lsm.commit:_send",
        "view.tag is None or view.loose",
        "view.tag is None",
        "is lost|CorruptionError",
    ),
    Fault(
        "a child is stored although writes of its parent failed",
        "lsm.engine:Engine.put",
        "if any(failed[:2] == (namespace, parent)",
        "if False and any(failed[:2] == (namespace, parent)",
        "although writes of that failed",
        quick=True,
    ),
    Fault(
        "whoever leaves the queue keeps the lead",
        "lsm.commit:_leave",
        "    if leads:\n",
        "    if False:\n",
        "wait for ever",
    ),
    Fault(
        "a concurrent run is not refused",
        "lsm.commit:_refuse",
        "if heads[namespace] in (parent, put.checkpoint.id):",
        "if True:",
        "both went on from",
        quick=True,
    ),
    Fault(
        "a rewrite takes numbers that frames have taken",
        "lsm.swap:swap",
        "view.header, view.next_number, made",
        "view.header, view.header.next_number, made",
        "CorruptionError",
        quick=True,
    ),
    Fault(
        "a rewrite drops the frames that came meanwhile",
        "lsm.swap:_carry",
        "    if frames:\n",
        "    if False:\n",
        "is lost|the latest of|is missing in a listing",
        quick=True,
    ),
    Fault(
        "a rewrite forgets writes whose checkpoint is in a frame",
        "lsm.swap:_anchors",
        "all(found.seq > seq for found in",
        "all(False for found in",
        "the writes on 'log' are|is lost|differs in writes",
    ),
    Fault(
        "writes that came before their checkpoint are no guests",
        "lsm.flush:prepare",
        "= key not in whole",
        "= not _is_new(view, *key)",
        "differs in writes|is lost",
    ),
    Fault(
        "a lock is kept when the attempt fails",
        "lsm.turn:_in_turn",
        "    except BaseException:\n        yield Unlock(lock)\n        raise\n",
        "",
        "sleeps while the others wait",
        quick=True,
    ),
    Fault(
        "a segment that a newer blob borrows from is dropped",
        "lsm.swap:_lenders",
        "return {left[place.segment] for place in borrowed if place.segment in left}",
        "return set()",
        "which its directory does not have",
        quick=True,
    ),
    Fault(
        "a prune keeps the oldest",
        "lsm.lineage:KeepLatest.__call__",
        "latest = max(",
        "latest = min(",
        "is there although .* removed it",
    ),
    Fault(
        "what has expired is shown",
        "lsm.retention:Horizon.shows",
        "checkpoint.id >= lowest and checkpoint.time >= self._oldest",
        "checkpoint.id >= lowest",
        "is shown although it has expired",
        quick=True,
    ),
    Fault(
        "an expiry keeps one less than it should",
        "lsm.retention:Expire.__call__",
        "visible[: self._retention.max_checkpoints]",
        "visible[: (self._retention.max_checkpoints or 10) - 1]",
        "is missing in a listing|is lost|the latest of|has parent None",
    ),
    Fault(
        "what a listing has chosen is looked for from the top",
        "lsm.listing:_Snapshot.find",
        "found = results((yield All(lookups)))",
        "newest = yield from Scan(self._process, self._thread, self.view).next(len(keys))\n"
        "    found = [each for each in newest if (each.checkpoint.namespace, each.checkpoint.id) in keys]",
        "is missing in a listing",
    ),
    Fault(
        "a chain ends before its seed",
        "lsm.history:walk",
        "            walks[channel].chain.append(item)\n",
        "            walks[channel].chain += [] if channel in stored else [item]\n",
        "the chain of .* the writes on 'log' are",
        quick=True,
    ),
]


@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=() if each.quick else pytest.mark.slow, id=each.name) for each in FAULTS]
)
def test_planted_faults_are_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, fault.where, fault.old, fault.new)
    others = []
    for seed in range(MOST_SEEDS):
        failure = simulate(make(seed)).failure
        if failure is not None and re.search(fault.finds, failure):
            return
        others += [failure] if failure is not None else []
    pytest.fail(f"{fault.name}: nothing says {fault.finds!r}; what is said: {others[:5]}")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("text that is not there", "", "0 times"),
        ("batch.sent = True", "batch.sent = _succeed(batch)", "no _succeed"),
        ("batch.sent = True", "batch.sent = any(_succeed(each) for each in ())", "no _succeed"),
        ("batch.sent = True", "batch.sent = logger.debug and logging.succeed", "no logging.succeed"),
    ],
)
def test_a_planted_fault_that_the_code_has_outgrown_is_noticed(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str, says: str
) -> None:
    with pytest.raises(LookupError, match=f"{says}.*plant the fault anew"):
        plant(monkeypatch, "lsm.commit:_send", old, new)


def test_a_failure_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "lsm.flush:landed", "view.tail.frames[old.count : view.count]", "[]")
    failing = next(scenario for seed in range(500) if simulate(scenario := make(seed)).failure is not None)
    small = shrink(failing, 150)
    outcome = simulate(small, told=True)
    assert outcome.failure is not None
    assert f"FAILURE    {outcome.failure}" in outcome.story
    assert sum(map(len, small.phases)) <= sum(map(len, failing.phases))
