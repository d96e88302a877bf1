"""How each saver is made, and what it cannot do.

Rules of this module:

- It runs in every peer's interpreter: beside the standard library, a peer's imports are its own business, inside
  the function that opens it.
- Each peer runs with the settings that its own documentation starts from.
- `place.filling` says that what is stored is only what a workload starts from: then a peer need not sync, and S3 is
  reached without the proxy. No measurement is ever made so.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

REGION = "us-east-1"


@dataclass(frozen=True)
class Place:
    """Where one peer stores for one workload.

    Attributes:
        name: A name that no other place of this run has.
        directory: An empty folder.
        endpoint: S3's address.
        bucket: An empty bucket there.
        access_key: S3 credentials.
        secret_key: S3 credentials.
        dsn: How to connect to an empty Postgres database.
        delay: Seconds by which each request is delayed.
        filling: See the rules above.
    """

    name: str
    directory: str = ""
    endpoint: str = ""
    bucket: str = ""
    access_key: str = ""
    secret_key: str = ""
    dsn: str = ""
    delay: float = 0.0
    filling: bool = False

    def to_json(self) -> dict[str, Any]:
        """As the worker's protocol carries it: `Place(**place.to_json())` is the same place."""
        return asdict(self)


Open = Callable[[Place], AbstractContextManager[Any]]
AsyncOpen = Callable[[Place], AbstractAsyncContextManager[Any]]


@dataclass(frozen=True)
class Limit:
    """The largest size that a peer is asked for, and the reason why it stops there."""

    size: int
    reason: str


@dataclass(frozen=True)
class Peer:
    """One saver on one kind of storage.

    Attributes:
        title: How tables call it.
        storage: `"memory"`, `"file"`, `"postgres"` or `"s3"`.
        open: Opens the saver.
        open_async: Opens the saver for async callers; `None` where that is the very same object.
        compact: Compacts a thread of a saver of its, and removes what that replaced; `None` where there is no such
            thing.
        requires: The distributions it needs, beside LangGraph.
        langgraph: LangGraph's distributions that it needs, where it does not work with ours.
        packages: The distributions whose versions are worth telling.
        limits: The largest sizes of workloads that it is asked for, by family.
        families: The families that it is about; all, unless given.
    """

    title: str
    storage: str
    open: Open
    open_async: AsyncOpen | None = None
    compact: Callable[[Any, str], None] | None = None
    requires: tuple[str, ...] = ()
    langgraph: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    limits: Mapping[str, Limit] = field(default_factory=dict)
    families: frozenset[str] | None = None

    @property
    def on_s3(self) -> bool:
        """Whether its requests are counted."""
        return self.storage == "s3"

    def takes_part(self, family: str) -> bool:
        """Whether a family of workloads says anything about it."""
        return self.families is None or family in self.families

    def refuses(self, family: str, size: int) -> str | None:
        """Why it is not asked for a workload of this size; `None` where it is."""
        limit = self.limits.get(family)
        return limit.reason if limit is not None and size > limit.size else None


# What lives in memory stays there while it is closed: opening the same place finds it again.
_memories: dict[str, Any] = {}


def forget(place: Place) -> None:
    """Let go of what a place holds in this process's memory."""
    _memories.pop(place.name, None)


@contextmanager
def _memory(place: Place) -> Iterator[Any]:
    from langgraph.checkpoint.memory import InMemorySaver

    yield _memories.setdefault(place.name, InMemorySaver())


@contextmanager
def _sqlite(place: Place) -> Iterator[Any]:
    from langgraph.checkpoint.sqlite import SqliteSaver

    with SqliteSaver.from_conn_string(f"{place.directory}/checkpoints.sqlite") as saver:
        if place.filling:
            saver.conn.execute("PRAGMA synchronous=OFF")
        yield saver


@asynccontextmanager
async def _sqlite_async(place: Place) -> AsyncIterator[Any]:
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

    async with AsyncSqliteSaver.from_conn_string(f"{place.directory}/checkpoints.sqlite") as saver:
        yield saver


