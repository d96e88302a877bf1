"""Where the time of `put_writes`, `put` and `get_tuple` goes: flame graphs, and the lines that cost most.

    python -m tools.bench.profile [--peer lsm-file] [--seconds 5] [--output docs/performance]

For each call, a process that does nothing else is watched by py-spy, once for a flame graph (`profile-put.svg`) and
once for its samples, of which `profile.md` tells the lines that were at the top of the stack most often.

Rules of this module:

- The process that is watched makes only the call under test over and over; what it needs to have stored is stored
  before the watch begins.
- Time that passes counts, whether the processor works or waits for the disk. The table leaves out what is not within
  the saver's method: the making of its arguments, and threads that run behind it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.environments import ROOT
from tools.bench.loop import Superstep, Thread
from tools.bench.peers import PEERS, Place

CALLS = ("put_writes", "put", "latest")
RATE = 500
TOP = 15


def main() -> None:
    """Watch each call; write the flame graphs and the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.profile", description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", default="lsm-file", choices=[name for name in PEERS if not PEERS[name].on_s3])
    parser.add_argument("--seconds", type=int, default=5, help="how long each call is watched, twice")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "performance")
    parser.add_argument("--work", choices=CALLS, help=argparse.SUPPRESS)  # the process that is watched
    given = parser.parse_args()
    if given.work:
        _work(given.peer, given.work)
        return
    given.output.mkdir(parents=True, exist_ok=True)
    text = ["# Where the time goes", "", f"Made by `python -m tools.bench.profile` on `{given.peer}`; do not edit.", ""]
    for call in CALLS:
        graph = given.output / f"profile-{call.replace('_', '-')}.svg"
        _watch(given.peer, call, given.seconds, graph, "flamegraph")
        with tempfile.TemporaryDirectory() as scratch:
            samples = Path(scratch) / "samples"
            _watch(given.peer, call, given.seconds, samples, "raw")
            text += _table(call, samples.read_text().splitlines(), graph.name)
        print(graph)
    (given.output / "profile.md").write_text("\n".join(text).rstrip() + "\n")
    print(given.output / "profile.md")


def _watch(peer: str, call: str, seconds: int, output: Path, form: str) -> None:
    """Have py-spy watch a process that makes a call over and over."""
    work = subprocess.Popen(
        [sys.executable, "-m", "tools.bench.profile", "--peer", peer, "--work", call],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'saver'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert work.stdout is not None
    try:
        if work.stdout.readline() != b"begun\n":
            raise SystemExit(f"the process that makes the call ended with code {work.wait(10)}")
        spy = Path(sys.executable).parent / "py-spy"
        options = ["--idle", "--rate", RATE, "--duration", seconds, "--format", form, "--output", output]
        command = [str(part) for part in [spy, "record", *options, "--pid", work.pid]]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"py-spy: {done.stderr.strip()}")
    finally:
        work.kill()
        work.communicate()


def _table(call: str, stacks: list[str], graph: str) -> list[str]:
    """The lines that cost most: on top of the stack, and anywhere on it."""
    method = f"Saver.{'get_tuple' if call == 'latest' else call} ("
    alone: Counter[str] = Counter()
    within: Counter[str] = Counter()
    total = 0
    for stack in stacks:
        frames, _, count = stack.rpartition(" ")
        path = frames.split(";")
        if not any(method in frame for frame in path):
            continue
        total += int(count)
        alone[path[-1]] += int(count)
        for frame in set(path):
            within[frame] += int(count)
    head = ["| alone | with what it calls | line |", "| --- | --- | --- |"]
    rows = [
        f"| {count / total:.1%} | {within[frame] / total:.1%} | `{frame.replace('|', '/')}` |"
        for frame, count in alone.most_common(TOP)
    ]
    return [f"## {call}", "", f"![flame graph]({graph})", "", *head, *rows, ""]


def _work(peer: str, call: str) -> None:
    """Make one call over and over, until killed."""
    with tempfile.TemporaryDirectory(prefix="profile-", dir="/var/tmp") as folder:
        place = Place("profile", directory=folder)
        with PEERS[peer].open(place) as saver:
            make = _caller(saver, call)
            print("begun", flush=True)
            until = time.monotonic() + 300  # whatever became of the parent
            while time.monotonic() < until:
                make()


def _caller(saver: Any, call: str) -> Callable[[], object]:
    thread = Thread("profile", saver.get_next_version)
    thread.begin(saver, {"count": 0, "topic": "Order 0", "done": False})

    def step() -> Superstep:
        update = {"count": len(thread.ids), "topic": f"Order {len(thread.ids)}"}
        return thread.superstep(update, update)

    for _ in range(100):
        step().save(saver)
    if call == "latest":
        return lambda: saver.get_tuple(thread.config())
    if call == "put":
        return lambda: step().put(saver)
    return lambda: step().put_writes(saver)


if __name__ == "__main__":
    main()
