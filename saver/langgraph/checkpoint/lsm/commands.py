"""The commands of `langgraph-lsm`.

Rules of this module:

- Words in, words out: what is to be done is `jobs`' and the engine's business.
- What was asked for goes to the standard output; progress, failures and errors to the standard error. A terminal gets a
  progress bar, anything else plain lines.
- Exit codes: 0 all is done, 1 something failed (and all else was done), 2 the command was called wrongly, 130 it was
  stopped by an interrupt (Ctrl-C).
- An interrupt asks the work to end (`lsm.stop`), and what was done so far is told as ever. A second one ends the
  process and those that it has started. Nothing is lost by either: what a command leaves undone, its next run does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from importlib import import_module
from multiprocessing import active_children, get_context, resource_tracker
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from langgraph.checkpoint.lsm import settings
from langgraph.checkpoint.lsm.jobs import Store, compact_store, heed
from lsm.collect import Collected, check_grace
from lsm.errors import LSMError
from lsm.stats import Stats, store_stats, thread_stats
from lsm.steps import Steps
from lsm.stop import Stop, Stopped
from lsm.sweep import Outcome, Summary
from lsm.verify import Report, StoreReport, verify_store

_EVERY = 10.0
"""Seconds between two plain lines of progress."""

T = TypeVar("T")

_SHOW_CURSOR = b"\x1b[?25h\n"
_INTERRUPTED = 128 + signal.SIGINT
_STOPPING = (
    "stopping: requests under way are finished, what was being written beside is dropped or left to the next run; "
    "press Ctrl-C again to end at once"
)

app = typer.Typer(
    name="langgraph-lsm",
    help="Look after a store of LangGraph checkpoints. URL is its address: file:///directory, s3://bucket/prefix, "
    "gs://bucket/prefix or az://container/prefix. Credentials come from the environment, as obstore takes them "
    "(AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, ...), or from --store-option. Exit codes: 0 done, 1 something "
    "failed and all else was done, 2 called wrongly, 130 stopped by Ctrl-C (a second one ends the command at once).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


# Arguments and options, each said once.


def _duration(value: Any) -> Any:
    """What `settings` makes of a length of time; what it refuses is a usage error."""
    try:
        return settings.duration(value) if isinstance(value, str) else value
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _time(text: str) -> Any:
    """An option that takes a length of time."""
    return typer.Option(parser=_duration, metavar="TIME", help=text)


Url = Annotated[str, typer.Argument(metavar="URL", help="The store.", show_default=False)]
ThreadIds = Annotated[list[str], typer.Argument(metavar="THREAD...", help="The threads.", show_default=False)]
OneThread = Annotated[str | None, typer.Argument(metavar="[THREAD]", help="Only this thread.", show_default=False)]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine does.")]
StoreOption = Annotated[
    list[str] | None,
    typer.Option(
        "--store-option",
        metavar="KEY=VALUE",
        help="An option of the object store, as obstore takes it. May be repeated; client_options.KEY=VALUE for those "
        "of the connection.",
    ),
]
RetentionFile = Annotated[
    Path | None,
    typer.Option("--retention", metavar="FILE", help="A TOML file with max_age, max_checkpoints and idle."),
]
MaxAge = Annotated[timedelta | None, _time("Checkpoints put longer ago expire (30d).")]
MaxCheckpoints = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Of every namespace, all but the last N checkpoints expire.")
]
Idle = Annotated[timedelta | None, _time("Threads not written to for so long are removed.")]
Grace = Annotated[timedelta, _time("How old garbage must be to be removed.")]
Offline = Annotated[
    bool,
    typer.Option("--offline", help="Nobody uses the store meanwhile: a grace below ten minutes needs that said."),
]
Threads = Annotated[str | None, typer.Option(metavar="GLOB", help="Only threads whose id matches, as in 'user-*'.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would be done.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON at the end.")]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="How many threads at once; on files, in how many processes. By default 4, and on files 1.",
    ),
]
Shard = Annotated[str, typer.Option(metavar="I/N", help="Only this part of the store: 0/N to N-1/N are all of it.")]
MaxTime = Annotated[timedelta | None, _time("Begin no thread after so long; the next run goes on.")]
Dask = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Do it on a Dask cluster: a scheduler's address, or 'local' for one here."),
]
Strategy = Annotated[
    str, typer.Option(help="keep_latest: only the latest checkpoint of each namespace stays; delete: none.")
]
Repair = Annotated[
    bool, typer.Option("--repair", help="Drop what a crash left at the end of manifests. Nothing else is changed.")
]

_GRACE: Any = "1h"  # typer parses and shows a default as if it had been typed
_ALL = "0/1"


@app.callback()
def _begin(verbose: Verbose = False) -> None:
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s %(message)s")
    _quiet(logging.getLogger("asyncio"))


@app.command()
def compact(
    url: Url,
    threads: Threads = None,
    dry_run: DryRun = False,
    concurrency: Concurrency = None,
    shard: Shard = _ALL,
    max_time: MaxTime = None,
    grace: Grace = _GRACE,
    offline: Offline = False,
    retention: RetentionFile = None,
    max_age: MaxAge = None,
    max_checkpoints: MaxCheckpoints = None,
    idle: Idle = None,
    dask: Dask = None,
    as_json: Json = False,
    store_option: StoreOption = None,
) -> None:
    """Bring all threads into shape: merge segments, remove what has expired, then what is garbage.

    Threads that have not changed since they were last found in shape are passed by without being read.
    """
    with _refusing(), _stoppable() as stop:
        kept = settings.retention(retention, max_age, max_checkpoints, idle)
        options = settings.store_options(store_option or ())
        if url.startswith("memory:"):
            raise ValueError("memory:// lies in the process that made it: use compact_store there")
        with ExitStack() as stack:
            executor = stack.enter_context(_executor(url, concurrency, dask, stop))
            progress = stack.enter_context(_progress("threads"))
            summary = compact_store(
                url,
                store_options=options,
                retention=kept,
                threads=threads,
                shard=settings.shard(shard),
                grace=grace,
                offline=offline,
                max_time=max_time,
                dry_run=dry_run,
                concurrency=None if executor else concurrency,
                executor=executor,
                progress=lambda outcome, total: progress(total, _failure(outcome)),
                stop=stop,
            )
    _say_summary(summary, dry_run, as_json)
    _end(summary.failures, summary.stopped)


@app.command()
def expire(
    url: Url,
    retention: RetentionFile = None,
    max_age: MaxAge = None,
    max_checkpoints: MaxCheckpoints = None,
    idle: Idle = None,
    threads: Threads = None,
    dry_run: DryRun = False,
    concurrency: Concurrency = None,
    shard: Shard = _ALL,
    max_time: MaxTime = None,
    grace: Grace = _GRACE,
    offline: Offline = False,
    as_json: Json = False,
    store_option: StoreOption = None,
) -> None:
    """Remove what has expired: `compact`, of which a retention must be given."""
    if retention is None and max_age is None and max_checkpoints is None and idle is None:
        raise typer.BadParameter("say what expires: --retention FILE, --max-age, --max-checkpoints or --idle")
    compact(
        url,
        retention=retention,
        max_age=max_age,
        max_checkpoints=max_checkpoints,
        idle=idle,
        threads=threads,
        dry_run=dry_run,
        concurrency=concurrency,
        shard=shard,
        max_time=max_time,
        grace=grace,
        offline=offline,
        as_json=as_json,
        store_option=store_option,
    )


@app.command()
def prune(
    url: Url,
    thread_ids: ThreadIds,
    strategy: Strategy = "keep_latest",
    as_json: Json = False,
    store_option: StoreOption = None,
) -> None:
    """Reduce threads to what is needed to go on, or remove them."""
    if strategy not in ("keep_latest", "delete"):
        raise typer.BadParameter(f"there is no strategy {strategy!r}: keep_latest or delete")
    left = Collected()
    with _store(url, store_option) as store:
        engine = store.engine
        remove = engine.delete_all if strategy == "delete" else engine.prune

        def do(thread_id: str) -> None:
            store.run(remove([thread_id]))
            left.add(store.run(engine.collect_thread(thread_id, engine.process.limits.grace, dry_run=True)))

        failures, done = _each_thread(thread_ids, do)
    left.waiting_objects += left.objects  # nothing is collected here, however old it is
    left.waiting_bytes += left.bytes
    if as_json:
        found = {**_waiting(left), "stopped": done < len(thread_ids), "failures": failures}
        typer.echo(json.dumps(found))
    else:
        _say_waiting(**_waiting(left))
    _say_rest(done, thread_ids)
    _say_failures(failures)
    _end(failures, done < len(thread_ids))


@app.command()
def delete(url: Url, thread_ids: ThreadIds, store_option: StoreOption = None) -> None:
    """Remove threads, with all of their objects."""
    with _store(url, store_option) as store:
        failures, done = _each_thread(thread_ids, lambda thread_id: store.run(store.engine.delete(thread_id)))
    _say_rest(done, thread_ids)
    _say_failures(failures)
    _end(failures, done < len(thread_ids))


@app.command()
def gc(
    url: Url,
    grace: Grace = _GRACE,
    offline: Offline = False,
    dry_run: DryRun = False,
    as_json: Json = False,
    store_option: StoreOption = None,
) -> None:
    """Remove what no thread refers to, in the whole store: also what `compact` does not look at, as the objects of
    threads whose deletion was interrupted."""
    failures: dict[str, str] = {}
    with _store(url, store_option) as store:
        if not dry_run:
            check_grace(grace.total_seconds(), offline)
        failed: Callable[[str, LSMError], None] = lambda key, error: failures.update({key: str(error)})  # noqa: E731
        freed = Collected()
        stopped = _stopped(store, store.engine.collect(grace.total_seconds(), dry_run, failed, freed))
    if as_json:
        found = {"freed_objects": freed.objects, "freed_bytes": freed.bytes, **_waiting(freed)}
        typer.echo(json.dumps({**found, "stopped": stopped, "failures": failures}))
    else:
        verb = "would be" if dry_run else "were"
        _say_stopped(stopped)
        typer.echo(f"{freed.objects:,} objects of {_size(freed.bytes)} {verb} removed")
        _say_waiting(**_waiting(freed))
    _say_failures(failures)
    _end(failures, stopped)


@app.command()
def verify(
    url: Url,
    repair: Repair = False,
    concurrency: Concurrency = None,
    as_json: Json = False,
    store_option: StoreOption = None,
) -> None:
    """Read and check every byte: checksums, references, values, the chains of delta channels; and what is orphaned."""
    with _store(url, store_option) as store, _progress("threads") as progress:

        def each(report: Report) -> None:
            progress(None, f"{report.thread_id}: {report.problems[0]}" if report.problems else None)

        found = StoreReport()
        stopped = _stopped(store, verify_store(store.engine.process, each, repair, concurrency or 4, found))
    if as_json:
        typer.echo(json.dumps({**asdict(found), "stopped": stopped}))
    else:
        _say_stopped(stopped)
        _say_report(found, repair)
    _end(found.problems, stopped)


@app.command()
def stats(
    url: Url,
    thread_id: OneThread = None,
    as_json: Json = False,
    store_option: StoreOption = None,
) -> None:
    """Threads, checkpoints, bytes that are needed and that are not, segments, amplification: of a store or a thread."""
    with _store(url, store_option) as store:
        process = store.engine.process
        if thread_id is not None:
            found = store.run(thread_stats(process, process.thread(thread_id)))
            if not found.threads:
                raise _Failed(f"{store.storage.url}: there is no thread {thread_id!r}")
        else:
            found = store.run(store_stats(process))
    _say_stats(found, as_json)
    _end(found.failures, False)


# Running.


class _Failed(LSMError):
    """What the user must be told, and no more can be done."""


@contextmanager
def _refusing() -> Iterator[None]:
    """Errors as a user wants to read them, with the exit code that they have."""
    try:
        yield
    except Stopped as error:
        typer.echo("stopped", err=True)
        raise typer.Exit(_INTERRUPTED) from error
    except LSMError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def _store(url: str, store_option: list[str] | None) -> Iterator[Store]:
    options = settings.store_options
    with _refusing(), _stoppable() as stop, Store(url, options(store_option or ()), stop=stop) as store:
        store.expect()
        yield store


def _stopped(store: Store, steps: Steps[Any]) -> bool:
    """Run steps. Answers whether they were stopped."""
    try:
        store.run(steps)
    except Stopped:
        return True
    return False


@contextmanager
def _stoppable() -> Iterator[Stop]:
    """What an interrupt asks to stop. Where interrupts are ignored, as in what a shell runs in the background, they
    stay so."""
    stop = Stop(get_context("spawn").RawValue("b", 0))
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def interrupted(*_: Any) -> None:  # between any two instructions of the main thread, which may hold any lock
        if stop.asked:
            _end_at_once()
        stop.ask()
        os.write(2, f"{_STOPPING}\n".encode())

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _end_at_once() -> NoReturn:
    for child in active_children():
        child.kill()
    if os.isatty(2):
        os.write(2, _SHOW_CURSOR)
    os._exit(_INTERRUPTED)


class _Pool(ProcessPoolExecutor):
    """Processes that no interrupt reaches: a terminal sends it to them, too. They inherit that from who starts them,
    so that it holds from their first instruction, and are told to stop by a flag."""

    def __init__(self, size: int | None, stop: Stop):
        super().__init__(size, get_context("spawn"), heed, (stop.flag,))

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with _no_interrupt():
            return super().submit(fn, *args, **kwargs)


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Put interrupts off. What is started meanwhile never gets one."""
    resource_tracker.ensure_running()  # it would be started with the first process, and let interrupts in
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _executor(url: str, concurrency: int | None, dask: Any, stop: Stop) -> Iterator[Executor | Any]:
    """Where the work is done; `None` for here."""
    if dask is not None:
        try:
            distributed: Any = import_module("distributed")
        except ImportError:
            _refuse("--dask needs the extra [dask]: pip install 'langgraph-checkpoint-lsm[dask]'")
        _quiet(logging.getLogger("distributed"))
        with ExitStack() as stack:
            if dask == "local":
                with _no_interrupt():
                    cluster = distributed.LocalCluster(
                        n_workers=concurrency,
                        threads_per_worker=1,
                        dashboard_address=":0",
                        silence_logs=logging.WARNING,
                    )
                dask = stack.enter_context(cluster)
            yield stack.enter_context(distributed.Client(dask))
    elif url.startswith("file:") and (concurrency or 1) > 1:
        # Rewriting local files keeps a core busy. Spawned, since this process has threads already.
        with _Pool(concurrency, stop) as pool:
            yield pool
    else:
        yield None


