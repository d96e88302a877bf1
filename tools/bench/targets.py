"""What we set out to reach, and whether we did.

Rules of this module:

- A target is a limit on a number that is computed from the results of one run; there is no other source.
- A target whose number was not measured is told as not measured, never as met.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.bench.results import Results, Spread


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        what: What is limited.
        limit: The limit, in words.
        measured: The number, in words; `None` where there is none.
        met: Whether the limit is kept; `None` where nothing was measured.
    """

    what: str
    limit: str
    measured: str | None = None
    met: bool | None = None


def targets(results: Results) -> list[Target]:
    """All targets, in the order in which they are told."""
    return [*_local(results), *_s3(results), *_at_once(results), *_stored(results)]


def _local(results: Results) -> Iterator[Target]:
    for workload in results.workloads("superstep"):
        name, title = workload["name"], superstep_title(workload["size"])
        for peer, other, series, limit in (
            ("lsm-file", "sqlite", "superstep", 0.6),
            ("lsm-file", "sqlite", "put_writes", 0.8),
            ("lsm-file-nosync", "memory", "superstep", 2.0),
        ):
            ratio = results.ratio(name, "superstep", peer, other, series)
            what = "File" if peer == "lsm-file" else "File without fsync"
            of = "SqliteSaver" if other == "sqlite" else "InMemorySaver"
            yield _ratio(f"{what}: {series}, {title}", limit, of, ratio)
    for workload in results.workloads("history"):
        ratio = results.ratio(workload["name"], "latest_warm", "lsm-file", "memory", plus=100e-6)
        yield _ratio(f"File: latest, warm, {workload['size']:,} checkpoints", 1.0, "(InMemorySaver + 100 µs)", ratio)


def _s3(results: Results) -> Iterator[Target]:
    delay = results.raw["settings"]["delay"]

    def within(what: str, delays: float, milliseconds: float, spread: Spread | None) -> Target:
        words = f"{delays:g} delays + {milliseconds:g} ms"
        return _seconds(f"S3: {what}", delays * delay + milliseconds / 1e3, words, spread)

    for workload in results.workloads("superstep"):
        for call in ("put_writes", "put"):
            spread = results.seconds(workload["name"], "superstep", "lsm-s3", call)
            yield within(f"{call}, {superstep_title(workload['size'])}", 1.3, 5, spread)
    for workload in results.workloads("history"):
        name, size = workload["name"], f"{workload['size']:,} checkpoints"
        if workload["size"] > 1_000:
            continue  # not stored on S3 here
        yield within(f"latest, warm, {size}", 1.3, 5, results.seconds(name, "latest_warm", "lsm-s3"))
        yield within(f"latest, cold, {size}", 2.6, 10, results.seconds(name, "latest_cold", "lsm-s3"))
        yield within(f"filter with one match, {size}", 4, 20, results.seconds(name, "filter_one", "lsm-s3"))
    for workload in results.workloads("graph"):
        if (workload["durability"], workload["size"]) == ("async", 8):
            requests = results.requests(workload["name"], "run", "lsm-s3")
            what = f"S3: graph run of {workload['supersteps']} supersteps, async, 8 tasks"
            limit = "1.5 requests a superstep"
            yield _limit(what, limit, requests, 1.5, f"{requests:.2f}" if requests is not None else "")


def _at_once(results: Results) -> Iterator[Target]:
    names = {workload["size"]: workload["name"] for workload in results.workloads("at-once")}
    if not {1, 64} <= set(names):
        return
    for operation, face in (("threads", "threads, sync"), ("tasks", "tasks, async")):
        one = results.rounds(names[1], operation, "lsm-delayed")
        many = results.rounds(names[64], operation, "lsm-delayed")
        gain = Spread.of({number: one[number] / many[number] for number in one if number in many})
        met = None if gain is None else gain.median >= 20
        yield Target(f"64 {face}, against 1, delayed memory", "at least 20 times the throughput", _times(gain), met)


def _stored(results: Results) -> Iterator[Target]:
    for workload in results.workloads("stored"):
        name = workload["name"]
        before = results.stored(name, "lsm-file")
        after = results.stored(name, "lsm-file", compacted=True)
        match workload["kind"]:
            case "chat":
                scale = workload["size"] / 1_000
                for size, limit, when in ((before, 4, "before"), (after, 3, "after")):
                    words = f"{limit * scale:g} MB"
                    what = f"Stored: chat of {workload['size']:,} messages, {when} compaction"
                    yield _limit(what, words, size, limit * scale * 1e6, _megabytes(size))
            case "images":
                last = (workload["size"] - 1) * 4 * -(-workload["value"] // 3)
                what = f"Stored: {workload['size']} checkpoints, one image more in each"
                yield _limit(what, "1.2 times the last state", before, 1.2 * last, _share(before, last))
            case "static":
                what = f"Stored: a value of {workload['value'] / 1e6:g} MB beside a counter, {workload['size']} steps"
                limit = 1.01 * workload["value"]
                yield _limit(what, "the value once", before, limit, _share(before, workload["value"]))


def superstep_title(messages: int) -> str:
    """How a superstep's workload is called."""
    return f"chat of {messages:,}" if messages else "small state"


def _ratio(what: str, limit: float, of: str, ratio: Spread | None) -> Target:
    return Target(what, f"{limit:g} of {of}", _times(ratio), None if ratio is None else ratio.median <= limit)


def _seconds(what: str, limit: float, words: str, spread: Spread | None) -> Target:
    limit_words = f"{words} = {limit * 1e3:.0f} ms"
    if spread is None:
        return Target(what, limit_words)
    told = f"{spread.median * 1e3:.1f} ms ({spread.low * 1e3:.1f}-{spread.high * 1e3:.1f})"
    return Target(what, limit_words, told, spread.median <= limit)


def _limit(what: str, words: str, value: float | None, limit: float, told: str | None) -> Target:
    return Target(what, words) if value is None else Target(what, words, told, value <= limit)


def _times(ratio: Spread | None) -> str | None:
    return None if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _megabytes(size: int | None) -> str | None:
    return None if size is None else f"{size / 1e6:.2f} MB"


def _share(size: int | None, of: float) -> str | None:
    return None if size is None else f"{size / of:.3f} times ({size / 1e6:.2f} MB)"