def _postgres_options(place: Place) -> dict[str, Any]:
    """A pool, as a server that serves many threads at once has it."""
    from psycopg.rows import dict_row

    options: dict[str, Any] = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    if place.filling:
        options["options"] = "-c synchronous_commit=off"
    return {"min_size": 1, "max_size": 64, "kwargs": options}


@contextmanager
def _postgres(place: Place) -> Iterator[Any]:
    from langgraph.checkpoint.postgres import PostgresSaver
    from psycopg_pool import ConnectionPool

    with ConnectionPool(place.dsn, **_postgres_options(place)) as pool:
        saver = PostgresSaver(pool)
        saver.setup()
        yield saver


@asynccontextmanager
async def _postgres_async(place: Place) -> AsyncIterator[Any]:
    from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
    from psycopg_pool import AsyncConnectionPool

    async with AsyncConnectionPool(place.dsn, open=False, **_postgres_options(place)) as pool:
        yield AsyncPostgresSaver(pool)


def _lsm_file(*, fsync: bool) -> Open:
    @contextmanager
    def opened(place: Place) -> Iterator[Any]:
        from langgraph.checkpoint.lsm import LSMSaver

        with LSMSaver.from_conn_string(f"file://{place.directory}", fsync=fsync and not place.filling) as saver:
            yield saver

    return opened


@contextmanager
def _lsm_s3(place: Place) -> Iterator[Any]:
    from langgraph.checkpoint.lsm import LSMSaver

    options = {
        "aws_endpoint": place.endpoint,
        "aws_access_key_id": place.access_key,
        "aws_secret_access_key": place.secret_key,
        "aws_region": REGION,
        "aws_virtual_hosted_style_request": False,
        "client_options": {"allow_http": True},
    }
    with LSMSaver.from_conn_string(f"s3://{place.bucket}/checkpoints", store_options=options) as saver:
        yield saver


def _lsm_compact(saver: Any, thread_id: str) -> None:
    """What was replaced goes at once, without the grace that a running system's readers have."""
    saver.compact(thread_id)
    saver._runtime.run(saver._engine.collect_thread(thread_id, 0.0))


@contextmanager
def _lsm_delayed(place: Place) -> Iterator[Any]:
    from langgraph.checkpoint.lsm import LSMSaver
    from lsm.storage import open_storage
    from tools.bench.delayed import DelayedStorage

    storage = _memories.setdefault(place.name, open_storage("memory://"))
    with LSMSaver.from_storage(DelayedStorage(storage, 0.0 if place.filling else place.delay)) as saver:
        yield saver


@contextmanager
def _objectstorage_file(place: Place) -> Iterator[Any]:
    from langgraph_checkpoint_objectstorage import ObjectStorageSaver

    yield ObjectStorageSaver.from_conn_string(f"file://{place.directory}")


@contextmanager
def _objectstorage_s3(place: Place) -> Iterator[Any]:
    from langgraph_checkpoint_objectstorage import ObjectStorageSaver

    yield ObjectStorageSaver.from_conn_string(
        f"s3://{place.bucket}/checkpoints",
        key=place.access_key,
        secret=place.secret_key,
        client_kwargs={"endpoint_url": place.endpoint, "region_name": REGION},
    )


@asynccontextmanager
async def _objectstorage_s3_async(place: Place) -> AsyncIterator[Any]:
    with _objectstorage_s3(place) as saver:  # the same class, but its connections belong to one event loop
        yield saver


def _aws_environment(place: Place) -> None:
    """Savers on boto3 take these from where boto3 takes them."""
    os.environ.update(
        AWS_ENDPOINT_URL=place.endpoint,
        AWS_ACCESS_KEY_ID=place.access_key,
        AWS_SECRET_ACCESS_KEY=place.secret_key,
        AWS_DEFAULT_REGION=REGION,
    )


@contextmanager
def _tigris(place: Place) -> Iterator[Any]:
    from langgraph.checkpoint.tigris import TigrisSaver

    _aws_environment(place)
    with TigrisSaver.from_conn_string(place.bucket, endpoint_url=place.endpoint, region_name=REGION) as saver:
        yield saver


