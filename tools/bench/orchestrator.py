"""Who measures what, when.

For each workload: every peer stores what it starts from, as many side by side as there are processors; then rounds, in
each of which every operation is measured for one peer after the other. Which peer goes first moves on with the round.

Rules of this module:

- It measures nothing itself: times come from the workers, requests from the proxy, bytes from the services.
- While one peer is measured, no other is asked for anything.
- A peer that fails at an operation, or does not answer in time, is told in the results and asked no more for it; so is
  one that would take too long. The others go on.
- What was measured is handed on after each workload.
- Every process that it starts has ended when it returns, whatever happened.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.proxy import Request
from tools.bench.environments import ROOT, Unavailable, interpreter
from tools.bench.peers import PEERS, Place
from tools.bench.services import Services
from tools.bench.workloads import LeftOut, Workload, make


class WorkerFailed(Exception):
    """A command failed in the worker, or the worker did."""


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        peers: Names from `PEERS`.
        plan: Arguments of `workloads.make`, one for each workload.
        rounds: How many rounds.
        count: At most so many samples in one measurement ...
        seconds: ... and at most so many seconds.
        cold: How many samples of a cold operation in one round, each on a saver just opened.
        cell: A peer's operation that has taken so many seconds, over the rounds so far, is measured in no further one.
        filling: A peer that would need more seconds to store what a workload starts from is left out of it.
        budget: An operation of which a sample can be seen to take more seconds is left out.
        patience: A worker that does not answer within so many seconds, beside those that it may take, is ended.
        hurry: Seconds after which there are no further rounds: of what is then left, each is measured once.
        delay: Seconds by which each request to S3 is delayed.
        scratch: Where files are stored; a folder on a real disk, or syncs cost nothing.
    """

    peers: Sequence[str]
    plan: Sequence[dict[str, Any]]
    rounds: int = 5
    count: int = 200
    seconds: float = 0.2
    cold: int = 3
    cell: float = 3.0
    filling: float = 600.0
    budget: float = 40.0
    patience: float = 80.0
    hurry: float = 1_500.0
    delay: float = 0.02
    scratch: Path = Path("/var/tmp")


