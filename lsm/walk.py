"""Going through all objects, and all threads, of a store.

Rules of this module:

- What has not a name of this store's is not seen here: it is somebody else's.
- Manifests are listed a page at a time, with size, tag and last change; none is opened to know that a thread is there.
- What is done for many threads is done for so many at once, in steps, by whoever is free next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lsm.errors import CorruptionError, NestedStoreError
from lsm.format.names import MANIFESTS, ROOT_KEY, kind_of, manifest_key, thread_id_of
from lsm.process import Process
from lsm.steps import All, Delete, Entry, Get, List, Steps, results
from lsm.view import open_view

T = TypeVar("T")

AT_ONCE = 1000
"""Objects that are removed with one request; S3 takes no more."""


def own(entries: Iterable[Entry]) -> list[Entry]:
    """Those of some objects that have names of this store's.

    Raises:
        NestedStoreError: If another store lies among them.
    """
    found = []
    for entry in entries:
        if kind_of(entry.key) is not None:
            found.append(entry)
        elif entry.key.endswith(f"/{ROOT_KEY}"):
            raise NestedStoreError(
                f"{entry.key}: another store lies in the folders of this one, which cannot tell the objects of the two "
                "apart. Move it to a place of its own: nothing is listed or removed here meanwhile"
            )
    return found


def list_all(prefix: str) -> Steps[list[Entry]]:
    """All objects of this store below a prefix."""
    entries: list[Entry] = []
    after = None
    while True:
        page = yield List(prefix, after)
        entries += own(page.entries)
        if not page.more or not page.entries:
            return entries
        after = page.entries[-1].key


def delete_all(keys: Sequence[str]) -> Steps[None]:
    """Remove objects, `AT_ONCE` at a time."""
    for start in range(0, len(keys), AT_ONCE):
        yield Delete(keys[start : start + AT_ONCE])


class Manifests:
    """The manifests of a store, in order of keys."""

    def __init__(self) -> None:
        self._after: str | None = None
        self.done = False
        """Whether all have been given."""

    def next(self) -> Steps[list[Entry]]:
        """The next page. One request."""
        page = yield List(MANIFESTS, self._after)
        self.done = not page.more
        if page.entries:
            self._after = page.entries[-1].key
        return own(page.entries)


def told_id(key: str) -> str | None:
    """The thread whose manifest lies under a key, where the key tells.

    Example:
        >>> told_id("manifests/c6/user-1"), told_id("manifests/00/user-1")
        ('user-1', None)
    """
    thread_id = thread_id_of(key.rsplit("/", 1)[-1])
    return thread_id if thread_id is not None and manifest_key(thread_id) == key else None


def thread_id_at(process: Process, key: str) -> Steps[str | None]:
    """The thread whose manifest lies under a key, or `None` where it has gone. At most one request.

    Raises:
        CorruptionError: If what lies there is no manifest, or another thread's.
    """
    thread_id = told_id(key)
    if thread_id is not None:
        return thread_id
    found = yield Get(key)
    if found is None:
        return None
    thread_id = open_view(key, found.body, found.tag, None, process.appends).header.thread_id
    if manifest_key(thread_id) != key:
        raise CorruptionError(f"{key}: this is the manifest of thread {thread_id!r}: an object was moved")
    return thread_id


def side_by_side(queue: deque[T], do: Callable[[T], Steps[None]], width: int) -> Steps[None]:
    """Do something for each item of a queue, for up to `width` at once, until the queue is empty.

    Args:
        queue: What is to be done. It may grow meanwhile.
        do: Makes the steps for one item. What they raise ends it all.
        width: How many at once.
    """

    def work() -> Steps[None]:
        while queue:
            try:
                item = queue.popleft()
            except IndexError:  # another was faster
                return
            yield from do(item)

    results((yield All([work() for _ in range(min(width, len(queue)))])))
