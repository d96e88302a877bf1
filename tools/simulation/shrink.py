"""A failing scenario, made as small as can be.

Rules of this module:

- It only removes: phases, actors, nodes, faults, sizes. What still fails in the same way is kept.
- Leaving something out changes what happens to the rest, so that each smaller scenario is tried with several seeds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tools.simulation.run import simulate
from tools.simulation.scenario import Scenario

TRIES = 12


def shrink(scenario: Scenario, budget: int = 1500) -> Scenario:
    """A smaller scenario that fails, too.

    Args:
        scenario: One that fails.
        budget: How many runs to spend.
    """
    kind = _kind(simulate(scenario).failure)
    best, spent, progress = scenario, 0, True
    while progress and spent < budget:
        progress = False
        for smaller in _smaller(best):
            for number in range(TRIES):
                seed = best.seed if number == 0 else f"{scenario.seed}/{number}"
                spent += 1
                if _kind(simulate(candidate := replace(smaller, seed=seed)).failure) == kind:
                    best, progress = candidate, True
                    break
                if spent >= budget:
                    return best
            if progress:
                break
    return best


def _kind(failure: str | None) -> str | None:
    """The way of a failure: the error that was raised, or the words without names and numbers.

    Example:
        >>> _kind("call 7 (get, open) raised KeyError: 5"), _kind("write ('task', 1) of call 5 is lost")
        ('raised KeyError', 'write of call is lost')
    """
    if failure is None:
        return None
    raised = re.search(r"raised \w+", failure)
    return raised.group() if raised else " ".join(re.findall(r"(?<![\w'])[a-z]+(?![\w'])", failure)[-8:])


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with something left out, the largest parts first."""
    phases = scenario.phases
    for at in range(len(phases)):
        if len(phases) > 1:
            yield replace(scenario, phases=phases[:at] + phases[at + 1 :])
    for at, phase in enumerate(phases):
        for number in range(len(phase)):
            if len(phase) > 1:
                smaller = phase[:number] + phase[number + 1 :]
                yield replace(scenario, phases=(*phases[:at], smaller, *phases[at + 1 :]))
    for name in scenario.rates.active():
        yield replace(scenario, rates=scenario.rates.without(name))
    for at, phase in enumerate(phases):
        for number, actor in enumerate(phase):
            if actor.size > 1:
                less = (*phase[:number], replace(actor, size=actor.size // 2), *phase[number + 1 :])
                yield replace(scenario, phases=(*phases[:at], less, *phases[at + 1 :]))
    if scenario.nodes > 1:
        yield replace(scenario, nodes=scenario.nodes - 1)
    if any(scenario.clocks):
        yield replace(scenario, clocks=(0.0,) * len(scenario.clocks))
    if scenario.retention is not None:
        yield replace(scenario, retention=None)
        for part in ("max_age", "max_checkpoints", "idle"):
            if getattr(scenario.retention, part) is not None:
                yield replace(scenario, retention=replace(scenario.retention, **{part: None}))
    if not scenario.verified:
        yield replace(scenario, verified=True)
    if scenario.compression != "none":
        yield replace(scenario, compression="none")
