"""One whole run: phases of a scenario, an audit after each, and a collection in the end.

Rules of this module:

- `simulate` never raises: what goes wrong is in its outcome, with its story where one was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from lsm.engine import Engine
from lsm.steps import Sleep, Steps
from tools.simulation.actors import Cast
from tools.simulation.audit import Audit
from tools.simulation.faults import Rates
from tools.simulation.ledger import Ledger
from tools.simulation.oracle import Oracle
from tools.simulation.scenario import Actor, Scenario
from tools.simulation.store import Stored
from tools.simulation.story import Story
from tools.simulation.world import Caller, Interrupted, Node, Violation, World


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run.

    Attributes:
        scenario: What was run.
        failure: What must not have happened, or `None`.
        story: What happened, line by line, if it was asked for.
        events: How many events there were.
    """

    scenario: Scenario
    failure: str | None
    story: str
    events: int


def simulate(scenario: Scenario, told: bool = False) -> Outcome:
    """Run a scenario.

    Args:
        scenario: The scenario.
        told: Whether to make a story of it.
    """
    story = Story(told)
    world = World(scenario.appends, scenario.rates, scenario.limits.grace, story)
    failure = None
    try:
        _Run(scenario, world).play()
    except Violation as violation:
        failure = str(violation)
        story.tell(world.now, "FAILURE", failure)
    return Outcome(scenario, failure, story.text(), world.events)


class _Run:
    def __init__(self, scenario: Scenario, world: World):
        self.scenario = scenario
        self.world = world
        self.oracle = Oracle(Ledger(), scenario, lambda: world.set_clocks or world.now)
        self.cast = Cast(scenario, world, self.oracle)
        self._backup: tuple[dict[str, Stored], bytes] | None = None
        self.audit = Audit(world, self.cast, self.oracle, self._random("audit"))
        world.on_power_cut = self.oracle.power_cut
        world.random.seed(f"{scenario.seed} world")
        for number in range(scenario.nodes):
            ahead = scenario.clocks[number]
            world.nodes.append(Node(world, f"node{number}", self._engine, self._random(f"node {number}"), ahead))

    def _random(self, name: str) -> Random:
        return Random(f"{self.scenario.seed} {name}")

    def _engine(self, entropy: Any) -> Engine:
        return Engine(
            "simulated://",
            self.scenario.appends,
            entropy,
            compression=self.scenario.compression,  # type: ignore[arg-type]
            cache_bytes=self.scenario.cache_bytes,
            limits=self.scenario.limits,
            conditional_deletes=self.scenario.appends,
            retention=self.scenario.retention,
            concurrent_runs="refuse" if self.scenario.exclusive else "fork",
        )

    def play(self) -> None:
        if self.scenario.verified:
            self._quietly(self._setup())
        for number, actors in enumerate(self.scenario.phases):
            self.world.story.tell(self.world.now, "", f"--- phase {number + 1} ---")
            self.world.rates = self.scenario.rates
            for actor in actors:
                self._begin(actor)
            self.world.run()
            self._check(number)
        self._finish()

    def _back_up(self, random: Random) -> None:
        """Somebody may make a backup, or restore one under those who live on."""
        world = self.world
        if self._backup is not None and random.random() < 0.5:
            world.story.tell(world.now, "operator", "RESTORES a backup")
            objects, memory = self._backup
            world.store.restore(objects)
            self.oracle.recall(memory)
        elif self.scenario.backups:
            world.story.tell(world.now, "operator", "makes a backup")
            self._backup = world.store.backup(), self.oracle.memory()

    def _begin(self, actor: Actor) -> None:
        node = self.world.nodes[actor.node % len(self.world.nodes)]
        random = self._random(f"actor {actor.number}")
        name = f"{actor.role}-{actor.number}"
        Caller(node, self.cast.play(actor, node, random), name, random, _ended, exposed=True).start()

    def _check(self, number: int) -> None:
        random = self._random(f"quiet {number}")
        if self.scenario.rates.power and random.random() < 0.5:
            self.world.cut_power()
        self.world.story.tell(self.world.now, "", "--- all is quiet: what is there? ---")
        self.oracle.ledger.settle(self.world.now)
        self.oracle.check_refusals()
        self.oracle.settle_copies()
        self._back_up(random)
        self._audit(f"new{number}")

    def _finish(self) -> None:
        self.world.story.tell(self.world.now, "", "--- the end: a collector runs ---")
        node = self._newcomer("last")
        self._quietly(self.audit.collect(node))
        self._audit("after")

    def _audit(self, name: str) -> None:
        """Have everything read, at one time for all."""
        self.world.set_clocks = self.world.now
        self._quietly(self.audit.by(self._newcomer(name), self.world.nodes))
        self.world.set_clocks = None

    def _newcomer(self, name: str) -> Node:
        return Node(self.world, name, self._engine, self._random(name))

    def _setup(self) -> Steps[None]:
        yield from self.world.nodes[0].engine.setup()

    def _quietly(self, steps: Steps[None]) -> None:
        """Run steps to their end while nothing goes wrong."""
        world = self.world
        world.rates = Rates()
        failed: list[BaseException] = []

        def ended(value: Any, error: BaseException | None) -> None:
            if error is not None:
                failed.append(error)

        node = world.nodes[0]
        Caller(node, _after_a_moment(steps), "audit", self._random("quiet"), ended).start()
        world.run()
        if failed:
            raise Violation(f"an audit met {type(failed[0]).__name__}: {failed[0]}") from failed[0]


def _after_a_moment(steps: Steps[None]) -> Steps[None]:
    yield Sleep(0.1)
    yield from steps


def _ended(value: Any, error: BaseException | None) -> None:
    if error is not None and not isinstance(error, Interrupted):
        raise Violation(f"an actor raised {type(error).__name__}: {error}") from error
