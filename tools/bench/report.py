"""Tables in Markdown, and what the plots show.

    python -m tools.bench.report [FOLDER]       again, from FOLDER/results.json

Rules of this module:

- It says what was measured; what it means is written by people, elsewhere.
- A number is told with its spread. What failed is told with its error, what was left out with the reason.
- Any number may be missing: the results of a run that did not end make a report, too.
- The same results make the same files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.bench import plots
from tools.bench.environments import ROOT
from tools.bench.plots import Bar, Line, Panel
from tools.bench.results import DOLLARS_PER_READ, DOLLARS_PER_WRITE, Results, Spread
from tools.bench.targets import superstep_title, targets

READS = {
    "latest_cold": "latest, on a saver just opened",
    "latest_warm": "latest, again",
    "by_id": "by checkpoint id",
    "list_10": "list(limit=10)",
    "filter_one": "list(filter=...) with one match",
}
ON_S3 = {False: "", True: ", S3"}
AT_ONCE = {"threads": "sync, from threads", "tasks": "async, tasks of one event loop"}
STORED = {
    "chat": "a chat of {size:,} messages",
    "images": "{size} checkpoints, one image of {value:,} bytes more in each",
    "static": "{size} steps beside a value of {value:,} bytes that never changes",
}


def write_results(raw: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `results.json` and `results.md`, each whole or not at all. Returns what was written."""
    texts = {"results.json": json.dumps(raw, indent=1) + "\n", "results.md": tables(Results(raw))}
    for name, text in texts.items():
        unfinished = folder / f".{name}.new"
        unfinished.write_text(text)
        unfinished.replace(folder / name)
    return [folder / name for name in texts]


