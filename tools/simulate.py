"""Run the simulator: `python tools/simulate.py --seeds 2000`, or `--seed 17 --trace` to read one run as a story.

A failure prints its seed, and the story of the smallest scenario found that fails, too; the exit status is 1.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.simulation.run import Outcome, simulate
from tools.simulation.scenario import Scenario, make
from tools.simulation.shrink import shrink


def main() -> int:
    """Parse the command line, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: %(default)s)")
    parser.add_argument("--seed", help="run this one only")
    parser.add_argument("--trace", action="store_true", help="print the story of every run")
    parser.add_argument("--no-shrink", action="store_true", help="print the story of the run that failed as it is")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure; print it in short")
    arguments = parser.parse_args()
    logging.getLogger("lsm").setLevel(logging.CRITICAL)
    first = arguments.first
    seeds = [arguments.seed] if arguments.seed is not None else range(first, first + arguments.seeds)
    began, count, events, failed = time.process_time(), 0, 0, 0
    for seed in seeds:
        outcome = simulate(make(seed), told=arguments.trace)
        count, events = count + 1, events + outcome.events
        if arguments.trace:
            print(_setting(outcome.scenario), outcome.story, sep="\n")
        if outcome.failure is None:
            continue
        failed += 1
        print(f"seed {seed} FAILS: {outcome.failure}", flush=True)
        if not arguments.keep_going:
            if not arguments.trace:
                _tell(outcome, not arguments.no_shrink)
            break
    seconds = time.process_time() - began
    print(f"{count} runs, {failed} failed; {events:,} events, {count / seconds:.1f} runs a second of processor time")
    return 1 if failed else 0


def _tell(outcome: Outcome, smaller: bool) -> None:
    scenario = shrink(outcome.scenario) if smaller else outcome.scenario
    told = simulate(scenario, told=True)
    print(_setting(scenario), told.story, sep="\n")


def _setting(scenario: Scenario) -> str:
    rates = ", ".join(f"{name} {getattr(scenario.rates, name):.1%}" for name in scenario.rates.active())
    return (
        f"seed {scenario.seed}: {'files' if scenario.appends else 'an object store'}, {scenario.nodes} nodes, "
        f"cache {scenario.cache_bytes:,} bytes, {scenario.limits}\n  faults: {rates or 'none'}, "
        f"clocks ahead by {scenario.clocks}, {scenario.retention}"
    )


if __name__ == "__main__":
    sys.exit(main())
