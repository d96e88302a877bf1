"""Housekeeping in the background of a process that writes.

Rules of this module:

- It is told of threads whose segments should be merged, and works them off, one after the other, on the runtime's
  threads; callers never wait for it.
- It can be stopped between any two requests (`lsm.stop`): what it was making is left to the collector.
- What fails is logged and left for the next time.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from concurrent.futures import Future, wait

from lsm.drive import Runtime
from lsm.engine import Engine
from lsm.errors import LSMError
from lsm.steps import Steps
from lsm.stop import Stop, Stopped

logger = logging.getLogger("lsm")

_CLOSING = 10.0


class Worker:
    """Keeps the threads that an engine writes in shape.

    Args:
        engine: The engine. The worker listens to its `on_due`.
        runtime: Where it runs.
    """

    def __init__(self, engine: Engine, runtime: Runtime):
        self._engine = engine
        self._runtime = runtime
        self._reset()
        engine.on_due = self.due
        _workers.add(self)

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._due: dict[str, None] = {}
        self._working = False
        self._running: Future[None] | None = None
        self._stop = Stop()

    def due(self, thread_id: str) -> None:
        """Take on a thread. Returns at once."""
        if self._process != os.getpid():
            self._reset()  # a forked child has none of its parent's threads
        with self._lock:
            if self._stop.asked:
                return
            self._due[thread_id] = None
            if self._working:
                return
            self._working = True
        # Without the lock: where no thread can be started any more, it runs here and now.
        self._running = self._runtime.submit(self._work())

    def _work(self) -> Steps[None]:
        while (thread_id := self._next()) is not None:
            try:
                yield from self._stop.unless_asked(self._engine.maintain(thread_id))
            except Stopped:
                pass
            except Exception as error:
                logger.warning(
                    "thread %r: housekeeping failed and will be tried again later: %s",
                    thread_id,
                    error,
                    exc_info=not isinstance(error, LSMError),
                )

    def _next(self) -> str | None:
        with self._lock:
            if not self._due or self._stop.asked:
                self._working = False
                return None
            thread_id = next(iter(self._due))
            del self._due[thread_id]
            return thread_id

    def close(self) -> None:
        """Stop between two requests, and wait for that."""
        if self._process != os.getpid():
            self._reset()
        with self._lock:
            self._stop.ask()
            self._due.clear()
            running = self._running
        if running is not None and wait([running], _CLOSING).not_done:
            logger.warning("housekeeping did not stop within %g s", _CLOSING)


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for worker in list(_workers):
        worker.close()
