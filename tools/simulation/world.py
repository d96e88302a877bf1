"""The third driver of the engine's steps: it owns the clock, and decides who runs next.

Rules of this module:

- Everything happens as an event on one queue, in order of time. A storage request is two events at least: it arrives at
  the store, and its answer arrives at the caller; anything may happen in between.
- A node is a process: one engine, with what it remembers. It dies with all its callers, without their `finally` having
  any effect on storage, and starts again empty.
- A node may be stopped (SIGSTOP), whatever it holds: nobody in it goes on, and nothing that it asked of files is done.
- Every node has a clock of its own; while all is quiet they are set, so that readers agree on what has expired.
- What a caller has under way when it is interrupted or dies may still arrive at an object store. Of a file, a request
  has been carried out by then, or never will be; an append may be torn.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from random import Random
from types import GeneratorType
from typing import Any

from lsm.engine import Engine
from lsm.errors import Conflict, Locked, Refused, StorageError, Throttled, Unavailable
from lsm.format.names import MANIFESTS
from lsm.limits import SENT_WITHIN, TOMBSTONE
from lsm.steps import (
    All,
    Append,
    Create,
    Delete,
    DeleteIf,
    FinishUpload,
    Holder,
    Lock,
    Monotonic,
    Now,
    PutIf,
    Settled,
    Sleep,
    Unlock,
    Wait,
)
from tools.simulation.faults import Fault, Rates
from tools.simulation.store import Store
from tools.simulation.story import Story, describe, short

START = 1_700_000_000.0
MOST_EVENTS = 100_000
TRIES = 3
"""How often a request looks whether a lock is free, a moment apart, before it fails."""

Answer = Callable[[Any, BaseException | None], None]


class Interrupted(BaseException):
    """A caller is cancelled, or its user presses Ctrl-C."""


class Violation(BaseException):
    """What must never happen did. Not an `Exception`, so that nobody on the way takes it for an answer."""


@dataclass(frozen=True, slots=True)
class Together:
    """As `All`, of calls that belong to different callers: each may be interrupted by itself."""

    of: Sequence[Any]


class Node:
    """A process.

    Attributes:
        engine: Its engine. A node that has crashed gets a new one.
        life: How often it has been started.
        ahead: By how many seconds its clock is.
    """

    def __init__(
        self,
        world: World,
        name: str,
        make: Callable[[Callable[[int], bytes]], Engine],
        random: Random,
        ahead: float = 0.0,
    ):
        self.world = world
        self.name = name
        self.ahead = ahead
        self.life = 0
        self.callers: dict[Caller, None] = {}
        self.flights: dict[Flight, None] = {}
        self._make = make
        self._random = random
        self.start()

    def start(self) -> None:
        """Start it, empty."""
        self.life += 1
        self._goes_on = 0.0
        self.engine = self._make(self._random.randbytes)

    def stop(self) -> None:
        """Stop it for a while."""
        seconds = self.world.late(self._random)
        self.world.story.tell(self.world.now, self.name, f"is STOPPED for {seconds:.0f} seconds")
        self._goes_on = max(self._goes_on, self.world.now + seconds)

    def defers(self, what: Callable[..., None], *args: Any) -> bool:
        """Whether it is stopped; then something happens when it goes on."""
        left = self._goes_on - self.world.now
        if left > 0:
            self.world.after(left, what, *args)
        return left > 0

    def crash(self) -> None:
        """Kill it, and start it again."""
        self.world.story.tell(self.world.now, self.name, "CRASHES, and starts again, empty")
        callers, self.callers = list(self.callers), {}
        flights, self.flights = list(self.flights), {}
        for flight in flights:
            flight.abandon(torn=True)
        for caller in callers:
            caller.kill()
        for held in [held for held in self.world.held.values() if held.caller.node is self]:
            self.world.unlock(held)
        self.start()


class Caller:
    """Steps under way.

    Args:
        node: The process it belongs to.
        steps: The steps.
        name: Its name in the story.
        random: Its own chances.
        done: Told its result or error, unless it is killed.
        exposed: Whether it may be interrupted.
    """

    def __init__(
        self,
        node: Node,
        steps: Generator[Any, Any, Any],
        name: str,
        random: Random,
        done: Answer,
        exposed: bool = False,
    ):
        self.node = node
        self.world = node.world
        self.steps = steps
        self.name = name
        self.random = random
        self.over = False
        self._done = done
        self._exposed = exposed
        self._turn = 0
        self._interrupted = False
        self._children: list[Caller] = []
        self._flights: list[Flight] = []
        node.callers[self] = None

    def start(self) -> None:
        """Let it begin soon."""
        self.world.after(self.world.brief(self.random), self._resume, self._turn, None, None)

    def kill(self) -> None:
        """Its process is gone."""
        self.over = True
        with suppress(RuntimeError):  # its `finally` asks for something: there is nobody to answer
            self.steps.close()

    def _resume(self, turn: int, value: Any, error: BaseException | None) -> None:
        if self.over or turn != self._turn or self.node.defers(self._resume, turn, value, error):
            return
        if self._interrupted and error is None:
            self._interrupted, error = False, Interrupted()
        self._advance(value, error)

    def _advance(self, value: Any, error: BaseException | None) -> None:
        steps, world = self.steps, self.world
        self._children, self._flights = [], []
        while True:
            self._turn += 1
            try:
                request = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as stop:
                self._end(stop.value, None)
                return
            except Violation:
                raise
            except BaseException as raised:  # noqa: BLE001 (for whoever waits)
                self._end(None, raised)
                return
            if type(request) is Now:
                value, error = world.clock(self.node), None
            elif type(request) is Monotonic:
                value, error = world.now, None
            else:
                break
        turn = self._turn
        self._perform(request, lambda value, error: self._resume(turn, value, error))
        if self._exposed and type(request) is not Sleep and self.random.random() < world.rates.interrupt:
            world.after(self.random.random() * 0.02, self._interrupt, turn)

    def _end(self, value: Any, error: BaseException | None) -> None:
        self.over = True
        self.node.callers.pop(self, None)
        self._done(value, error)

    def _interrupt(self, turn: int) -> None:
        if self.over or turn != self._turn or self.node.defers(self._interrupt, turn):
            return
        self.world.story.tell(self.world.now, self.name, "is INTERRUPTED")
        children = [child for child in self._children if not child.over]
        if children and self.random.random() < 0.5:
            # As asyncio does: the others are cancelled, and waited for. Else they go on, and nobody looks at them.
            self._interrupted = True
            for child in children:
                child._interrupt(child._turn)
            return
        for flight in self._flights:
            flight.abandon()
        self._advance(None, Interrupted())

    def _perform(self, request: Any, answer: Answer) -> None:
        kind, world = type(request), self.world
        if kind is All or kind is Together:
            self._perform_all(request.of, answer, kind is Together)
        elif kind is GeneratorType:
            self._spawn(request, answer, False)
        elif kind is Sleep:
            if any(held.caller is self for held in world.held.values()):
                raise Violation(f"{self.name} sleeps while the others wait for it")
            world.after(request.seconds, answer, None, None)
        elif kind is Now:
            world.after(world.brief(self.random), answer, world.clock(self.node), None)
        elif kind is Monotonic:
            world.after(world.brief(self.random), answer, world.now, None)
        elif kind is Holder:
            world.after(world.brief(self.random), answer, "somebody", None)
        elif kind is Wait:

            def woken(future: Any) -> None:
                error = future.exception()
                world.after(world.brief(self.random), answer, None if error else future.result(), error)

            request.future.add_done_callback(woken)
        elif kind is Lock:
            self._lock(request.key, self._turn, answer)
        elif kind is Unlock:
            world.unlock(request.lock)
            world.after(world.brief(self.random), answer, None, None)
        else:
            flight = Flight(self, request, answer)
            self._flights.append(flight)
            flight.depart()

    def _lock(self, key: str, turn: int, answer: Answer, tries: int = TRIES) -> None:
        world = self.world
        if self.over or turn != self._turn or self.node.defers(self._lock, key, turn, answer):
            return
        if key in world.locked or key in world.held:
            if tries:
                world.after(world.brief(self.random), self._lock, key, turn, answer, tries - 1)
            else:
                answer(None, Locked("another has it", key))
            return
        held = None
        if key in world.store.objects:
            held = world.held[key] = Held(key, self)
            world.story.tell(world.now, self.name, f"locks {short(key)}")
        answer(held, None)

    def _perform_all(self, items: Sequence[Any], answer: Answer, exposed: bool) -> None:
        outcomes: list[Any] = [None] * len(items)
        left = len(items)

        def settle(at: int, value: Any, error: BaseException | None) -> None:
            nonlocal left
            outcomes[at] = value if error is None else error
            left -= 1
            if not left:
                answer(outcomes, None)

        for at, item in enumerate(items):
            told = partial(settle, at)
            if type(item) is GeneratorType:
                self._spawn(item, told, exposed)
            else:
                self._perform(item, told)
        if not items:
            self.world.after(0.0, answer, outcomes, None)

    def _spawn(self, steps: Generator[Any, Any, Any], answer: Answer, exposed: bool) -> None:
        child = Caller(self.node, steps, self.name, self.random, answer, exposed)
        self._children.append(child)
        child.start()


class Flight:
    """A storage request under way."""

    def __init__(self, caller: Caller, request: Any, answer: Answer):
        self.world = caller.world
        self.node = caller.node
        self.name = caller.name
        self.random = caller.random
        self.request = request
        self.fault = self.world.rates.draw(request, self.world.store.appends, self.random)
        self._answer = answer
        self._dropped = False
        self._arrived = False
        self._length = 0

    def depart(self) -> None:
        world, random = self.world, self.random
        self.node.flights[self] = None
        delay = world.brief(random) + (world.late(random) if self.fault is Fault.LATE else 0.0)
        if isinstance(self.request, Delete) and any(key.startswith(MANIFESTS) for key in self.request.keys):
            late = self.fault is Fault.LATE or (world.rates.late and random.random() < 0.4)
            delay = _LATEST_END * random.random() if late else world.brief(random)
        world.after(delay, self._arrive)
        rates, node = world.rates, self.node
        chance = random.random() if rates.crash or rates.power or rates.stop else 1.0
        for rate, strike in ((rates.crash, node.crash), (rates.power, world.cut_power), (rates.stop, node.stop)):
            if 0 <= chance < rate:
                world.after(random.random() * 0.02, self._strike, node.life, strike)
            chance -= rate

    def _strike(self, life: int, strike: Callable[[], None]) -> None:
        if self.node.life == life:
            strike()

    def abandon(self, torn: bool = False) -> None:
        """Whoever asked is gone; `torn` where its process is, too."""
        self.node.flights.pop(self, None)
        store, world, random = self.world.store, self.world, self.random
        if self._arrived:
            if world.locked.get(self._key) is self:
                del world.locked[self._key]
                if not torn and isinstance(self.request, Append):
                    store.take_back(self.request, self._length)
            return
        chance = random.random()
        if not store.appends:
            self._dropped = chance < 0.5
            return
        self._dropped = True
        if chance < 0.5 or world.waits(self.request) or self.fault is not Fault.NONE:
            return
        if torn and isinstance(self.request, Append):
            if store.tear(self.request, random):
                world.story.tell(world.now, self.name, f"{describe(self.request)}: TORN")
            return
        with suppress(StorageError):
            store.apply(self.request)
            if isinstance(self.request, _SYNCED) and (not torn or random.random() < 0.5):
                store.confirm(self.request)

    @property
    def _key(self) -> str:
        handle = getattr(self.request, "handle", None)
        return getattr(self.request, "key", "") if handle is None else handle.key

    def _arrive(self, tries: int = TRIES) -> None:
        world, request, fault, store = self.world, self.request, self.fault, self.world.store
        if self._dropped or (store.appends and self.node.defers(self._arrive)):
            return
        if isinstance(request, _LOCKING) and world.waits(request):
            if tries:
                world.after(world.brief(self.random), self._arrive, tries - 1)
            else:
                self._dropped = True
                self._reply(None, Locked("another has it", request.key))
            return
        self._arrived = True
        value: Any = None
        error: StorageError | None = _REFUSALS[fault](str(fault.value)) if fault in _REFUSALS else None
        found = store.objects.get(self._key)
        self._length = len(found.body) if found is not None else 0
        if isinstance(request, Settled) and isinstance(getattr(world.locked.get(request.key), "request", None), Append):
            value = "appending"
        elif error is None:
            try:
                value = store.apply(request)
            except StorageError as raised:
                error = raised
            else:
                if fault is Fault.AFTER:
                    error = Unavailable("no answer came")
                elif fault is Fault.LOST:
                    error = Conflict("the second attempt met the first", getattr(request, "key", None))
        if world.story.told:
            note = "" if fault is Fault.NONE else f"   [{fault.value}]"
            world.story.tell(
                world.now, self.name, f"{describe(request)}: {type(error).__name__ if error else 'done'}{note}"
            )
        if store.appends and error is None and isinstance(request, _SYNCED):
            world.locked[self._key] = self
            world.after(world.brief(self.random), self._synced)
        else:
            self._reply(value, error)

    def _synced(self) -> None:
        world, store = self.world, self.world.store
        if world.locked.get(self._key) is not self or self.node.defers(self._synced):
            return
        del world.locked[self._key]
        if self.fault is Fault.SYNC:
            store.fail(self.request, self._length, self.random)
            self._reply(None, Unavailable("input/output error"))
            return
        self._reply(store.confirm(self.request), None)

    def _reply(self, value: Any, error: StorageError | None) -> None:
        delay = self.world.brief(self.random)
        if self.fault is Fault.LATE_ANSWER:
            delay += self.world.late(self.random)
        elif self.fault in (Fault.AFTER, Fault.LOST):  # the client has waited for the answer, and tried again
            delay += self.random.choice((0.0, 0.3, 1.0)) * self.random.random()
        self.world.after(delay, self._answered, value, error)

    def _answered(self, value: Any, error: StorageError | None) -> None:
        self.node.flights.pop(self, None)
        self._answer(value, error)


@dataclass(frozen=True, eq=False)
class Held:
    """A lock that a caller holds on an object."""

    key: str
    caller: Caller


_LOCKING = (Append, PutIf, Create, Delete, DeleteIf)
_SYNCED = (Append, PutIf, Create, DeleteIf, FinishUpload)
"""What on files can be seen before it is durable."""
_LATEST_END = TOMBSTONE - SENT_WITHIN
"""The removal of a manifest without a condition arrives before so many seconds, or never: that is assumed."""
_REFUSALS = {Fault.BEFORE: Unavailable, Fault.THROTTLED: Throttled, Fault.REFUSED: Refused}


class World:
    """Time, the store and the nodes.

    Args:
        appends: Whether the store behaves as files do.
        rates: How often what goes wrong.
        grace: The grace period, in seconds.
        story: Where to tell what happens.
    """

    def __init__(self, appends: bool, rates: Rates, grace: float, story: Story):
        self.now = START
        self.rates = rates
        self.grace = grace
        self.story = story
        self.set_clocks: float | None = None
        self.store = Store(appends, lambda: self.now)
        self.nodes: list[Node] = []
        self.locked: dict[str, Flight] = {}
        self.held: dict[str, Held] = {}
        self.power_cuts: list[float] = []
        self.on_power_cut: Callable[[], None] = lambda: None
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.random = Random(0)

    def after(self, delay: float, what: Callable[..., None], *args: Any) -> None:
        """Have something happen after a while."""
        self._count += 1
        heappush(self._events, (self.now + delay, self._count, what, args))

    def clock(self, node: Node) -> float:
        """What a node takes for the time."""
        return self.now + node.ahead if self.set_clocks is None else self.set_clocks

    def waits(self, request: Any) -> bool:
        """Whether a request must wait for another one, or for whoever holds a lock."""
        key = getattr(request, "key", None)
        held = self.held.get(key or "")
        return key in self.locked or (held is not None and held is not getattr(request, "lock", None))

    def unlock(self, held: Held) -> None:
        """Let the others go on."""
        if self.held.get(held.key) is held:
            del self.held[held.key]

    @staticmethod
    def brief(random: Random) -> float:
        """A moment, in seconds."""
        return 0.0005 + 0.012 * random.random()

    def late(self, random: Random) -> float:
        """A long time: past the deadline of commits, past half the grace, past the grace, or far beyond."""
        seconds = random.choice((5.0, 90.0, self.grace * 0.6, self.grace * 1.2, self.grace * 3))
        return seconds * (1 + random.random() / 5)

    def cut_power(self) -> None:
        """All processes die at once, and files lose what was not synced."""
        self.story.tell(self.now, "everybody", "POWER CUT")
        self.power_cuts.append(self.now)
        for node in self.nodes:
            node.crash()
        for key in list(self.locked):
            del self.locked[key]
        for key in self.store.cut_power(self.random):
            self.story.tell(self.now, "disk", f"{key} loses what was not synced")
        self.on_power_cut()

    @property
    def events(self) -> int:
        """How many events there were."""
        return self._count

    def run(self) -> None:
        """Until nothing more happens.

        Raises:
            Violation: If it does not come to an end, or somebody waits for ever.
        """
        events = self._events
        limit = self._count + MOST_EVENTS
        while events:
            self.now, _, what, args = heappop(events)
            what(*args)
            if self._count > limit:
                raise Violation("the engine does not come to an end")
        waiting = [caller.name for node in self.nodes for caller in node.callers]
        if waiting:
            raise Violation(f"these callers wait for ever: {', '.join(waiting)}")
        if self.held:
            raise Violation(f"these stay locked: {', '.join(self.held)}")
