"""What actors do: the calls that LangGraph's runs, readers and caretakers make.

Rules of this module:

- Every call of the engine goes through `Cast.call`, which writes it into the ledger, with what became of it.
- A chat does what runs of a graph do: each reads the latest checkpoint, and then for every step stores a checkpoint
  and the writes of its tasks, side by side or one after the other.
- An actor lives as long as its node.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from lsm.engine import Engine
from lsm.errors import (
    CommitTimeout,
    ConcurrentRunError,
    ConditionalWritesUnsupported,
    CorruptionError,
    IncompleteWritesError,
    LSMError,
    StorageError,
)
from lsm.format.bloom import term_hash
from lsm.listing import Listing
from lsm.read import Stored
from lsm.steps import Sleep, Steps
from tools.simulation.ledger import Op
from tools.simulation.oracle import EMPTY, EVERY_THREAD, Oracle
from tools.simulation.scenario import Actor, Scenario
from tools.simulation.world import Interrupted, Node, Together, Violation, World

DELTA = "log"
_FAILURES = (LSMError, Interrupted)


def run_term(run: str) -> bytes:
    """The hash of the metadata by which a run's checkpoints are found."""
    return term_hash(b"run", run.encode())


class Cast:
    """Plays the roles of a scenario.

    Args:
        scenario: The scenario.
        world: Where it takes place.
        oracle: Judges what is read.
    """

    def __init__(self, scenario: Scenario, world: World, oracle: Oracle):
        self.scenario = scenario
        self.world = world
        self.oracle = oracle
        self.threads: dict[str, None] = {}
        self._numbers: Iterator[int] = iter(range(1, 1_000_000))
        self._ids: Iterator[int] = iter(range(1000, 1_000_000))
        self._addressed: dict[tuple[str, int], set[tuple[str, str, str | None]]] = {}
        self._failed: dict[tuple[str, int, str], dict[tuple[str, str, str], None]] = {}

    def play(self, actor: Actor, node: Node, random: Random) -> Steps[None]:
        """The steps of an actor. Some take a copy for their thread, once there is one."""
        copies = [thread for thread in self.threads if thread.startswith("copy")]
        if copies and random.random() < 0.25:
            actor = replace(actor, thread=random.choice(copies))
        self.threads.setdefault(actor.thread)
        yield Sleep(random.random() * 0.2)
        try:
            yield from getattr(self, "_" + actor.role)(actor, node, random)
        except _FAILURES:
            return

    # Calls.

    def call(
        self,
        node: Node,
        name: str,
        kind: str,
        thread: str,
        make: Callable[[Engine], Steps[Any]],
        cells: dict[Any, Any] | None = None,
        **about: Any,
    ) -> Steps[Any]:
        """Make a call, and write down what becomes of it."""
        world, story = self.world, self.world.story
        op = Op(next(self._numbers), kind, thread, node.name, node.life, world.now, cells or {}, about)
        if kind in _CHANGES:
            self.oracle.begin(op)
        if story.told:
            shown = {key: value for key, value in about.items() if key not in ("uid", "metadata", "versions")}
            words = " ".join(f"{key}={value}" for key, value in shown.items())
            story.tell(world.now, name, f"call {op.number}: {kind} {thread} {words}")
        try:
            answer = yield from make(node.engine)
        except (GeneratorExit, Interrupted, LSMError) as error:
            self._failed_call(op, error, name)
            raise
        except Violation:
            raise
        except BaseException as error:
            if op.life != node.life:  # it died while it cleaned up
                self.oracle.ledger.lose(op, None)
                raise
            raise Violation(f"{op} raised {type(error).__name__}: {error}") from error
        self.oracle.ledger.ack(op, world.now)
        story.tell(world.now, name, f"call {op.number} is done")
        return op if kind in _CHANGES else answer

    def _failed_call(self, op: Op, error: BaseException, name: str) -> None:
        expected = (*_EXPECTED, GeneratorExit)
        if self.oracle.spread > self.world.grace:  # a collector takes the objects of a probe for old ones
            expected = (*expected, ConditionalWritesUnsupported)
        if isinstance(error, (CorruptionError, AssertionError)) or not isinstance(error, expected):
            raise Violation(f"{op} on thread {op.thread} raised {type(error).__name__}: {error}") from error
        if isinstance(error, (ConcurrentRunError, IncompleteWritesError)):
            self.oracle.ledger.refuse(op, self.world.now, error)
        else:
            self.oracle.ledger.lose(op, error)
        if self.world.story.told:
            text = f"{type(error).__name__}: {error}"[:160]
            self.world.story.tell(self.world.now, name, f"call {op.number} ends as {op.outcome}: {text}")

    # A run of a graph.

    def _chat(self, actor: Actor, node: Node, random: Random) -> Steps[None]:
        spaces = ("", "", "", "sub", "call:1") if not self.scenario.exclusive else ("", "", "", "", "sub")
        namespace = random.choice(spaces)
        yield from _Chat(self, actor, node, random, namespace).run()

    # Readers.

    def get(self, node: Node, name: str, thread: str, namespace: str, id_: str | None = None) -> Steps[Stored | None]:
        """Read a checkpoint, and have it judged."""
        began = self.world.now
        self._failed.pop((node.name, node.life, thread), None)
        if id_ is not None:
            self.addressed(node).add((thread, namespace, id_))
        stored: Stored | None = yield from self.call(
            node, name, "get", thread, lambda engine: engine.get(thread, namespace, id_), id=id_, namespace=namespace
        )
        ended = self.world.now
        oracle = self.oracle
        if stored is not None:
            oracle.observe_checkpoint(thread, stored, began, ended)
            if stored.namespace != namespace or (id_ is not None and stored.id != id_):
                raise Violation(f"who asked for {namespace!r}, {id_} got {stored.namespace!r}, {stored.id}")
        elif id_ is not None:
            oracle.observe_absence(thread, namespace, id_, began, ended, "its id")
        if id_ is None:
            for _, known in oracle.certain_checkpoints(thread, namespace, began):
                if stored is None or stored.id < known:
                    raise Violation(f"the latest of {thread}, {namespace!r} is {stored and stored.id}, not {known}")
        return stored

    def browse(
        self,
        node: Node,
        name: str,
        thread: str | None,
        namespace: str | None,
        count: int,
        pause: Callable[[], float],
    ) -> Steps[list[Stored]]:
        """List the checkpoints of a thread, or of all, to the end, and have them judged."""
        began = self.world.now
        listing: list[Listing] = []
        found: list[tuple[str, Stored]] = []

        def batch(engine: Engine) -> Steps[Any]:
            if not listing:
                listing.append(engine.list(None if thread is None else [thread], namespace))
            return listing[0].next(count)

        while True:
            answer = yield from self.call(node, name, "list", thread or "*", batch, namespace=namespace)
            if not answer:
                break
            for of, stored in answer:
                if thread not in (None, of) or namespace not in (None, stored.namespace):
                    raise Violation(f"a listing of {thread}, {namespace!r} shows {of}, {stored.namespace!r}")
                self.oracle.observe_checkpoint(of, stored, began, self.world.now)
            found += answer
            if seconds := pause():
                yield Sleep(seconds)
        given = {(of, stored.namespace, stored.id) for of, stored in found}
        ids = [stored.id for _, stored in found]
        if len(given) < len(found) or ids != sorted(ids, reverse=True):
            raise Violation(f"a listing of {thread} is out of order, or repeats itself: {ids}")
        for of in list(self.threads) if thread is None else [thread]:
            for space, id_ in self.oracle.certain_checkpoints(of, namespace, began):
                if (of, space, id_) not in given:
                    raise Violation(f"checkpoint {id_} of thread {of}, namespace {space!r}, is missing in a listing")
        return [stored for _, stored in found]

    def _read(self, actor: Actor, node: Node, random: Random) -> Steps[None]:
        for _ in range(actor.size):
            namespace = random.choice(("", "", "sub", "call:1"))
            known = [id_ for space, id_ in self.oracle.checkpoint_ids(actor.thread) if space == namespace]
            id_ = random.choice(known) if known and random.random() < 0.5 else None
            try:
                yield from self.get(node, _name(actor), actor.thread, namespace, id_)
            except StorageError:
                continue
            yield Sleep(random.random() * 0.1)

    def _browse(self, actor: Actor, node: Node, random: Random) -> Steps[None]:
        def pause() -> float:
            return random.choice((0.0, 0.0, 0.1, self.world.grace * 1.5))

        namespace = random.choice((None, ""))
        yield from self.browse(node, _name(actor), actor.thread, namespace, random.choice((1, 3)), pause)

    def _linger(self, actor: Actor, node: Node, random: Random) -> Steps[None]:
        """A listing, between two answers of which there is time for all that the others do."""
        pauses = iter([*[0.0] * random.randrange(3), self.world.grace * 3])
        thread, namespace = random.choice((None, actor.thread)), random.choice((None, "", ""))
        yield from self.browse(node, _name(actor), thread, namespace, random.choice((1, 3)), lambda: next(pauses, 0.0))

    # Caretakers.

    def _flush(self, actor: Actor, node: Node, random: Random) -> Steps[None]:
        for _ in range(actor.size):
            yield Sleep(random.random() * 0.2)
            yield from self._care(actor, node, "flush", lambda engine: engine.flush(actor.thread))

    def _compact(self, actor: Actor, node: Node, random: Random) -> Steps[None]:
        yield Sleep(random.random() * 0.5)
        yield from self._care(actor, node, "compact", lambda engine: engine.compact(actor.thread))

    def _collect(self, actor: Actor, node: Node, random: Random) -> Steps[None]:
        hasty = self.scenario.hasty
        grace = 0.0 if hasty else self.world.grace
        yield Sleep(random.choice((0.1, 0.2) if hasty else (0.1, 1.0, self.world.grace, self.world.grace * 2)))
        for _ in range((16 if hasty else 4) * actor.size):
            yield from self._care(actor, node, "collect", lambda engine: engine.collect(grace))
            yield Sleep(random.random() * 0.1)

    def _prune(self, actor: Actor, node: Node, random: Random) -> Steps[None]:
        yield Sleep(random.random() * 0.5)
        yield from self._care(actor, node, "prune", lambda engine: engine.prune([actor.thread]))

    def _delete(self, actor: Actor, node: Node, random: Random) -> Steps[None]:
        yield Sleep(random.random())
        yield from self._care(actor, node, "delete", lambda engine: engine.delete(actor.thread))

    def _delete_runs(self, actor: Actor, node: Node, random: Random) -> Steps[None]:
        yield Sleep(random.random() * 0.5)
        run = f"run {random.randrange(1, actor.number + 1)}"

        def is_of(metadata: Any) -> bool:
            return bool(metadata[1].endswith(run.encode()))

        yield from self._care(
            actor, node, "delete_runs", lambda engine: engine.delete_runs([run_term(run)], is_of), EVERY_THREAD, run=run
        )

    def _copy(self, actor: Actor, node: Node, random: Random) -> Steps[None]:
        """Copies, to a new thread or to one that is there. Where versions are whole numbers, those of two threads (or
        of one that was deleted and made again) name other values: then one copy is made, to a new thread."""
        for _ in range(1 if self.scenario.whole_numbers else actor.size):
            yield Sleep(random.random() * 0.5)
            others = [thread for thread in self.threads if thread != actor.thread]
            merged = others and random.random() < 0.4 and not self.scenario.whole_numbers
            target = random.choice(others) if merged else f"copy{actor.number}"
            self.threads.setdefault(target)
            yield from self._care(
                actor, node, "copy", lambda engine, target=target: engine.copy(actor.thread, target), target=target
            )

    def _expire(self, actor: Actor, node: Node, random: Random) -> Steps[None]:
        for _ in range(actor.size):
            yield Sleep(random.choice((0.1, 1.0, self.world.grace, self.world.grace * 3)) * random.random())
            yield from self._care(actor, node, "expire", lambda engine: engine.expire(actor.thread))

    def _care(
        self,
        actor: Actor,
        node: Node,
        kind: str,
        make: Callable[[Engine], Steps[Any]],
        thread: str | None = None,
        **about: Any,
    ) -> Steps[None]:
        yield from self.call(node, _name(actor), kind, thread or actor.thread, make, **about)

    # Bookkeeping for chats.

    def next_number(self) -> int:
        return next(self._ids)

    def addressed(self, node: Node) -> set[tuple[str, str, str | None]]:
        """The (thread, namespace, checkpoint) that a node has asked for by id: going on from them may be meant."""
        return self._addressed.setdefault((node.name, node.life), set())

    def writes_failed(self, node: Node, thread: str) -> dict[tuple[str, str, str], None]:
        """The (namespace, checkpoint, task) whose writes failed on a node since it read the thread."""
        return self._failed.setdefault((node.name, node.life, thread), {})