def _quiet(logger: logging.Logger) -> None:
    """Have a library that sets levels of its own for its loggers say no more than others do."""
    level = logging.getLogger().getEffectiveLevel()
    for name in [logger.name, *(each for each in logging.Logger.manager.loggerDict if each.startswith(logger.name))]:
        logging.getLogger(name).setLevel(max(level, logging.INFO))


def _refuse(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def _each_thread(thread_ids: list[str], do: Callable[[str], None]) -> tuple[dict[str, str], int]:
    """Do something for each thread. Answers what went wrong, by thread, and for how many threads it was done until all
    were through or it was stopped."""
    failures: dict[str, str] = {}
    for done, thread_id in enumerate(thread_ids):
        try:
            do(thread_id)
        except Stopped:
            return failures, done
        except LSMError as error:
            failures[thread_id] = str(error)
    return failures, len(thread_ids)


def _end(failures: Any, stopped: bool) -> None:
    if stopped:
        raise typer.Exit(_INTERRUPTED)
    if failures:
        raise typer.Exit(1)


# Saying.


class _Rate(ProgressColumn):
    """Threads a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:.1f}/s")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int | None, str | None], None]]:
    """What is told of each thing that is done: how many there are, if that is known, and what went wrong."""
    console = Console(stderr=True)
    begun = last = time.monotonic()
    done = 0

    def line(total: int | None, failure: str | None) -> None:
        nonlocal done, last
        done += 1
        if failure is not None:
            typer.echo(f"failed: {failure}", err=True)
        now = time.monotonic()
        if now - last >= _EVERY:
            last = now
            rate = done / (now - begun)
            left = f" of {total:,}, about {timedelta(seconds=int((total - done) / rate))} left" if total else ""
            typer.echo(f"{done:,} {what}{left}, {rate:.1f}/s", err=True)

    if not console.is_terminal:
        yield line
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def move(total: int | None, failure: str | None) -> None:
            if failure is not None:
                bar.console.print(f"failed: {failure}", markup=False, highlight=False)
            bar.update(task, advance=1, total=total)

        yield move


def _failure(outcome: Outcome) -> str | None:
    return None if outcome.failure is None else f"{outcome.thread_id or outcome.key}: {outcome.failure}"


def _say_failures(failures: dict[str, str]) -> None:
    for name, failure in failures.items():
        typer.echo(f"failed: {name}: {failure}", err=True)


def _say_stopped(stopped: bool) -> None:
    if stopped:
        typer.echo("stopped before the end; until then:")


def _say_rest(done: int, thread_ids: list[str]) -> None:
    if rest := thread_ids[done:]:
        typer.echo(f"stopped: {done:,} threads are done, and left are {', '.join(map(repr, rest))}", err=True)


def _say_summary(summary: Summary, dry_run: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**asdict(summary), "dry_run": dry_run}))
        return
    would = "would be " if dry_run else ""
    _say_stopped(summary.stopped)
    typer.echo(
        f"{summary.threads:,} threads, of which {summary.unchanged:,} were in shape and {summary.looked_at:,} looked "
        f"at in {summary.seconds:.1f} s"
    )
    typer.echo(f"{summary.merged:,} segments of {_size(summary.rewritten_bytes)} {would}merged")
    typer.echo(f"{summary.expired:,} checkpoints {would}expired, {summary.removed:,} idle threads {would}removed")
    typer.echo(f"{summary.freed_objects:,} objects of {_size(summary.freed_bytes)} {would}collected")
    _say_waiting(summary.waiting_objects, summary.waiting_bytes, summary.collectable_at)
    if summary.left:
        typer.echo(f"{summary.left:,} threads left for the next run")
    if summary.failures:
        typer.echo(f"{len(summary.failures):,} threads failed: {', '.join(map(repr, summary.failures))}")


def _waiting(freed: Collected) -> dict[str, Any]:
    """What waits for the grace, and until when."""
    return {
        "waiting_objects": freed.waiting_objects,
        "waiting_bytes": freed.waiting_bytes,
        "collectable_at": freed.collectable_at,
    }


def _say_waiting(waiting_objects: int, waiting_bytes: int, collectable_at: str | None) -> None:
    if waiting_objects:
        when = f"until {collectable_at}" if collectable_at is not None else "for the next compact or gc"
        typer.echo(f"{waiting_objects:,} objects of {_size(waiting_bytes)} are garbage and wait {when}")


def _say_report(found: StoreReport, repair: bool) -> None:
    for name, problems in found.problems.items():
        for problem in problems:
            typer.echo(f"problem: {name}: {problem}")
    typer.echo(
        f"{found.threads:,} threads with {found.checkpoints:,} checkpoints in {found.segments:,} segments, "
        f"{_size(found.bytes)}: {f'{len(found.problems):,} are damaged' if found.problems else 'all whole'}"
    )
    if found.torn:
        rest = f", {found.repaired:,} of them repaired" if repair else "; the next write to each drops it"
        typer.echo(f"{found.torn:,} manifests end in what a crash left behind{rest}")
    garbage = found.garbage
    typer.echo(f"{garbage.objects:,} objects of {_size(garbage.bytes)} are referred to by nothing")


def _say_stats(found: Stats, as_json: bool) -> None:
    numbers = {
        **asdict(found),
        "stored_bytes": found.stored_bytes,
        "space_amplification": round(found.space_amplification, 3),
        "write_amplification": round(found.write_amplification, 3),
    }
    if as_json:
        typer.echo(json.dumps(numbers))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name in ("threads", "checkpoints"):
        table.add_row(name, f"{numbers[name]:,}")
    for name in ("stored", "live", "dead", "manifest", "garbage"):
        table.add_row(f"{name} bytes", _size(numbers[f"{name}_bytes"]))
    for name, count in sorted(found.segments.items()):
        table.add_row(f"segments, {name}", f"{count:,}")
    table.add_row("space amplification", f"{found.space_amplification:.2f}")
    table.add_row("write amplification, about", f"{found.write_amplification:.2f}")
    Console().print(table)
    _say_failures(found.failures)


def _size(count: float) -> str:
    """A number of bytes, as people read it.

    Example:
        >>> _size(999), _size(1536), _size(3 << 30)
        ('999 B', '1.5 KiB', '3.0 GiB')
    """
    if count < 1024:
        return f"{count:,} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:,.1f} TiB"
