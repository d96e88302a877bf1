"""The benchmark measures what it says: through its real orchestrator, with real workers, on the smallest workloads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tools.bench import orchestrator
from tools.bench.orchestrator import Options, Run, WorkerFailed, WorkerProcess
from tools.bench.peers import PEERS
from tools.bench.report import tables, write_results
from tools.bench.results import Results, Spread
from tools.bench.targets import targets
from tools.bench.workloads import LeftOut, make, paced, plan

SMALL = {"family": "superstep", "size": 0}


def run(
    peers: list[str],
    *plan: dict[str, Any],
    scratch: Path,
    save: Callable[[dict[str, Any]], None] = lambda results: None,
    **more: Any,
) -> dict[str, Any]:
    options = Options(peers=peers, plan=plan, rounds=2, count=3, seconds=0.05, delay=0.001, scratch=scratch, **more)
    return json.loads(json.dumps(Run(options, save).results()))


def test_every_sample_is_in_the_results(tmp_path: Path) -> None:
    raw = run(["memory", "sqlite"], SMALL, {"family": "stored", "kind": "chat", "size": 3}, scratch=tmp_path)

    assert raw["failures"] == []
    assert [(m["peer"], m["round"]) for m in raw["measurements"]] == [
        ("memory", 0),
        ("sqlite", 0),
        ("sqlite", 1),  # who goes first moves on
        ("memory", 1),
    ]
    for measurement in raw["measurements"]:
        samples = measurement["series"]
        assert set(samples) == {"put_writes", "put", "superstep"}
        assert {len(series) for series in samples.values()} == {measurement["units"]}
        assert all(seconds > 0 for series in samples.values() for seconds in series)
    assert [entry["peer"] for entry in raw["stored"]] == ["sqlite"]
    assert raw["stored"][0]["bytes"] > 1_000
    assert {"processor", "cores", "filesystem", "python", "langgraph"} <= set(raw["machine"])
    assert raw["peers"]["sqlite"]["versions"]["langgraph-checkpoint-sqlite"]
    assert list(tmp_path.iterdir()) == []

    text = tables(Results(raw))
    assert "| SqliteSaver |" in text
    assert "| File: superstep, small state | 0.6 of SqliteSaver |  | not measured |" in text


def test_requests_are_counted_and_billed(tmp_path: Path) -> None:
    results = Results(run(["lsm-s3"], SMALL, scratch=tmp_path))

    assert results.raw["failures"] == []
    counts = {
        kind: results.per_unit("superstep-small", "superstep", "lsm-s3", kind) for kind in ("write", "read", "list")
    }
    assert counts == {"write": 2, "read": 0, "list": 0}
    assert results.dollars_per_million("superstep-small", "superstep", "lsm-s3") == pytest.approx(10.0)


def test_a_peer_that_fails_is_told_with_its_error(tmp_path: Path) -> None:
    raw = run(["sqlite"], {"family": "stored", "kind": "poems", "size": 1}, SMALL, scratch=tmp_path)

    [failure] = raw["failures"]
    assert (failure["workload"], failure["operation"], failure["peer"]) == ("stored-poems-1", "prepare", "sqlite")
    assert "poems" in failure["error"]
    assert raw["stored"] == []
    assert {measurement["workload"] for measurement in raw["measurements"]} == {"superstep-small"}


def test_a_worker_that_ends_fails_its_cells_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = orchestrator.interpreter
    monkeypatch.setattr(
        orchestrator, "interpreter", lambda name, *needs: "/bin/false" if name == "sqlite" else real(name, *needs)
    )

    raw = run(["memory", "sqlite"], {"family": "history", "size": 5}, SMALL, scratch=tmp_path)

    assert [(each["workload"], each["peer"], each["operation"]) for each in raw["failures"]] == [
        ("history-5", "sqlite", "prepare"),
        ("superstep-small", "sqlite", "prepare"),
    ]
    assert "the worker ended" in raw["failures"][0]["error"]
    assert {(each["workload"], each["peer"]) for each in raw["measurements"]} == {
        ("history-5", "memory"),
        ("superstep-small", "memory"),
    }
    assert "| SqliteSaver | failed: the worker ended: without a word |" in tables(Results(raw))


def test_a_worker_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    worker = WorkerProcess(str(silent), tmp_path / "log", patience=0.1)
    try:
        with pytest.raises(WorkerFailed, match=r"no answer after 0\.1 s"):
            worker.ask("start")
        assert not worker.alive
    finally:
        worker.stop()


def test_what_would_take_too_long_is_left_out_and_told(tmp_path: Path) -> None:
    graph = {"family": "graph", "durability": "sync", "size": 1, "supersteps": 3}
    raw = run(["memory"], {"family": "history", "size": 5}, graph, SMALL, scratch=tmp_path, filling=0.0, budget=0.0)

    assert raw["failures"] == []
    assert [(each["workload"], each["operation"]) for each in raw["left_out"]] == [
        ("history-5", "prepare"),
        ("graph-sync-1", "run"),
    ]
    assert {each["workload"] for each in raw["measurements"]} == {"superstep-small"}
    text = tables(Results(raw))
    assert "| InMemorySaver | left out: filling would take 0 s |" in text
    assert "| InMemorySaver | left out: one run would take 0 s |" in text


def test_late_in_a_run_there_is_one_round(tmp_path: Path) -> None:
    raw = run(["memory"], SMALL, scratch=tmp_path, hurry=0.0)
    assert [each["round"] for each in raw["measurements"]] == [0]


def test_a_slow_operation_is_measured_in_fewer_rounds(tmp_path: Path) -> None:
    raw = run(["memory"], {"family": "history", "size": 5}, scratch=tmp_path, cell=0.0)
    assert {each["round"] for each in raw["measurements"]} == {0}
    assert {each["operation"] for each in raw["measurements"]} == set(make("history", size=5).operations)


def test_steps_are_counted_until_they_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    done = []
    for step in paced(range(1, 4), 3.0, "filling"):
        done.append(step)
        now += 1.0
    assert done == [1, 2, 3]

    done.clear()
    steps = paced(range(1_000), 50.0, "filling")
    for step in islice(steps, 5):  # a tenth of the budget
        done.append(step)
        now += 1.2
    with pytest.raises(LeftOut, match="filling would take 1,200 s"):
        next(steps)
    assert done == [0, 1, 2, 3, 4]


def test_a_peer_is_not_asked_for_more_than_it_can_do() -> None:
    assert PEERS["s3"].refuses("delta", 100) == "its LangGraph knows no delta channels"
    assert PEERS["tigris"].refuses("history", 1_000) is None
    assert PEERS["tigris"].refuses("history", 100_000) == "it asks for each checkpoint by itself"
    assert not PEERS["lsm-delayed"].takes_part("history")


def test_results_are_saved_after_each_workload(tmp_path: Path) -> None:
    saved: list[dict[str, Any]] = []
    history = {"family": "history", "size": 5}

    run(["memory"], SMALL, history, scratch=tmp_path, save=lambda raw: saved.append(json.loads(json.dumps(raw))))

    assert [raw["done"] for raw in saved] == [1, 2]
    folder = tmp_path / "output"
    folder.mkdir()
    texts = []
    for raw in saved:
        assert write_results(raw, folder) == [folder / "results.json", folder / "results.md"]
        assert json.loads((folder / "results.json").read_text()) == raw
        texts.append((folder / "results.md").read_text())
    first, last = texts
    assert "The run did not end: 1 of 2 workloads were measured." in first
    assert "## One superstep" in first
    assert "## Read" not in first
    assert "did not end" not in last
    assert "## Read" in last

    with (folder / "results.json").open() as reader:
        write_results(saved[0], folder)
        assert json.loads(reader.read()) == saved[1]  # whoever reads meanwhile reads the whole of it
    with pytest.raises(KeyError):
        write_results(saved[1] | {"settings": {}}, folder)  # of which no table can be made
    assert json.loads((folder / "results.json").read_text()) == saved[0]
    assert sorted(path.name for path in folder.iterdir()) == ["results.json", "results.md"]


def test_the_plan_has_every_size_and_long_graphs() -> None:
    names = [make(**each).name for each in plan(quick=False)]
    assert len(set(names)) == len(names)
    assert {"history-10", "history-1000", "history-100000", "delta-5000", "graph-async-8", "at-once-64"} <= set(names)
    for quick in (False, True):
        assert {each["supersteps"] for each in plan(quick=quick) if each["family"] == "graph"} == {32}


def made_up(**rounds: list[list[float]]) -> Results:
    """Results of `superstep-small`: for each peer the samples of each round."""
    measurements = [
        {
            "workload": "superstep-small",
            "operation": "superstep",
            "peer": peer.replace("_", "-"),
            "round": number,
            "series": {"superstep": samples, "put_writes": samples, "put": samples},
            "units": len(samples),
        }
        for peer, samples_of in rounds.items()
        for number, samples in enumerate(samples_of)
    ]
    peers = {
        peer.replace("_", "-"): {"title": peer, "storage": "file", "status": "ok", "versions": {}} for peer in rounds
    }
    plan = [SMALL | {"name": "superstep-small"}]
    return Results(
        {"measurements": measurements, "peers": peers, "plan": plan, "stored": [], "settings": {"delay": 0.02}}
    )


def test_requests_of_a_graph_are_told_by_superstep() -> None:
    graph = {"family": "graph", "durability": "async", "size": 8, "supersteps": 32, "name": "graph-async-8"}
    counts = {"write": 40, "read": 2, "list": 0, "delete": 0}
    measured = {"workload": "graph-async-8", "operation": "run", "peer": "lsm-s3", "round": 0, "units": 32}
    raw = made_up().raw | {
        "plan": [graph],
        "measurements": [measured | {"series": {"superstep": [0.1]}, "requests": counts}],
    }
    found = {target.what: target for target in targets(Results(raw))}

    target = found["S3: graph run of 32 supersteps, async, 8 tasks"]
    assert (target.limit, target.measured, target.met) == ("1.5 requests a superstep", "1.31", True)


def test_ratios_are_taken_within_a_round() -> None:
    # The second round was ten times slower for both: their ratio is what it was.
    results = made_up(lsm_file=[[1.0, 2.0, 9.0], [20.0], [3.0]], sqlite=[[4.0], [40.0], [4.0]])

    assert results.seconds("superstep-small", "superstep", "lsm-file", "superstep") == Spread(3.0, 2.0, 20.0)
    ratio = results.ratio("superstep-small", "superstep", "lsm-file", "sqlite", "superstep")
    assert ratio == Spread(0.5, 0.5, 0.75)
    assert Spread(2.0, 1.0, 4.0).map(lambda value: 1 / value) == Spread(0.5, 0.25, 1.0)


def test_a_target_is_met_missed_or_not_measured() -> None:
    found = {target.what: target.met for target in targets(made_up(lsm_file=[[0.7]], sqlite=[[1.0]]))}

    assert found["File: superstep, small state"] is False
    assert found["File: put_writes, small state"] is True
    assert found["File without fsync: superstep, small state"] is None
