"""What a process keeps at hand, bounded in bytes.

Rules of this module:

- One least-recently-used cache for everything: manifests, pages of indexes, blocks, values. Keys say what a thing is,
  and things never change under their key, so nothing is ever invalidated.
- Losing an entry costs a request, never an answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any


class Cache:
    """A mapping that forgets what was not used for longest.

    Args:
        limit: How much it may hold, in bytes, by what its users say that things cost.

    Example:
        >>> cache = Cache(100)
        >>> cache.put("a", 1, 60); cache.put("b", 2, 60)
        >>> cache.get("a"), cache.get("b"), cache.size
        (None, 2, 60)
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.size = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        """What is under the key, or `None`."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: Any, cost: int) -> None:
        """Keep something, unless it alone is too large."""
        with self._lock:
            self._drop(key)
            if cost > self.limit:
                return
            self._entries[key] = value, cost
            self.size += cost
            while self.size > self.limit:
                self._drop(next(iter(self._entries)))

    def rename(self, old: Hashable, new: Hashable) -> None:
        """Move an entry, if there is one, to the key that its thing has now."""
        with self._lock:
            entry = self._entries.pop(old, None)
            if entry is None:
                return
            self.size -= entry[1]
            self._drop(new)
            self._entries[new] = entry
            self.size += entry[1]

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size -= entry[1]
