"""The command line of the benchmark: `python -m tools.bench --help`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from tools.bench import workloads
from tools.bench.environments import ROOT
from tools.bench.orchestrator import Options, Run
from tools.bench.peers import PEERS
from tools.bench.report import draw_plots, write_results

DEFAULT_OUTPUT = ROOT / "docs" / "performance"
PARTIAL_OUTPUT = ROOT / "build" / "bench" / "partial"
QUICK: dict[str, Any] = {
    "count": 50,
    "seconds": 0.05,
    "cold": 1,
    "cell": 0.3,
    "filling": 10.0,
    "budget": 3.0,
    "patience": 60.0,
    "hurry": 75.0,
}
"""Options of a quick run; those of a whole one are the defaults."""


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments ask for; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds: a minute or two")
    parser.add_argument("--only", default="", help="workloads whose name begins so, e.g. superstep,history-1000")
    parser.add_argument("--peers", default="", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, help="how many rounds (default: 5, with --quick 2)")
    parser.add_argument("--delay", type=float, default=20.0, help="milliseconds by which each S3 request is delayed")
    parser.add_argument("--scratch", type=Path, default=Path("/var/tmp"), help="where files are stored: a real disk")
    parser.add_argument(
        "--output", type=Path, help="where results go (default: docs/performance, and build/bench/partial for parts)"
    )
    given = parser.parse_args(arguments)

    starts = tuple(filter(None, given.only.split(",")))
    plan = [each for each in workloads.plan(quick=given.quick) if workloads.make(**each).name.startswith(starts or "")]
    chosen = set(filter(None, given.peers.split(","))) or set(PEERS)
    if unknown := chosen - set(PEERS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}")
    if not plan:
        parser.error(f"no workload begins with {given.only}")

    whole = not (given.quick or given.only or given.peers)
    output = given.output or (DEFAULT_OUTPUT if whole else PARTIAL_OUTPUT)
    output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    results = Run(
        Options(
            peers=[name for name in PEERS if name in chosen],
            plan=plan,
            rounds=given.rounds or (2 if given.quick else 5),
            **(QUICK if given.quick else {}),
            delay=given.delay / 1000,
            scratch=given.scratch,
        ),
        save=lambda results: print(*write_results(results, output), sep="\n"),
    ).results()
    for path in draw_plots(results, output):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
