"""What a run consists of, as plain data: made from a seed, and made smaller by the shrinker.

Rules of this module:

- What came to the simulator later is drawn apart from the rest, so that an old seed keeps what it had.
- Only data. What an actor does in detail comes from random numbers of its own, made from the seed and its number, so
  that leaving one out does not change the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random

from lsm.limits import Limits
from lsm.retention import Retention
from tools.simulation.faults import Rates, sample

GRACE = 3600.0


@dataclass(frozen=True, slots=True)
class Actor:
    """Somebody who does something on a node.

    Attributes:
        number: Distinguishes it from all others of the scenario.
        role: What it does: a method of `tools.simulation.actors.Cast`.
        node: The index of its node.
        thread: The thread it does it to.
        size: How much of it.
    """

    number: int
    role: str
    node: int
    thread: str
    size: int = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run.

    Attributes:
        seed: Of everything that is not said here.
        appends: Whether the store behaves as files do.
        nodes: How many processes there are.
        limits: The engine's.
        compression: The engine's.
        cache_bytes: The engine's.
        verified: Whether the root is there at the beginning.
        whole_numbers: Whether versions are numbers instead of text.
        named_deltas: Whether checkpoints say which channels are rebuilt from writes.
        exclusive: Whether runs refuse to overlap.
        rates: Of faults.
        clocks: By how many seconds each node's clock is ahead.
        retention: Every node's.
        phases: Who acts; between phases all is quiet, and checked.
        backups: Whether somebody makes backups between phases, and restores them.
        hasty: Whether collectors wait for no grace, and come often.
    """

    seed: str
    appends: bool
    nodes: int
    limits: Limits
    compression: str
    cache_bytes: int
    verified: bool
    whole_numbers: bool
    named_deltas: bool
    exclusive: bool
    rates: Rates
    clocks: tuple[float, ...]
    retention: Retention | None
    phases: tuple[tuple[Actor, ...], ...]
    backups: bool = False
    hasty: bool = False


_ROLES = {
    "chat": 6,
    "read": 2,
    "browse": 1,
    "flush": 1.5,
    "compact": 2,
    "collect": 3,
    "prune": 1.2,
    "delete_runs": 0.6,
    "copy": 0.5,
    "delete": 0.8,
}
_LATER_ROLES = {"copy": 3, "delete_runs": 2, "expire": 2, "read": 2, "collect": 1}
_OUTLIVED = ("chat", "linger", "linger", "flush", "compact", "compact", "collect", "collect")
_HIGHEST_STOP = 0.01


def make(seed: int | str) -> Scenario:
    """The scenario of a seed."""
    random = Random(f"scenario {seed}")
    appends = random.random() < 0.4
    nodes = random.choice((1, 2, 2, 3))
    hasty = Random(f"hasty {seed}").random() < 0.2
    exclusive = random.random() < 0.25
    threads = ["a"] if exclusive or random.random() < 0.6 else ["a", "b"]
    numbers = iter(range(1, 1000))
    phases = []
    for _ in range(random.choice((1, 2, 2, 3))):
        roles = [
            *(["chat"] * (3 if exclusive else 1)),
            *random.choices(list(_ROLES), list(_ROLES.values()), k=random.randrange(1, 4)),
            *(["compact", "collect", "collect"] if hasty else []),
        ]
        phases.append(
            tuple(
                Actor(next(numbers), role, random.randrange(nodes), random.choice(threads), random.choice((1, 2, 3, 5)))
                for role in roles
            )
        )
    inline = random.choice((150, 400, 1500))
    limits = Limits(
        inline=inline,
        frame=inline * 2,
        tail=random.choice((500, 500, 1500, 4000)),
        heads=random.choice((300, 2000, 8000)),
        small=random.choice((0, 300, 3000)),
        directory=random.choice((3, 6, 20)),
        lasting=random.choice((0, 2000, 1 << 20)),
        commit_deadline=60.0,
        grace=GRACE,
    )
    plain = Scenario(
        str(seed),
        appends,
        nodes,
        limits,
        "zstd" if random.random() < 0.3 else "none",
        random.choice((0, 3_000, 20_000, 1 << 24, 1 << 24, 1 << 24, 1 << 24)),
        random.random() < 0.9 or hasty,  # who collects without grace would take the probe of a new root
        random.random() < 0.15,
        random.random() < 0.7,
        exclusive,
        sample(appends, random),
        (0.0,) * nodes,
        None,
        tuple(phases),
        random.random() < 0.15,
        hasty,
    )
    return _with_listings(_with_more(plain, Random(f"more {seed}")), Random(f"listings {seed}"))


def _with_listings(plain: Scenario, random: Random) -> Scenario:
    """A scenario, perhaps with listings in its last phase that outlive what they read: it is merged and collected."""
    if random.random() < 0.8:
        return plain
    *phases, last = plain.phases
    thread = random.choice(last).thread
    actors = [
        Actor(751 + at, role, random.randrange(plain.nodes), thread, random.choice((2, 3)))
        for at, role in enumerate(_OUTLIVED)
    ]
    cache = random.choice((0, 3_000, plain.cache_bytes))
    return replace(plain, phases=(*phases, (*last, *actors)), cache_bytes=cache)


def _with_more(plain: Scenario, random: Random) -> Scenario:
    """A scenario, perhaps with more going on in it."""
    if random.random() < 0.3:
        return plain
    numbers = iter(range(501, 1000))
    threads = sorted({actor.thread for phase in plain.phases for actor in phase})
    retention = _retention(random) if random.random() < 0.4 else None
    roles = {role: weight for role, weight in _LATER_ROLES.items() if retention is not None or role != "expire"}
    phases = []
    for phase in plain.phases:
        more = random.choices(list(roles), list(roles.values()), k=random.choice((0, 1, 2)))
        size = random.choice((1, 2))
        actors = [
            Actor(next(numbers), role, random.randrange(plain.nodes), random.choice(threads), size) for role in more
        ]
        phases.append((*phase, *actors))
    return replace(
        plain,
        rates=replace(plain.rates, stop=random.choice((0.0, 0.0, _HIGHEST_STOP * random.random()))),
        clocks=_clocks(plain.nodes, random),
        retention=retention,
        phases=tuple(phases),
    )


def _clocks(nodes: int, random: Random) -> tuple[float, ...]:
    """All right; or off within half the grace, as is promised to do no harm; or far beyond, which may cost old garbage
    more time, or writes without a checkpoint less, but nothing that was acknowledged."""
    most = random.choice((0.0, 0.0, GRACE / 2, GRACE * 4))
    return tuple(random.uniform(-most, most) for _ in range(nodes))


def _retention(random: Random) -> Retention:
    """By age, count, idleness, or several of them."""
    parts = [random.random() < 0.6 for _ in range(3)]
    return Retention(
        timedelta(seconds=random.choice((1.0, GRACE / 2, GRACE * 2))) if parts[0] else None,
        random.choice((1, 2, 4)) if parts[1] else None,
        timedelta(seconds=random.choice((GRACE / 2, GRACE * 2))) if parts[2] else None,
    )
