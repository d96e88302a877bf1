"""What an operation costs: its requests, its bytes and its rounds.

Rules of this module:

- Requests and bytes are counted where they reach the storage; rounds where the steps ask for them, for only there can
  be seen what was asked side by side.
- A request is a round. An `All` is as many rounds as the item that takes most, and steps as many as they take one after
  the other. `Now`, `Monotonic`, `Sleep` and `Wait` are none: who waits for another's commit is not charged for it.
- Steps are counted by steps around them (`_metered`), so that the engine's own drivers run them: what is counted is
  what users get.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, TypeVar

from lsm.drive import Runtime
from lsm.steps import (
    All,
    Append,
    Appended,
    Create,
    Delete,
    Found,
    GetRanges,
    Monotonic,
    Now,
    PutIf,
    Sleep,
    Steps,
    UploadPart,
    Wait,
)
from lsm.storage import Storage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """One request that a storage has executed.

    Attributes:
        kind: The name of its class in `lsm.steps`.
        key: The object, or the prefix of a listing; empty for requests about an upload or about many objects.
        sent: The bytes of bodies that went out.
        received: The bytes of bodies that came back.
        size: What the object is long afterwards, for writes; in bytes.
    """

    kind: str
    key: str
    sent: int
    received: int
    size: int

    @property
    def of_manifest(self) -> bool:
        """Whether it is about a thread's manifest."""
        return self.key.startswith("manifests/")


class CountingStorage:
    """A storage that keeps a record of what it is asked.

    Args:
        inner: The storage that answers.

    Attributes:
        requests: Every request since the last `reset`, failed ones included.
        rounds: The rounds of all steps that ran since then; counted by `CountingRuntime`.

    Example:
        storage = CountingStorage(open_storage("memory://"))
        saver = LSMSaver.from_storage(storage)
        saver._runtime = CountingRuntime(storage)
        saver.get_tuple(config)
        assert storage.rounds == 1
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url, self.local, self.appends = inner.url, inner.local, inner.appends
        self.conditional_deletes = inner.conditional_deletes
        self.requests: list[Request] = []
        self.rounds = 0
        self.lock = threading.Lock()

    def execute(self, request: Any) -> Any:
        answer = None
        try:
            answer = self.inner.execute(request)
        finally:
            self._count(request, answer)
        return answer

    async def aexecute(self, request: Any) -> Any:
        answer = None
        try:
            answer = await self.inner.aexecute(request)
        finally:
            self._count(request, answer)
        return answer

    def close(self) -> None:
        self.inner.close()

    def reset(self) -> None:
        """Start again from nothing."""
        with self.lock:
            self.requests, self.rounds = [], 0

    @property
    def kinds(self) -> Counter[str]:
        """How many requests there were of each kind."""
        return Counter(request.kind for request in self.requests)

    @property
    def sent(self) -> int:
        """The bytes that went out."""
        return sum(request.sent for request in self.requests)

    @property
    def received(self) -> int:
        """The bytes that came back."""
        return sum(request.received for request in self.requests)

    @property
    def commits(self) -> list[Request]:
        """The writes of manifests."""
        return [request for request in self.requests if request.of_manifest and request.kind in ("PutIf", "Append")]

    def _count(self, request: Any, answer: Any) -> None:
        sent = size = received = 0
        if isinstance(request, Append):
            size = sum(map(len, request.old)) + len(request.new)
            sent = len(request.new) if self.appends else size
        elif isinstance(request, PutIf | Create | UploadPart):
            sent = size = len(request.body)
        if isinstance(answer, Found | Appended):
            received = len(answer.body)
        elif isinstance(request, GetRanges) and answer is not None:
            received = sum(map(len, answer))
        key = getattr(request, "key", getattr(request, "prefix", ""))
        if isinstance(request, Delete) and len(request.keys) == 1:
            key = request.keys[0]
        with self.lock:
            self.requests.append(Request(type(request).__name__, key, sent, received, size))


class CountingRuntime(Runtime):
    """The drivers, counting rounds into a `CountingStorage`."""

    storage: CountingStorage

    def run(self, steps: Steps[T]) -> T:
        return super().run(self._counted(steps))

    async def arun(self, steps: Steps[T]) -> T:
        return await super().arun(self._counted(steps))

    def _counted(self, steps: Steps[T]) -> Steps[T]:
        meter = _Meter()
        try:
            return (yield from _metered(steps, meter))
        finally:
            with self.storage.lock:
                self.storage.rounds += meter.rounds


class _Meter:
    """The rounds of some steps so far."""

    rounds = 0


def _metered(steps: Steps[T], meter: _Meter) -> Steps[T]:
    """The same steps, with their rounds added to a meter."""
    try:
        request = next(steps)
        while True:
            asked, spent = _split(request)
            try:
                answer = yield asked
            except BaseException as error:  # noqa: BLE001 (the steps decide)
                meter.rounds += max((each.rounds for each in spent), default=0)
                request = steps.throw(error)
            else:
                meter.rounds += max((each.rounds for each in spent), default=0)
                request = steps.send(answer)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    finally:
        steps.close()


def _split(request: Any) -> tuple[Any, list[_Meter]]:
    """What to ask instead of a request, and the meters that tell afterwards what it took."""
    if isinstance(request, All):
        pairs = [_split(item) for item in request.of]
        return All([asked for asked, _ in pairs]), [meter for _, spent in pairs for meter in spent]
    meter = _Meter()
    if type(request) is GeneratorType:
        return _metered(request, meter), [meter]
    meter.rounds = 0 if isinstance(request, Monotonic | Now | Sleep | Wait) else 1
    return request, [meter]