def draw_plots(raw: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the plots, and remove those of which nothing was measured. Returns what was written."""
    results = Results(raw)
    written = []
    for name, groups in _figures(results):
        path = folder / f"{name}.svg"
        if any(panel.marks for group in groups for panel in group):
            written.append(plots.draw(groups, path))
        else:
            path.unlink(missing_ok=True)
    return written


def tables(results: Results) -> str:
    """All tables, in Markdown."""
    return "\n".join(_text(results)).rstrip() + "\n"


def _text(results: Results) -> Iterator[str]:
    yield from _head(results)
    yield from _targets(results)
    yield from _supersteps(results)
    yield from _graphs(results)
    yield from _reads(results)
    yield from _at_once(results)
    yield from _bills(results)
    yield from _bytes(results)
    yield from _missing(results)


def _head(results: Results) -> Iterator[str]:
    machine, settings = results.raw["machine"], results.raw["settings"]
    yield "# Results of the benchmark"
    yield ""
    yield "Made by `make bench`; do not edit. `results.json` beside this file has every sample."
    yield ""
    yield (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['filesystem']}, "
        f"{machine['system']}; Python {machine['python']}, LangGraph {machine['langgraph']}. "
        f"Begun {results.raw['began']}, took {results.raw['took_seconds'] / 60:.0f} minutes; "
        f"{settings['rounds']} rounds."
    )
    yield ""
    yield (
        f"S3 is moto {machine['moto']} behind a proxy that delays each request by {settings['delay'] * 1e3:g} ms. "
        "A cell has the median of the rounds' medians, and the lowest and the highest round; `2x` is the ratio to the "
        "first row, taken pair by pair within each round. What takes long is measured in fewer rounds."
    )
    yield ""
    rows = []
    for name, peer in results.raw["peers"].items():
        versions = ", ".join(f"{package} {version}" for package, version in peer["versions"].items())
        skipped = "" if peer["status"] == "ok" else f"skipped: {peer['reason']}"
        rows.append([f"`{name}`", peer["title"], versions, skipped])
    yield from _rows(["peer", "saver", "versions", ""], rows)
    if (done := results.raw["done"]) < (planned := len(results.raw["plan"])):
        yield f"**The run did not end: {done} of {planned} workloads were measured.**"
        yield ""


def _targets(results: Results) -> Iterator[str]:
    yield "## Targets"
    yield ""
    words = {True: "yes", False: "**no**", None: "not measured"}
    found = targets(results)
    yield from _rows(
        ["target", "at most, unless said otherwise", "measured", "met"],
        [[target.what, target.limit, target.measured or "", words[target.met]] for target in found],
    )


def _supersteps(results: Results) -> Iterator[str]:
    columns = {workload["name"]: superstep_title(workload["size"]) for workload in results.workloads("superstep")}
    yield from _section("One superstep: put_writes and put", results, columns, "superstep", "superstep")
    yield from _section("put_writes alone", results, columns, "superstep", "put_writes", level=3)
    yield from _section("put alone", results, columns, "superstep", "put", level=3)


def _graphs(results: Results) -> Iterator[str]:
    columns = {
        workload["name"]: f"{workload['durability']}, {workload['size']} task{'s'[: workload['size'] > 1]}"
        for workload in results.workloads("graph")
    }
    yield from _section("A whole graph run, for each superstep", results, columns, "run")


def _reads(results: Results) -> Iterator[str]:
    columns = {workload["name"]: f"{workload['size']:,} checkpoints" for workload in results.workloads("history")}
    for operation, title in READS.items():
        yield from _section(f"Read: {title}", results, columns, operation)
    columns = {workload["name"]: f"{workload['size']:,} deep" for workload in results.workloads("delta")}
    yield from _section("Read: get_delta_channel_history", results, columns, "history")
    columns = {workload["name"]: f"{workload['size']:,} checkpoints" for workload in results.workloads("delete")}
    yield from _section("delete_thread", results, columns, "delete_thread")


def _at_once(results: Results) -> Iterator[str]:
    columns = {workload["name"]: f"{workload['size']} at once" for workload in results.workloads("at-once")}
    for operation, title in AT_ONCE.items():
        yield from _section(
            f"Threads of conversation at once: supersteps per second, {title}",
            results,
            columns,
            operation,
            tell=lambda spread: _spread(spread.map(lambda seconds: 1 / seconds), lambda rate: f"{rate:,.0f}"),
        )


def _bills(results: Results) -> Iterator[str]:
    rows = []
    for family, operation in (("superstep", "superstep"), ("graph", "run")):
        for workload in results.workloads(family):
            for peer in filter(results.on_s3, results.peers):
                name = workload["name"]
                if (dollars := results.dollars_per_million(name, operation, peer)) is None:
                    continue
                kinds = ("write", "read", "list")
                counts = [f"{results.per_unit(name, operation, peer, kind) or 0:.2f}" for kind in kinds]
                sent = (results.per_unit(name, operation, peer, "bytes_sent") or 0) / 1e3
                rows.append([f"`{name}`", _title(results, peer), *counts, f"{sent:,.1f}", f"{dollars:,.2f}"])
    if not rows:
        return
    yield "## Requests for each superstep, and dollars for a million of them"
    yield ""
    yield (
        f"At S3's list price (Standard, us-east-1): {DOLLARS_PER_WRITE * 1000:g} dollars for 1,000 PUT, POST or LIST "
        f"requests, {DOLLARS_PER_READ * 1000:g} for 1,000 GET or HEAD requests. Storage and traffic are not in it."
    )
    yield ""
    yield from _rows(["workload", "saver", "PUT", "GET", "LIST", "kB sent", "dollars per million"], rows)


def _bytes(results: Results) -> Iterator[str]:
    workloads = results.workloads("stored")
    if not workloads:
        return
    yield "## Bytes stored"
    yield ""
    columns = [STORED[workload["kind"]].format(**workload) for workload in workloads]
    rows = []
    for peer in results.peers:
        for compacted in (False, True):
            sizes = [results.stored(workload["name"], peer, compacted=compacted) for workload in workloads]
            operation = "compact" if compacted else "weigh"
            missing = [results.why_missing(workload["name"], operation, peer) or "" for workload in workloads]
            if any(size is not None for size in sizes) or (any(missing) and not compacted):
                title = _title(results, peer) + (", compacted" if compacted else "")
                told = [
                    why if size is None else f"{size / 1e6:,.2f} MB" for size, why in zip(sizes, missing, strict=True)
                ]
                rows.append([title, *told])
    yield from _rows(["saver", *columns], rows)
    yield "Bytes written to files meanwhile for each byte then on disk, logs and background compaction included:"
    yield ""
    rows = []
    for peer in results.peers:
        told = []
        for workload in workloads:
            written, stored = results.written(workload["name"], peer), results.stored(workload["name"], peer)
            told.append(f"{written / stored:.2f}" if written and stored else "")
        if any(told):
            rows.append([_title(results, peer), *told])
    yield from _rows(["saver", *columns], rows)
    yield from _compaction(results, dict(zip((each["name"] for each in workloads), columns, strict=True)))


def _compaction(results: Results, workloads: Mapping[str, str]) -> Iterator[str]:
    rows = []
    for name, title in workloads.items():
        for peer in results.peers:
            before, after = results.stored(name, peer), results.stored(name, peer, compacted=True)
            taken = results.seconds(name, "compact", peer)
            if taken is None or before is None or after is None:
                continue
            requests = results.requests(name, "compact", peer)
            size = next(each["size"] for each in results.workloads("stored") if each["name"] == name)
            told = "" if requests is None else f"{requests * size:,.0f}"
            rate = f"{before / 1e6 / taken.median:,.1f} MB/s"
            rows.append(
                [title, _title(results, peer), f"{taken.median * 1e3:,.0f} ms", rate, f"{before / after:.2f}", told]
            )
    if rows:
        yield "## Compaction of a whole thread, asked for"
        yield ""
        yield from _rows(["thread", "saver", "took", "rate", "smaller by a factor of", "requests"], rows)


def _missing(results: Results) -> Iterator[str]:
    if failures := results.raw["failures"]:
        yield "## What failed"
        yield ""
        rows = [[f"`{each['workload']}`", each["operation"], each["peer"], each["error"]] for each in failures]
        yield from _rows(["workload", "operation", "peer", "error"], rows)


def _section(
    title: str,
    results: Results,
    columns: Mapping[str, str],
    operation: str,
    series: str | None = None,
    *,
    level: int = 2,
    tell: Callable[[Spread], str] | None = None,
) -> Iterator[str]:
    """A table for the local peers and one for those on S3: peers down, workloads across."""
    parts: list[str] = []
    for group in (False, True):
        peers = [peer for peer in results.peers if results.on_s3(peer) == group]
        rows: list[list[str]] = []
        first = None
        for peer in peers:
            cells = [results.seconds(workload, operation, peer, series) for workload in columns]
            missing = [results.why_missing(workload, operation, peer) or "" for workload in columns]
            if not any(cells) and not any(missing):
                continue
            first = first or peer
            told = []
            for workload, cell, reason in zip(columns, cells, missing, strict=True):
                if cell is None:
                    told.append(reason)
                    continue
                ratio = results.ratio(workload, operation, peer, first, series) if peer != first else None
                told.append((tell or _seconds)(cell) + (f" {_number(ratio.median)}x" if ratio and not tell else ""))
            rows.append([_title(results, peer), *told])
        if rows:
            parts += _rows(["on S3" if group else "here", *columns.values()], rows)
    if parts:
        yield f"{'#' * level} {title}"
        yield ""
        yield from parts


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in row)} |"
    yield ""


def _title(results: Results, peer: str) -> str:
    return str(results.raw["peers"][peer]["title"])


def _seconds(spread: Spread) -> str:
    unit, factor = ("µs", 1e6) if spread.median < 1e-3 else ("ms", 1e3) if spread.median < 1 else ("s", 1.0)
    return _spread(spread.map(lambda seconds: seconds * factor), _number, f" {unit}")


def _spread(spread: Spread, tell: Callable[[float], str], unit: str = "") -> str:
    return f"{tell(spread.median)}{unit} ({tell(spread.low)}-{tell(spread.high)})"


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _figures(results: Results) -> Iterator[tuple[str, list[list[Panel]]]]:
    """Each figure's name, and its panels: those of the local peers, then those on S3."""
    groups = (False, True)
    yield "superstep", [_superstep_bars(results, group) for group in groups]
    yield "graph", [_graph_bars(results, group) for group in groups]
    yield "reads", [_read_lines(results, group) for group in groups]
    yield "at-once", [_at_once_lines(results, group) for group in groups]
    yield "dollars", [_dollar_bars(results)]
    yield "stored", [_stored_bars(results)]


def _peers(results: Results, on_s3: bool) -> list[str]:
    return [peer for peer in results.peers if results.on_s3(peer) == on_s3]


def _superstep_bars(results: Results, on_s3: bool) -> list[Panel]:
    titles = {workload["name"]: superstep_title(workload["size"]) for workload in results.workloads("superstep")}
    on = ON_S3[on_s3]
    return [_time_bars(results, on_s3, name, "superstep", "superstep", title + on) for name, title in titles.items()]


def _graph_bars(results: Results, on_s3: bool) -> list[Panel]:
    titles = {each["name"]: f"{each['durability']}, tasks: {each['size']}" for each in results.workloads("graph")}
    on = ON_S3[on_s3]
    return [_time_bars(results, on_s3, name, "run", None, title + on) for name, title in titles.items()]


def _time_bars(results: Results, on_s3: bool, workload: str, operation: str, series: str | None, title: str) -> Panel:
    marks = [
        Bar(peer, _title(results, peer), spread, _seconds(spread).partition(" (")[0])
        for peer in _peers(results, on_s3)
        if (spread := results.seconds(workload, operation, peer, series)) is not None
    ]
    return Panel(title, "seconds per superstep", marks)


def _read_lines(results: Results, on_s3: bool) -> list[Panel]:
    titles = {operation: title.partition(" with")[0] + ON_S3[on_s3] for operation, title in READS.items()}
    return [
        _family_lines(results, on_s3, "history", operation, Panel(title, "seconds", [], "checkpoints of the thread"))
        for operation, title in titles.items()
    ]


def _at_once_lines(results: Results, on_s3: bool) -> list[Panel]:
    return [
        _family_lines(
            results,
            on_s3,
            "at-once",
            operation,
            Panel(title + ON_S3[on_s3], "supersteps per second", [], "threads of conversation at once"),
            lambda seconds: 1 / seconds,
        )
        for operation, title in AT_ONCE.items()
    ]


def _family_lines(
    results: Results,
    on_s3: bool,
    family: str,
    operation: str,
    panel: Panel,
    change: Callable[[float], float] = lambda seconds: seconds,
) -> Panel:
    """The panel with a line for each peer, over the sizes of a family."""
    marks = []
    for peer in _peers(results, on_s3):
        points = [
            (workload["size"], spread.map(change))
            for workload in results.workloads(family)
            if (spread := results.seconds(workload["name"], operation, peer)) is not None
        ]
        if points:
            marks.append(Line(peer, _title(results, peer), points))
    return replace(panel, marks=marks)


def _dollar_bars(results: Results) -> list[Panel]:
    panels = []
    for family, operation in (("superstep", "superstep"), ("graph", "run")):
        for workload in results.workloads(family):
            marks = [
                Bar(peer, _title(results, peer), Spread.exact(dollars), f"{dollars:,.2f}")
                for peer in _peers(results, on_s3=True)
                if (dollars := results.dollars_per_million(workload["name"], operation, peer))
            ]
            panels.append(Panel(workload["name"], "dollars per million supersteps", marks))
    return panels


def _stored_bars(results: Results) -> list[Panel]:
    panels = []
    for workload in results.workloads("stored"):
        marks = [
            Bar(peer, _title(results, peer), Spread.exact(size / 1e6), f"{size / 1e6:,.2f}")
            for peer in results.peers
            if (size := results.stored(workload["name"], peer))
        ]
        panels.append(Panel(f"{workload['kind']}, {workload['size']:,} checkpoints", "MB", marks))
    return panels


def main() -> None:
    """Write the report again."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "performance"
    raw = json.loads((folder / "results.json").read_text())
    for path in [*write_results(raw, folder), *draw_plots(raw, folder)]:
        print(path)


if __name__ == "__main__":
    main()
