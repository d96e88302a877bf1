"""What golden files and fuzzing start from: one of everything that the format knows, always the same.

Rules of this module:

- No chance and no clock: the same code makes the same bytes, with compression `"none"`.
- Everything lies in a plain dict of objects, so that a test can bend the bytes before it has them read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

from lsm.drive import run
from lsm.engine import Engine
from lsm.errors import LSMError
from lsm.format.envelope import Compression
from lsm.steps import All, Create, Found, Get, List, Now, Steps
from lsm.storage.memory import MemoryStorage

THREAD = "Thread 1/é"
NAMESPACES = ("", "child:1")
CHANNELS = ("count", "empty", "large", "messages")
START = 1_700_000_000.0

Objects = dict[str, bytes]


class _Still:
    """Entropy that counts, so that every run has the same."""

    def __init__(self) -> None:
        self._numbers: Iterator[int] = itertools.count(1)

    def __call__(self, size: int) -> bytes:
        return next(self._numbers).to_bytes(size, "big")


def _timed(steps: Steps[Any], now: float) -> Steps[Any]:
    """The same steps, at a time of our own, however often they ask for it."""
    outcome: Any = None
    while True:
        try:
            request = steps.throw(outcome) if isinstance(outcome, LSMError) else steps.send(outcome)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Now):
            outcome = now
            continue
        if isinstance(request, All):
            request = All([_timed(part, now) if isinstance(part, Generator) else part for part in request.of])
        try:
            outcome = yield request
        except LSMError as error:
            outcome = error


def make_store(compression: Compression = "none") -> Objects:
    """A store with two threads: commits, two flushes, large values, one of them borrowed, patches, writes before and
    after a flush."""
    storage = MemoryStorage()
    storage.execute(Create("lsm.json", b'{"format": 1, "conditional_writes": "verified", "created_by": "samples"}\n'))
    engine = Engine(storage.url, storage.appends, _Still(), compression=compression)
    clock = itertools.count(START, 1.0)

    def do(steps: Steps[Any]) -> None:
        run(_timed(steps, next(clock)), storage)

    for thread_id in (THREAD, "other"):
        for number, namespace in itertools.product(range(8), NAMESPACES):
            do(_put(engine, thread_id, namespace, number))
            if number % 2:
                values = [("messages", 0), ("steps", 1), ("__error__", -1)]
                writes = [(index, channel, ("bytes", b"write %d" % number)) for channel, index in values]
                if number == 3:
                    writes.append((2, "large", ("bytes", large(number + 1, thread_id))))
                do(engine.put_writes(thread_id, namespace, f"{number:04}", f"task-{number}", "~path", writes))
            if number in (2, 5) and namespace:
                do(engine.flush(thread_id))
        early = [(0, "messages", ("bytes", b"before its checkpoint"))]
        do(engine.put_writes(thread_id, "", "0009", "early", "", early))
    return objects_of(storage)


def _put(engine: Engine, thread_id: str, namespace: str, number: int) -> Steps[None]:
    versions = {channel: f"{number if channel != 'large' else number // 4:08}" for channel in CHANNELS}
    values: dict[str, Any] = {
        "count": (versions["count"], ("int", str(number).encode())),
        "empty": (versions["empty"], None),
        "messages": (versions["messages"], ("bytes", message_list(number))),
    }
    if number % 4 == 0:
        values["large"] = (versions["large"], ("bytes", large(number, thread_id)))
    return engine.put(
        thread_id,
        namespace,
        f"{number:04}",
        f"{number - 1:04}" if number else None,
        ("bytes", b"checkpoint %d" % number),
        ("bytes", b"metadata %d" % number),
        versions,
        values,
        root="0000" if namespace else None,
        terms=[b"term-%03d" % number, b"even    " if number % 2 == 0 else b"odd     "],
        deltas=("messages",) if number % 3 == 0 else None,
    )


def large(number: int, thread_id: str) -> bytes:
    """A value that does not ride in a frame."""
    return b"".join([b" %04d" % (each * each * (number + 1) % 9973) for each in range(2_000)]) + thread_id.encode()


def message_list(number: int) -> bytes:
    """A value that grows with every checkpoint."""
    return b"%04d" % number + b"".join(b"message %04d; " % each for each in range(60 + number))


def objects_of(storage: MemoryStorage) -> Objects:
    """All objects of a storage."""
    keys = [entry.key for entry in storage.execute(List("")).entries]
    found = {key: storage.execute(Get(key)) for key in keys}
    return {key: each.body for key, each in found.items() if isinstance(each, Found)}


def storage_of(objects: Objects) -> MemoryStorage:
    """A storage that holds these objects."""
    storage = MemoryStorage()
    for key, body in objects.items():
        storage.execute(Create(key, body))
    return storage


def _reader(make: Callable[[Engine, str], Steps[Any]]) -> Callable[[Objects, str], Any]:
    """A read by a process that knows nothing yet."""

    def read(objects: Objects, thread_id: str = THREAD) -> Any:
        storage = storage_of(objects)
        return run(make(Engine(storage.url, storage.appends, _Still()), thread_id), storage)

    return read


READS: dict[str, Callable[[Objects, str], Any]] = {
    "latest": _reader(lambda engine, thread_id: engine.get(thread_id, "")),
    "latest of a child": _reader(lambda engine, thread_id: engine.get(thread_id, "child:1")),
    **{
        f"by id {n}": _reader(lambda engine, thread_id, id_=f"{n:04}": engine.get(thread_id, "", id_)) for n in range(8)
    },
    "list": _reader(lambda engine, thread_id: engine.list([thread_id]).next(100)),
    "filter": _reader(lambda engine, thread_id: engine.list([thread_id], terms=[[b"even    "]]).next(100)),
    "before": _reader(lambda engine, thread_id: engine.list([thread_id], "", before="0004").next(2)),
    "all": _reader(lambda engine, thread_id: engine.list(None).next(100)),
    "history": _reader(lambda engine, thread_id: engine.history(thread_id, "", None, ["messages", "large", "steps"])),
}
"""Everything that can be asked of a thread of the store."""
