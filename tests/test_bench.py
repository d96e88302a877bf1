"""The benchmark measures what it says: through its real orchestrator, with real workers, on the smallest workloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.bench.orchestrator import Options, Run
from tools.bench.report import tables
from tools.bench.results import Results, Spread
from tools.bench.targets import targets

SMALL = {"family": "superstep", "size": 0}


def run(peers: list[str], *plan: dict[str, Any], scratch: Path) -> dict[str, Any]:
    options = Options(peers=peers, plan=plan, rounds=2, count=3, seconds=0.05, delay=0.001, scratch=scratch)
    return json.loads(json.dumps(Run(options).results()))


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