class WorkerProcess:
    """A worker, from the orchestrator's side.

    Args:
        python: Its interpreter.
        log: What it says goes there.
        patience: See `Options.patience`.
    """

    def __init__(self, python: str, log: Path, patience: float) -> None:
        self._log = log
        self._patience = patience
        paths = [str(ROOT), *([str(ROOT / "saver")] if python == sys.executable else [])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [python, "-m", "tools.bench.worker"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Have one command done; returns its answer.

        Raises:
            LeftOut: It would take too long.
            WorkerFailed: It raised, the worker ended, or it did not answer in time and was ended.
        """
        assert self._process.stdin is not None
        patience = self._patience + arguments.get("budget", 0.0)
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=patience)
        except queue.Empty:
            self.stop()
            raise WorkerFailed(f"no answer after {patience:g} s") from None
        except BrokenPipeError:
            line = ""
        if not line:
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise WorkerFailed(f"the worker ended: {' '.join(last) or 'without a word'}")
        answer = json.loads(line)
        if "left_out" in answer:
            raise LeftOut(answer["left_out"])
        if "error" in answer:
            with self._log.open("a") as log:
                log.write(answer["traceback"])
            raise WorkerFailed(answer["error"])
        return answer["ok"]

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # a command that was never read
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


@dataclass
class Entrant:
    """A peer that takes part in a workload.

    Attributes:
        name: The peer.
        worker: Where it runs.
        place: Where it stores.
        given_up: Operations that it is asked no more for.
        spent: Seconds that measurements took so far, what comes before each included, by operation.
        written: Bytes written to files while it was filled, if known.
    """

    name: str
    worker: WorkerProcess
    place: Place
    given_up: set[str] = field(default_factory=set)
    spent: Counter[str] = field(default_factory=Counter)
    written: int | None = None

    def may(self, operation: str) -> bool:
        """Whether it is asked for an operation: neither this nor what it stands on was given up."""
        return not self.given_up & {operation, "prepare", "open"}


class Run:
    """One run of the benchmark.

    Args:
        options: What to run.
        save: Called after each workload with the results so far.

    Example:
        results = Run(Options(peers=["memory", "sqlite"], plan=[{"family": "superstep", "size": 0}])).results()
    """

    def __init__(self, options: Options, save: Callable[[dict[str, Any]], None] = lambda results: None) -> None:
        self._options = options
        self._save = save
        self._began = datetime.now(UTC)
        self._done = 0
        self._pythons: dict[str, str] = {}
        self._workers: dict[str, WorkerProcess] = {}
        self._peers: dict[str, dict[str, Any]] = {}
        self._measurements: list[dict[str, Any]] = []
        self._stored: list[dict[str, Any]] = []
        self._failures: list[dict[str, Any]] = []
        self._left_out: list[dict[str, Any]] = []

    def results(self) -> dict[str, Any]:
        """Run it all, telling on standard error how far it is. Returns what `tools.bench.report` reads."""
        options = self._options
        with tempfile.TemporaryDirectory(prefix="bench-", dir=options.scratch) as scratch:
            Path(scratch).chmod(0o755)  # Postgres runs as another user
            services = Services(options.delay, Path(scratch))
            side_by_side = ThreadPoolExecutor(os.cpu_count())
            try:
                self._enlist(services, Path(scratch))
                for number, arguments in enumerate(options.plan, 1):
                    workload = make(**arguments)
                    self._say(f"[{number}/{len(options.plan)}] {workload.name}")
                    self._run(workload, arguments, services, Path(scratch), side_by_side)
                    self._done = number
                    self._save(self._so_far())
            finally:
                for worker in self._workers.values():
                    worker.stop()
                side_by_side.shutdown(cancel_futures=True)  # whoever waited for a worker waits no more
                services.close()
        return self._so_far()

    def _so_far(self) -> dict[str, Any]:
        options = self._options
        return {
            "began": self._began.isoformat(timespec="seconds"),
            "took_seconds": round((datetime.now(UTC) - self._began).total_seconds(), 1),
            "machine": _machine(options.scratch),
            "settings": {"rounds": options.rounds, "delay": options.delay, "seconds": options.seconds},
            "plan": [{**arguments, "name": make(**arguments).name} for arguments in options.plan],
            "done": self._done,
            "peers": self._peers,
            "measurements": self._measurements,
            "stored": self._stored,
            "failures": self._failures,
            "left_out": self._left_out,
        }

    def _enlist(self, services: Services, scratch: Path) -> None:
        """Find an interpreter and the services for each peer, and start it; those without are told with the reason."""
        for name in self._options.peers:
            peer = PEERS[name]
            self._peers[name] = {"title": peer.title, "storage": peer.storage, "status": "ok", "versions": {}}
            try:
                self._pythons[name] = interpreter(name, peer.requires, peer.langgraph)
                if peer.storage == "postgres":
                    self._peers[name]["versions"]["PostgreSQL"] = services.postgres().version
            except Unavailable as reason:
                self._peers[name] |= {"status": "skipped", "reason": str(reason)}
                self._say(f"  {name} is skipped: {reason}")
                self._pythons.pop(name, None)
        for name in self._pythons:  # their imports take a while: side by side
            self._worker(name, scratch)

    def _run(
        self,
        workload: Workload,
        arguments: dict[str, Any],
        services: Services,
        scratch: Path,
        side_by_side: ThreadPoolExecutor,
    ) -> None:
        entrants = self._entrants(workload, services, scratch)
        for entrant in entrants:
            self._try(entrant, workload, "prepare", partial(self._start, arguments=arguments))
        fill = partial(self._fill, workload=workload, services=services)
        if not workload.each_round:
            list(side_by_side.map(fill, entrants))
        measured = entrants
        if workload.weighed:
            self._weigh(entrants, workload, services, compacted=False)
            measured = [entrant for entrant in entrants if PEERS[entrant.name].compact]
        for number in range(1 if workload.weighed else self._options.rounds):
            if number and (datetime.now(UTC) - self._began).total_seconds() > self._options.hurry:
                break
            if workload.each_round:
                list(side_by_side.map(fill, entrants))
            self._round(number, measured, workload, services)
        if workload.weighed:
            self._weigh(measured, workload, services, compacted=True)
        # Not reached when the run ends early: then places go with the workers and the services.
        for entrant in entrants:
            self._finish(entrant, services)

    def _entrants(self, workload: Workload, services: Services, scratch: Path) -> list[Entrant]:
        """The peers that take part in a workload, each with a place."""
        entrants = []
        for name in self._pythons:
            peer = PEERS[name]
            if not peer.takes_part(workload.family) or (workload.weighed and peer.storage == "memory"):
                continue
            if reason := peer.refuses(workload.family, workload.size):
                self._leave_out(name, workload, "prepare", reason)
                continue
            try:
                place = services.place(peer, f"{name}-{workload.name}")
                entrants.append(Entrant(name, self._worker(name, scratch), place))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this peer's failure in this workload
                self._fail(name, workload, "prepare", error, ended=True)
        return entrants

    def _worker(self, name: str, scratch: Path) -> WorkerProcess:
        """A peer's worker: the one that it has, or a new one where it has none or lost it."""
        worker = self._workers.get(name)
        if worker is None or not worker.alive:
            worker = self._workers[name] = WorkerProcess(
                self._pythons[name], scratch / f"{name}.log", self._options.patience
            )
        return worker

    def _start(self, entrant: Entrant, arguments: dict[str, Any]) -> None:
        self._peers[entrant.name]["versions"] |= entrant.worker.ask("start", peer=entrant.name, workload=arguments)

    def _fill(self, entrant: Entrant, workload: Workload, services: Services) -> None:
        began = time.monotonic()

        def fill(entrant: Entrant) -> None:
            place = services.filling(entrant.place).to_json()
            entrant.written = entrant.worker.ask("prepare", place=place, budget=self._options.filling)

        self._try(entrant, workload, "prepare", fill)
        if (took := time.monotonic() - began) > 5:
            self._say(f"  {entrant.name}: filling took {took:.0f} s")

    def _weigh(self, entrants: list[Entrant], workload: Workload, services: Services, *, compacted: bool) -> None:
        def weigh(entrant: Entrant) -> None:
            entry = {"workload": workload.name, "peer": entrant.name, "bytes": services.weigh(entrant.place)}
            written = {} if compacted else {"written": entrant.written if entrant.place.directory else None}
            self._stored.append({**entry, "compacted": compacted, **written})

        for entrant in entrants:
            if not compacted or entrant.may("compact"):
                self._try(entrant, workload, "weigh", weigh)

    def _finish(self, entrant: Entrant, services: Services) -> None:
        """Give back what an entrant has. What could be measured was: that this fails is said, and no more."""
        try:
            if entrant.worker.alive:
                entrant.worker.ask("finish", place=entrant.place.to_json())
            services.clear(entrant.place)
        except Exception as error:  # noqa: BLE001 - see above
            self._say(f"  {entrant.name} was not cleared: {error}")

    def _round(self, number: int, entrants: list[Entrant], workload: Workload, services: Services) -> None:
        first = number % len(entrants) if entrants else 0
        order = entrants[first:] + entrants[:first]
        for entrant in order:
            self._try(entrant, workload, "open", lambda e: e.worker.ask("open", place=e.place.to_json()))
        for operation in workload.operations:
            for entrant in order:
                if not number or entrant.spent[operation] < self._options.cell:
                    measure = partial(self._measure, workload=workload, operation=operation, number=number)
                    self._try(entrant, workload, operation, partial(measure, services=services))
            medians = self._medians(workload, operation, number)
            self._say(f"  round {number + 1}/{self._options.rounds} {operation}: {medians}")

    def _measure(self, entrant: Entrant, workload: Workload, operation: str, number: int, services: Services) -> None:
        """One measurement; of a cold operation several, each on a saver that was just opened."""
        cold = operation in workload.cold
        count = 1 if cold else self._options.count
        began = time.monotonic()
        for _ in range(self._options.cold if cold else 1):
            if cold:
                entrant.worker.ask("open", place=entrant.place.to_json())
            sampling = {"count": count, "seconds": self._options.seconds, "budget": self._options.budget}
            entrant.worker.ask("warm", operation=operation, **sampling)
            if entrant.place.bucket:
                services.forget_requests()
            answer = entrant.worker.ask("measure", operation=operation, **sampling)
            measurement = {"workload": workload.name, "operation": operation, "peer": entrant.name, "round": number}
            if entrant.place.bucket:
                measurement["requests"] = _traffic(services.requests(entrant.place))
            self._measurements.append(measurement | answer)
        entrant.spent[operation] += time.monotonic() - began

    def _try(self, entrant: Entrant, workload: Workload, operation: str, action: Callable[[Entrant], None]) -> None:
        """Do it, unless this or what it stands on was given up before."""
        if not entrant.may(operation):
            return
        try:
            action(entrant)
        except LeftOut as reason:
            entrant.given_up.add(operation)
            self._leave_out(entrant.name, workload, operation, str(reason))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this cell's failure, and the run goes on
            ended = not entrant.worker.alive
            entrant.given_up |= {operation, *(["open"] if ended else [])}
            self._fail(entrant.name, workload, operation, error, ended=ended)

    def _fail(self, peer: str, workload: Workload, operation: str, error: Exception, *, ended: bool) -> None:
        """Note a failure; `ended` says that the peer does nothing more in this workload."""
        told = str(error) if isinstance(error, WorkerFailed) else f"{type(error).__name__}: {error}"
        failure = {"workload": workload.name, "operation": operation, "peer": peer, "error": told[:500], "ended": ended}
        self._failures.append(failure)
        self._say(f"  {peer} failed at {operation}: {failure['error']}")

    def _leave_out(self, peer: str, workload: Workload, operation: str, reason: str) -> None:
        self._left_out.append({"workload": workload.name, "operation": operation, "peer": peer, "reason": reason})
        self._say(f"  {peer} is left out of {operation}: {reason}")

    def _medians(self, workload: Workload, operation: str, number: int) -> str:
        """One line of progress: the median of each peer, in milliseconds."""
        told = {}
        for measured in self._measurements:
            if (measured["workload"], measured["operation"], measured["round"]) == (workload.name, operation, number):
                told[measured["peer"]] = f"{median(list(measured['series'].values())[-1]) * 1e3:.3g}"
        return "  ".join(f"{peer} {value} ms" for peer, value in told.items())

    @staticmethod
    def _say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _traffic(requests: list[Request]) -> dict[str, int]:
    """Requests by what S3 bills them as, and bytes both ways."""
    counts = Counter(_billed_as(request) for request in requests)
    sent = sum(request.bytes_in for request in requests)
    received = sum(request.bytes_out for request in requests)
    return {"write": 0, "read": 0, "list": 0, "delete": 0, **counts, "bytes_sent": sent, "bytes_received": received}


def _billed_as(request: Request) -> str:
    if request.method == "DELETE" or "delete" in request.query:
        return "delete"
    if request.method in ("PUT", "POST"):
        return "write"
    return "read" if request.key else "list"


def _machine(scratch: Path) -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        inside = [mount for mount in mounts if scratch.resolve().is_relative_to(mount[1])]
        filesystem = max(inside, key=lambda mount: len(mount[1]))[2]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
    except (OSError, StopIteration, ValueError):
        filesystem, memory = "unknown", 0
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gib": memory,
        "filesystem": filesystem,
        "python": platform.python_version(),
        "langgraph": metadata.version("langgraph"),
        "langgraph-checkpoint": metadata.version("langgraph-checkpoint"),
        "moto": metadata.version("moto"),
    }
