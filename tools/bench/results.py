"""What the samples say: medians, spread, ratios, requests, dollars.

Rules of this module:

- It reads the results of `tools.bench.orchestrator` and makes no text.
- The value of a round is the median of its samples. What is told is the median of the rounds, and the lowest and the
  highest round beside it. A ratio is taken within each round, and then its median over the rounds.
- What was not measured is `None`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from textwrap import shorten
from typing import Any

DOLLARS_PER_WRITE = 0.005 / 1000
"""S3's list price (Standard, us-east-1) of a PUT, COPY, POST or LIST request."""
DOLLARS_PER_READ = 0.0004 / 1000
"""S3's list price of a GET, HEAD or any other request; a DELETE is free."""


@dataclass(frozen=True)
class Spread:
    """A median over rounds, and the lowest and the highest round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Mapping[int, float]) -> Spread | None:
        """The spread of these values by round; `None` where there are none."""
        if not rounds:
            return None
        return cls(median(rounds.values()), min(rounds.values()), max(rounds.values()))

    @classmethod
    def exact(cls, value: float) -> Spread:
        """The spread of what was counted, not timed."""
        return cls(value, value, value)

    def map(self, change: Callable[[float], float]) -> Spread:
        """The spread of changed values."""
        first, last = sorted((change(self.low), change(self.high)))
        return Spread(change(self.median), first, last)


class Results:
    """The results of one run.

    Args:
        raw: What `tools.bench.orchestrator.Run.results` returned.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self._by_key: dict[tuple[str, str, str], list[Any]] = defaultdict(list)
        for measurement in raw["measurements"]:
            key = (measurement["workload"], measurement["operation"], measurement["peer"])
            self._by_key[key].append(measurement)

    @property
    def peers(self) -> list[str]:
        """The peers that took part, in the order in which they are told."""
        return [name for name, peer in self.raw["peers"].items() if peer["status"] == "ok"]

    def on_s3(self, peer: str) -> bool:
        """Whether a peer stores on S3."""
        return bool(self.raw["peers"][peer]["storage"] == "s3")

    def workloads(self, family: str) -> list[dict[str, Any]]:
        """The planned workloads of a family, with their names and sizes, in order."""
        return [workload for workload in self.raw["plan"] if workload["family"] == family]

    def rounds(self, workload: str, operation: str, peer: str, series: str | None = None) -> dict[int, float]:
        """Seconds by round. `series` is the only one there is, unless given."""
        samples: dict[int, list[float]] = defaultdict(list)
        for measurement in self._by_key[workload, operation, peer]:
            name = series or next(iter(measurement["series"]))
            samples[measurement["round"]] += measurement["series"][name]
        return {number: median(values) for number, values in samples.items()}

    def seconds(self, workload: str, operation: str, peer: str, series: str | None = None) -> Spread | None:
        """What a unit takes."""
        return Spread.of(self.rounds(workload, operation, peer, series))

    def ratio(
        self, workload: str, operation: str, peer: str, other: str, series: str | None = None, *, plus: float = 0.0
    ) -> Spread | None:
        """What a peer takes, divided by what another takes and `plus` seconds, pair by pair within each round."""
        ours = self.rounds(workload, operation, peer, series)
        theirs = self.rounds(workload, operation, other, series)
        return Spread.of({number: ours[number] / (theirs[number] + plus) for number in ours if number in theirs})

    def per_unit(self, workload: str, operation: str, peer: str, what: str) -> float | None:
        """Requests (`"write"`, `"read"`, `"list"` or `"delete"`) or bytes (`"bytes_sent"` or `"bytes_received"`) per
        unit, over all rounds."""
        counted = [each for each in self._by_key[workload, operation, peer] if "requests" in each]
        units = sum(each["units"] for each in counted)
        return sum(each["requests"][what] for each in counted) / units if units else None

    def requests(self, workload: str, operation: str, peer: str) -> float | None:
        """All requests per unit."""
        counts = [self.per_unit(workload, operation, peer, what) for what in ("write", "read", "list", "delete")]
        return None if counts[0] is None else sum(count or 0.0 for count in counts)

    def dollars_per_million(self, workload: str, operation: str, peer: str) -> float | None:
        """What S3 bills for the requests of a million units."""
        written = self.per_unit(workload, operation, peer, "write")
        listed = self.per_unit(workload, operation, peer, "list")
        read = self.per_unit(workload, operation, peer, "read")
        if written is None or listed is None or read is None:
            return None
        return 1e6 * ((written + listed) * DOLLARS_PER_WRITE + read * DOLLARS_PER_READ)

    def why_missing(self, workload: str, operation: str, peer: str) -> str | None:
        """Why there is no number; `None` where it was not asked for, or not yet."""
        reasons = {operation, "prepare", "open"}
        for each in self.raw["left_out"]:
            if (each["workload"], each["peer"]) == (workload, peer) and each["operation"] in reasons:
                return f"left out: {each['reason']}"
        for each in self.raw["failures"]:
            if (each["workload"], each["peer"]) == (workload, peer) and (each["operation"] in reasons or each["ended"]):
                return shorten(f"failed: {each['error']}", 60, placeholder=" ...")
        return None

    def stored(self, workload: str, peer: str, *, compacted: bool = False) -> int | None:
        """Bytes on disk, before or after compaction."""
        for entry in self.raw["stored"]:
            if (entry["workload"], entry["peer"], entry["compacted"]) == (workload, peer, compacted):
                return int(entry["bytes"])
        return None

    def written(self, workload: str, peer: str) -> int | None:
        """Bytes written to files, all in all, to store what is then on disk."""
        for entry in self.raw["stored"]:
            if (entry["workload"], entry["peer"]) == (workload, peer) and entry.get("written") is not None:
                return int(entry["written"])
        return None
