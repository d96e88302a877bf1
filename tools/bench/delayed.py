"""A storage in memory that takes its time: what an engine's own locks and loops cost, without a server's limits.

Rules of this module: each request waits once, then is answered at once; any number of requests wait side by side.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from lsm.storage import Storage


class DelayedStorage:
    """Answers as `storage` does, each request `delay` seconds later.

    Example:
        LSMSaver.from_storage(DelayedStorage(open_storage("memory://"), 0.02))
    """

    local = False
    appends = False
    conditional_deletes = False

    def __init__(self, storage: Storage, delay: float) -> None:
        self.url = storage.url
        self._storage = storage
        self._delay = delay

    def execute(self, request: Any) -> Any:
        time.sleep(self._delay)
        return self._storage.execute(request)

    async def aexecute(self, request: Any) -> Any:
        await asyncio.sleep(self._delay)
        return self._storage.execute(request)

    def close(self) -> None:
        self._storage.close()
