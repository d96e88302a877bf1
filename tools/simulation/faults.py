"""What goes wrong, and how often.

Rules of this module:

- Every kind of fault has its own rate; half of the rates of a run are zero, so that every fault is met alone, too.
- A fault is drawn when a request is issued, from the random numbers of whoever issues it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from random import Random

from lsm.steps import Append, Create, DeleteIf, PutIf


class Fault(Enum):
    """What happens to one request."""

    NONE = "nothing"
    BEFORE = "fails before it is applied"
    AFTER = "is applied, and reported as failed"
    LOST = "is applied, its answer is lost, and the client's second attempt meets the first"
    THROTTLED = "is asked to slow down"
    REFUSED = "is refused"
    LATE = "is applied late"
    LATE_ANSWER = "is answered late"
    SYNC = "can be seen, and its sync fails"


@dataclass(frozen=True, slots=True)
class Rates:
    """The rate of every fault, between 0 and 1, per request; of `interrupt`, per request or wait of a caller."""

    before: float = 0.0
    after: float = 0.0
    lost: float = 0.0
    throttled: float = 0.0
    refused: float = 0.0
    late: float = 0.0
    late_answer: float = 0.0
    sync: float = 0.0
    crash: float = 0.0
    power: float = 0.0
    interrupt: float = 0.0
    stop: float = 0.0

    def without(self, name: str) -> Rates:
        """The same without one fault."""
        return replace(self, **{name: 0.0})

    def active(self) -> list[str]:
        """The faults that happen at all."""
        return [field.name for field in fields(self) if getattr(self, field.name)]

    def draw(self, request: object, appends: bool, random: Random) -> Fault:
        """What happens to a request."""
        chance = random.random()
        for rate, fault in (
            (self.before, Fault.BEFORE),
            (self.after, Fault.AFTER),
            (self.lost, Fault.LOST),
            (self.throttled, Fault.THROTTLED),
            (self.refused, Fault.REFUSED),
            (self.late, Fault.LATE),
            (self.late_answer, Fault.LATE_ANSWER),
            (self.sync, Fault.SYNC),
        ):
            if chance < rate:
                return _as_possible(fault, request, appends)
            chance -= rate
        return Fault.NONE


_HIGHEST = {
    "before": 0.15,
    "after": 0.15,
    "lost": 0.4,
    "throttled": 0.1,
    "refused": 0.03,
    "late": 0.06,
    "late_answer": 0.06,
    "sync": 0.1,
    "crash": 0.015,
    "power": 0.006,
    "interrupt": 0.04,
}


def sample(appends: bool, random: Random) -> Rates:
    """Rates for one run."""
    rates = Rates(**{name: random.choice((0.0, highest * random.random())) for name, highest in _HIGHEST.items()})
    return replace(rates, lost=0.0, throttled=0.0) if appends else replace(rates, power=0.0, sync=0.0)


def _as_possible(fault: Fault, request: object, appends: bool) -> Fault:
    """Only conditional writes can meet themselves; an append to a file that fails is taken back."""
    if fault is Fault.LOST and not isinstance(request, (Create, PutIf, Append, DeleteIf)):
        return Fault.AFTER
    if fault is Fault.AFTER and appends and isinstance(request, Append):
        return Fault.BEFORE
    return fault
