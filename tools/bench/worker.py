"""What runs inside a peer's process: it opens the peer's saver and does as the orchestrator says.

The protocol is one JSON object a line: a command on standard input, its answer on standard output.

    {"do": "start", "peer": "sqlite", "workload": {"family": "history", "size": 100}}
    {"do": "prepare", "place": {...}, "budget": 60.0}
                                                  store what the workload starts from; answers bytes written meanwhile
    {"do": "open", "place": {...}}                open the saver; closes the one that was open
    {"do": "warm", "operation": "by_id", "count": 100, "seconds": 1.0, "budget": 60.0}
    {"do": "measure", "operation": "by_id", "count": 100, "seconds": 1.0, "budget": 60.0}
    {"do": "finish", "place": {...}}              close, and let go of what is in memory

The answer is `{"ok": ...}`; `{"left_out": "..."}` where it would have taken more than `budget` seconds; or
`{"error": "...", "traceback": "..."}` where the command failed.

Rules of this module:

- It runs in the peer's interpreter: no imports but the standard library's, LangGraph's and `tools.bench`'s.
- Standard output belongs to the protocol: what libraries print goes to standard error.
- The process ends when its standard input does, even in the middle of a command: it cannot outlive its parent.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from tools.bench.peers import PEERS, Place, forget
from tools.bench.workloads import LeftOut, Measured, Sampling, Session, make


class Worker:
    """One peer, and the workload that it is on. Each public method is a command."""

    _opened: AbstractContextManager[Any] | None = None

    def start(self, peer: str, workload: dict[str, Any]) -> dict[str, str]:
        """Begin with a workload; answers the versions of the peer's packages."""
        self._peer = PEERS[peer]
        self._workload = make(**workload)
        return {name: _version(name) for name in self._peer.packages}

    def prepare(self, place: dict[str, Any], budget: float) -> int | None:
        """Store what the workload starts from; answers how many bytes were written to files meanwhile, if known."""
        self._close()
        before = _written()
        with self._peer.open(Place(**place)) as saver:
            self._workload.prepare(saver, budget)
        after = _written()
        return None if before is None or after is None else after - before

    def open(self, place: dict[str, Any]) -> None:
        """Open the saver for measurements."""
        self._close()
        self._place = Place(**place)
        self._opened = self._peer.open(self._place)
        self._saver = self._opened.__enter__()

    def warm(self, operation: str, **sampling: Any) -> None:
        """What comes before a measurement."""
        self._workload.warm(operation, self._session(Sampling(**sampling)))

    def measure(self, operation: str, **sampling: Any) -> dict[str, Any]:
        """One measurement: see `tools.bench.workloads.Measured`."""
        session = self._session(Sampling(**sampling))
        gc.collect()
        measured: Measured = getattr(self._workload, operation)(session)
        series = {name: [round(sample, 8) for sample in samples] for name, samples in measured.series.items()}
        return {"series": series, "units": measured.units}

    def finish(self, place: dict[str, Any]) -> None:
        """Close, and let go of what is in memory."""
        self._close()
        forget(Place(**place))

    def _session(self, sampling: Sampling) -> Session:
        compact = partial(self._peer.compact, self._saver) if self._peer.compact else _cannot_compact
        return Session(self._saver, self._open_async, compact, sampling)

    def _open_async(self) -> AbstractAsyncContextManager[Any]:
        if self._peer.open_async is not None:
            return self._peer.open_async(self._place)
        return self._same_for_async()

    @asynccontextmanager
    async def _same_for_async(self) -> AsyncIterator[Any]:
        yield self._saver

    def _close(self) -> None:
        if self._opened is not None:
            opened, self._opened, self._saver = self._opened, None, None
            opened.__exit__(None, None, None)


def _cannot_compact(thread_id: str) -> None:
    raise NotImplementedError(f"this peer does not compact, not {thread_id} either")


def _written() -> int | None:
    """Bytes that this process has written, by the system's count; `None` where it keeps none."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed: from the working tree"


def main() -> None:
    """Serve commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    gc.freeze()  # what the imports left is looked through no more: there is a collection before each measurement
    worker = Worker()
    while True:
        command = commands.get()
        try:
            answer = {"ok": getattr(worker, command.pop("do"))(**command)}
        except LeftOut as reason:
            answer = {"left_out": str(reason)}
        except Exception as error:  # noqa: BLE001 - told to the orchestrator
            answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