class _Chat:
    """Runs on one namespace, one after the other."""

    def __init__(self, cast: Cast, actor: Actor, node: Node, random: Random, namespace: str):
        self.cast = cast
        self.actor = actor
        self.node = node
        self.random = random
        self.namespace = namespace
        self.name = _name(actor)
        self.run_id = f"run {actor.number}"
        self.thread = actor.thread
        self.left = actor.size
        self.values: dict[str, bytes] = {}
        self.written: dict[str | None, list[bytes]] = {}
        self.versions: dict[str, Any] = {}
        self.parent: str | None = None
        self.root: str | None = None
        self.step = 0
        self.over = False
        self._count = 0

    def run(self) -> Steps[None]:
        """Runs, one after the other. One that fails, or is interrupted, is followed by the next."""
        while self.left > 0:
            try:
                yield from self._one_run(self.random.choice((1, 2, 4)))
            except _FAILURES:
                self.left -= 1
            yield Sleep(self.random.choice((0.05, 0.5)) * self.random.random())

    def _one_run(self, steps: int) -> Steps[None]:
        random = self.random
        self.versions, self.values, self.parent, self.step, self.over = {}, {}, None, 0, False
        found = yield from self.cast.get(self.node, self.name, self.thread, self.namespace)
        if ":" in self.namespace and self.cast.scenario.retention is not None:
            roots = [id_ for space, id_ in self.cast.oracle.checkpoint_ids(self.thread) if space == ""]
            self.root = random.choice([None, *roots])
        if found is not None:
            self.parent = found.id
            self.versions = dict(found.versions)
            self.values = {channel: value[1] for channel, value in found.values.items()}
            self.step = 1 + max((_step_of(version) for version in found.versions.values()), default=0)
            if random.random() < 0.4:
                yield from self._together([self._write(self.parent, task) for task in self._tasks()])
        for _ in range(min(steps, self.left)):
            yield from self._step()
            self.left -= 1
            self.step += 1
            yield Sleep(random.random() * 0.05)

    def _step(self) -> Steps[None]:
        random, cast = self.random, self.cast
        number = cast.next_number()
        ordered = self.cast.scenario.exclusive or random.random() < 0.97
        id_ = f"{number if ordered else number - 900:06d}"
        changed, values = self._changes()
        put = self._put(id_, changed, values)
        if random.random() < 0.5:
            calls = [put, *(self._write(id_, task) for task in self._tasks())]
            random.shuffle(calls)
            yield from self._together(calls)
        else:
            yield from put
            yield from self._together([self._write(id_, task) for task in self._tasks()])
        if random.random() < 0.1 and not cast.scenario.exclusive:
            chance = random.random()
            if chance < 0.5:  # the same versions with other values
                values = {channel: self._value(channel) for channel in values}
            elif chance < 0.65:  # or with those that they have
                values = {}
            yield from self._put(id_, changed, values)
        self.versions = changed
        self.values.update({channel: value for channel, value in values.items() if value is not None})
        self.parent = id_

    def _together(self, calls: list[Generator[Any, Any, Any]]) -> Steps[None]:
        """Calls side by side. A run whose checkpoint failed is over; one whose writes failed may go on, as it did in
        LangGraph for years."""
        outcomes = yield Together(calls)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, _FAILURES):
                raise outcome
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failed and (self.over or self.random.random() < 0.5):
            raise failed[0]

    def _tasks(self) -> list[str]:
        return [f"task{number}" for number in range(self.random.randrange(3))]

    def _changes(self) -> tuple[dict[str, Any], dict[str, bytes | None]]:
        """The versions of the next checkpoint, and the values of those that are new."""
        random = self.random
        channels = ["messages"]
        channels += [name for name, chance in (("state", 0.6), ("big", 0.25)) if random.random() < chance]
        versions = dict(self.versions)
        values: dict[str, bytes | None] = {}
        for channel in channels:
            versions[channel] = self._version()
            values[channel] = self._value(channel)
        if self.cast.scenario.named_deltas:
            versions[DELTA] = self._version()
            if random.random() < 0.35:
                values[DELTA] = self._value(DELTA)
        return versions, values

    def _version(self) -> Any:
        self._count += 1
        if self.cast.scenario.whole_numbers:
            return self.step + 1
        return f"{self.step + 1:06d}.{self.actor.number}.{self._count}"

    def _value(self, channel: str) -> bytes | None:
        random = self.random
        if channel == "messages":
            before = self.values.get(channel) or random.randbytes(random.choice((20, 700)))
            at = random.choice((len(before), len(before), random.randrange(len(before))))
            written = self.written.get(self.parent)
            added = written if written and random.random() < 0.7 else [random.randbytes(random.choice((10, 60, 300)))]
            return before[:at] + b"".join(added) + before[at:]
        if channel == "big":
            return random.randbytes(random.choice((1000, 5000)))
        return None if channel == "state" and random.random() < 0.1 else random.randbytes(random.randrange(60))

    def _put(self, id_: str, versions: dict[str, Any], values: dict[str, bytes | None]) -> Steps[None]:
        cast, thread, namespace, parent = self.cast, self.thread, self.namespace, self.parent
        self._count += 1
        uid = "b", f"{self.run_id} {id_} {self._count}".encode()
        metadata = "m", uid[1] + b" of " + self.run_id.encode()
        typed = {channel: None if value is None else ("v", value) for channel, value in values.items()}
        cells: dict[Any, Any] = {("c", thread, namespace, id_): uid}
        for channel, value in typed.items():
            cells["b", thread, namespace, channel, versions[channel]] = EMPTY if value is None else value
        exclusive = cast.scenario.exclusive and (thread, namespace, parent) not in cast.addressed(self.node)
        failed = [key for key in cast.writes_failed(self.node, thread) if key[:2] == (namespace, parent)]

        def make(engine: Engine) -> Steps[None]:
            return engine.put(
                thread,
                namespace,
                id_,
                parent,
                uid,
                metadata,
                versions,
                {channel: (versions[channel], value) for channel, value in typed.items()},
                root=self.root,
                terms=(run_term(self.run_id),),
                deltas=(DELTA,) if cast.scenario.named_deltas else None,
            )

        about = {"namespace": namespace, "id": id_, "parent": parent, "run": self.run_id, "exclusive": exclusive}
        hidden = {"uid": uid, "metadata": metadata, "versions": versions}
        life = self.node.life
        try:
            yield from cast.call(self.node, self.name, "put", thread, make, cells, **about, **hidden)
        except _FAILURES:
            self.over = True
            raise
        if failed and life == self.node.life:
            raise Violation(f"checkpoint {id_} was stored on {parent}, although writes of that failed: {failed[0]}")

    def _write(self, id_: str | None, task: str) -> Steps[None]:
        assert id_ is not None
        random, cast, thread, namespace = self.random, self.cast, self.thread, self.namespace
        count = random.choice((1, 1, 2, 3))
        self._count += 1
        entries = []
        for index in range(count):
            channel = random.choice((DELTA, "messages"))
            position = index if random.random() < 0.75 else -random.randrange(1, 3)
            if all(position != other for other, _, _ in entries):
                label = f"{self.run_id} {id_} {task} {index} {self._count} ".encode()
                value = label + random.randbytes(random.choice((5, 50, 600, 600)))
                entries.append((position, channel, ("w", value)))
                if channel == "messages":
                    self.written.setdefault(id_, []).append(value)
        path = f"path {task}"
        cells = {
            ("w", thread, namespace, id_, task, index): (channel, value, path) for index, channel, value in entries
        }
        key = namespace, id_, task
        for _ in range(1 if random.random() < 0.85 else 2):
            try:
                yield from cast.call(
                    self.node,
                    self.name,
                    "put_writes",
                    thread,
                    lambda engine: engine.put_writes(thread, namespace, id_, task, path, entries),
                    cells,
                    namespace=namespace,
                    id=id_,
                    task=task,
                )
            except _FAILURES:
                cast.writes_failed(self.node, thread)[key] = None
                raise
            cast.writes_failed(self.node, thread).pop(key, None)


def _name(actor: Actor) -> str:
    return f"{actor.role}-{actor.number}"


def _step_of(version: Any) -> int:
    return int(version) if isinstance(version, int) else int(version.split(".")[0])


_CHANGES = ("put", "put_writes", "delete", "prune", "delete_runs", "copy", "expire")
_EXPECTED = (Interrupted, CommitTimeout, StorageError, ConcurrentRunError, IncompleteWritesError)