@asynccontextmanager
async def _tigris_async(place: Place) -> AsyncIterator[Any]:
    from langgraph.checkpoint.tigris.aio import AsyncTigrisSaver

    _aws_environment(place)
    opening = AsyncTigrisSaver.from_conn_string(place.bucket, endpoint_url=place.endpoint, region_name=REGION)
    async with opening as saver:
        yield saver


@contextmanager
def _s3(place: Place) -> Iterator[Any]:
    from langgraph_checkpoint_s3 import S3CheckpointSaver

    _aws_environment(place)
    yield S3CheckpointSaver(place.bucket)


@asynccontextmanager
async def _s3_async(place: Place) -> AsyncIterator[Any]:
    from langgraph_checkpoint_s3 import AsyncS3CheckpointSaver

    _aws_environment(place)
    yield AsyncS3CheckpointSaver(place.bucket)


_EACH = "it asks for each checkpoint by itself"
_EACH_FILE = {"history": Limit(1_000, _EACH), "delta": Limit(1_000, _EACH)}
_EACH_OBJECT = {"history": Limit(1_000, _EACH), "delta": Limit(100, _EACH)}

PEERS: dict[str, Peer] = {
    "lsm-file": Peer(
        "LSMSaver, file",
        "file",
        _lsm_file(fsync=True),
        compact=_lsm_compact,
        packages=("langgraph-checkpoint-lsm", "obstore"),
    ),
    "lsm-file-nosync": Peer(
        "LSMSaver, file, fsync=False",
        "file",
        _lsm_file(fsync=False),
        compact=_lsm_compact,
        limits={"history": Limit(1_000, "it reads as with fsync")},
    ),
    "memory": Peer("InMemorySaver", "memory", _memory, packages=("langgraph-checkpoint",)),
    "sqlite": Peer(
        "SqliteSaver",
        "file",
        _sqlite,
        _sqlite_async,
        requires=("langgraph-checkpoint-sqlite",),
        packages=("langgraph-checkpoint-sqlite",),
    ),
    "postgres": Peer(
        "PostgresSaver",
        "postgres",
        _postgres,
        _postgres_async,
        requires=("langgraph-checkpoint-postgres", "psycopg[binary]", "psycopg-pool"),
        packages=("langgraph-checkpoint-postgres", "psycopg"),
    ),
    "objectstorage-file": Peer(
        "ObjectStorageSaver, file",
        "file",
        _objectstorage_file,
        requires=("langgraph-checkpoint-objectstorage[s3]",),
        packages=("langgraph-checkpoint-objectstorage",),
        limits=_EACH_FILE,
    ),
    "lsm-s3": Peer(
        "LSMSaver, S3",
        "s3",
        _lsm_s3,
        compact=_lsm_compact,
        limits={"history": Limit(1_000, "the S3 server here takes a quarter of an hour to be filled")},
    ),
    "lsm-delayed": Peer("LSMSaver, memory with S3's delay", "memory", _lsm_delayed, families=frozenset({"at-once"})),
    "objectstorage-s3": Peer(
        "ObjectStorageSaver, S3",
        "s3",
        _objectstorage_s3,
        _objectstorage_s3_async,
        requires=("langgraph-checkpoint-objectstorage[s3]", "s3fs"),
        packages=("langgraph-checkpoint-objectstorage", "s3fs"),
        limits=_EACH_OBJECT,
    ),
    "tigris": Peer(
        "TigrisSaver",
        "s3",
        _tigris,
        _tigris_async,
        requires=("langgraph-checkpoint-tigris",),
        packages=("langgraph-checkpoint-tigris", "boto3"),
        limits=_EACH_OBJECT,
    ),
    "s3": Peer(
        "S3CheckpointSaver",
        "s3",
        _s3,
        _s3_async,
        requires=("langgraph-checkpoint-s3",),
        langgraph=("langgraph", "langgraph-checkpoint<3"),  # it calls `serde.dumps`, which went with 3.0
        packages=("langgraph-checkpoint-s3", "langgraph-checkpoint", "boto3"),
        limits=_EACH_OBJECT | {"delta": Limit(0, "its LangGraph knows no delta channels")},
    ),
}
