"""The saver: LangGraph's contract on one side, the engine on the other.

Rules of this module:

- Every pair of sync and async methods shares its work: arguments are checked and values serialised in one place, the
  engine's steps are made once, and only the driver differs.
- Reads of an async caller run on its own event loop; its commits run detached (see `lsm.drive.Runtime`).
- A config is checked, and every value serialised, before anything is stored.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import TracebackType
from typing import Any, Self, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    PendingWrite,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.base import SerializerProtocol

from langgraph.checkpoint.lsm.config import (
    address,
    before_id,
    checked_names,
    checked_sequence,
    checked_thread_id,
    config_of,
    mapping,
    search,
    text,
    versions,
)
from langgraph.checkpoint.lsm.terms import matches, terms_for, terms_of
from lsm.drive import Runtime
from lsm.engine import ConcurrentRuns, Engine
from lsm.format.envelope import COMPRESSIONS, Compression
from lsm.format.records import Typed
from lsm.history import ChannelHistory
from lsm.limits import FILES, OBJECTS
from lsm.listing import Listing
from lsm.read import Stored
from lsm.retention import Retention
from lsm.steps import Steps
from lsm.storage import Storage, open_storage
from lsm.storage.objects import ObjectStorage
from lsm.worker import Worker

T = TypeVar("T")
_BATCH = 32
_LARGEST_BATCH = 256
_STRATEGIES = ("keep_latest", "delete")


class LSMSaver(BaseCheckpointSaver[str]):
    """A checkpoint saver that keeps threads in a directory or a bucket.

    One instance serves sync and async callers, from any number of threads and event loops, at once. It is made from an
    address (`from_conn_string`) or from a ready obstore store.

    Args:
        store: An obstore store (`obstore.store.S3Store`, ...).
        prefix: Where in the store the checkpoints lie.
        serde: The serialiser; LangGraph's default one if left out.
        compression: `"zstd"`, `"zlib"`, `"lzma"` or `"none"`, for what is written from now on.
        cache_bytes: How much to keep in memory, in bytes: manifests, indexes and values together.
        compaction: `"background"` keeps the threads that this process writes in shape; `"off"` leaves that to a
            scheduled `langgraph-lsm compact`.
        retention: How long checkpoints stay (`Retention`); for ever if left out.
        concurrent_runs: `"fork"`: of two runs that go on from one checkpoint both succeed, the history forks. With
            `"refuse"` the second gets `lsm.errors.ConcurrentRunError`.
        commit_deadline: How long a call that writes tries again while the store fails, another process holds the
            thread's lock, or others are faster, in seconds. Then it raises `lsm.errors.CommitTimeout`.

    Raises:
        ValueError: If an option has a value that it cannot have.
        TypeError: If an option is unknown.

    Example:
        >>> from langgraph.graph import StateGraph
        >>> builder = StateGraph(int)
        >>> _ = builder.add_node("add_one", lambda x: x + 1)
        >>> _ = builder.set_entry_point("add_one").set_finish_point("add_one")
        >>> with LSMSaver.from_conn_string("memory://") as saver:
        ...     graph = builder.compile(checkpointer=saver)
        ...     graph.invoke(1, {"configurable": {"thread_id": "1"}})
        2
    """

    def __init__(self, store: Any, prefix: str = "", **options: Any):
        if isinstance(store, (str, os.PathLike)):
            raise TypeError(
                f"LSMSaver takes an obstore store; for an address: LSMSaver.from_conn_string({str(store)!r})"
            )
        self._open(ObjectStorage(store, prefix), **options)

    @classmethod
    def from_conn_string(
        cls, conn_string: str, *, fsync: bool = True, store_options: Mapping[str, Any] | None = None, **options: Any
    ) -> Self:
        """A saver on the store at an address.

        Args:
            conn_string: `file:///dir`, `memory://` (this saver's own), `memory://name` (shared by name within the
                process), `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.
            fsync: For `file://`: whether commits survive a power cut; without it they survive a crash of the process.
            store_options: Credentials, region, endpoint and the like, as obstore takes them. What is left out comes
                from the environment.
            **options: As for the class.

        Returns:
            The saver. It is a context manager, sync and async, and need not be used as one.

        Raises:
            ValueError: If the address is not one of these.
            TypeError: If an option is unknown.

        Example:
            >>> saver = LSMSaver.from_conn_string("memory://docs")
            >>> saver.get_tuple({"configurable": {"thread_id": "1"}}) is None
            True
        """
        _check_options(options, ("fsync", "store_options"))
        return cls.from_storage(open_storage(conn_string, store_options=store_options, fsync=fsync), **options)

    @classmethod
    def from_storage(cls, storage: Storage, **options: Any) -> Self:
        """A saver on a storage of the engine's (`lsm.storage.Storage`). Options as for the class."""
        saver = cls.__new__(cls)
        saver._open(storage, **options)
        return saver

    def _open(self, storage: Storage, **options: Any) -> None:
        _check_options(options)
        self._configure(storage, **options)
        self._options = options

    def _configure(
        self,
        storage: Storage,
        *,
        serde: SerializerProtocol | None = None,
        compression: Compression = "zstd",
        cache_bytes: int = 256 << 20,
        compaction: str = "background",
        retention: Retention | None = None,
        concurrent_runs: ConcurrentRuns = "fork",
        commit_deadline: float = 60.0,
    ) -> None:
        super().__init__(serde=serde)
        _one_of("compression", compression, COMPRESSIONS)
        _one_of("compaction", compaction, ("background", "off"))
        _one_of("concurrent_runs", concurrent_runs, ("fork", "refuse"))
        if type(cache_bytes) is not int or cache_bytes < 0:
            raise ValueError(f"cache_bytes must be a number of bytes, not {cache_bytes!r}")
        if type(commit_deadline) not in (int, float) or not 0 < commit_deadline < inf:
            raise ValueError(f"commit_deadline must be a number of seconds above 0, not {commit_deadline!r}")
        self._storage = storage
        self._runtime = Runtime(storage)
        if retention is not None and not isinstance(retention, Retention):
            raise TypeError(f"retention must be a Retention, not {type(retention).__name__}")
        self._engine = Engine(
            storage.url,
            storage.appends,
            os.urandom,
            conditional_deletes=storage.conditional_deletes,
            compression=compression,
            cache_bytes=cache_bytes,
            limits=replace(FILES if storage.appends else OBJECTS, commit_deadline=commit_deadline),
            retention=retention,
            concurrent_runs=concurrent_runs,
        )
        self._worker = Worker(self._engine, self._runtime) if compaction == "background" else None

    def __copy__(self) -> Self:
        """A clone that shares the store, the cache and the queues (`with_allowlist` makes one)."""
        clone = type(self).__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (type(self), self._storage, {**self._options, "serde": self.serde})

    # The life of a saver.

    def setup(self) -> None:
        """Prove that the store can be reached and enforces conditional writes. The first write does so, too.

        Raises:
            lsm.errors.ConditionalWritesUnsupported: If it does not enforce them.
            lsm.errors.StorageError: If it cannot be reached.
        """
        self._runtime.run(self._engine.setup())

    async def asetup(self) -> None:
        """Async version of `setup`."""
        await self._runtime.arun(self._engine.setup())

    def close(self) -> None:
        """Finish what runs in the background and let go of connections."""
        if self._worker is not None:
            self._worker.close()
        self._runtime.close()
        self._storage.close()

    async def aclose(self) -> None:
        """Async version of `close`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # Reading.

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that a config points at, or the latest of its namespace.

        Args:
            config: With `thread_id`, and optionally `checkpoint_ns` and `checkpoint_id`.

        Returns:
            The checkpoint with its values, metadata and pending writes, or `None` if there is none.

        Raises:
            ValueError: If the config has no thread id.
            lsm.errors.CorruptionError: If what is stored is damaged.

        Example:
            >>> saver = LSMSaver.from_conn_string("memory://")
            >>> print(saver.get_tuple({"configurable": {"thread_id": "1"}}))
            None
        """
        return self._tuple_at(config, self._runtime.run(self._engine.get(*address(config))))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Async version of `get_tuple`."""
        return self._tuple_at(config, await self._runtime.arun(self._engine.get(*address(config))))

    def _tuple_at(self, config: RunnableConfig, stored: Stored | None) -> CheckpointTuple | None:
        if stored is None:
            return None
        where = address(config)
        found = self._tuple(where.thread_id, stored)
        return found._replace(config=config) if where.checkpoint_id else found

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, those with the highest ids first.

        Args:
            config: The thread, and optionally the namespace and the checkpoint, to list; `None` for all threads.
            filter: Metadata that a checkpoint must have, key by key, exactly.
            before: Only checkpoints with ids below this config's.
            limit: At most this many.

        Yields:
            Checkpoints with their values and pending writes, as they were when the iteration began.

        Raises:
            ValueError: If the config has no thread id.

        Example:
            >>> saver = LSMSaver.from_conn_string("memory://")
            >>> list(saver.list({"configurable": {"thread_id": "1"}}, filter={"source": "loop"}, limit=10))
            []
        """
        return self._iterate(_Search(self._engine, config, filter, before, limit))

    def _iterate(self, search: _Search) -> Iterator[CheckpointTuple]:
        while search.count:
            batch = self._runtime.run(search.next())
            for thread_id, stored in batch:
                if found := search.accept(self._tuple(thread_id, stored)):
                    yield found
            if not batch:
                return

    def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Async version of `list`."""
        return self._aiterate(_Search(self._engine, config, filter, before, limit))

    async def _aiterate(self, search: _Search) -> AsyncIterator[CheckpointTuple]:
        while search.count:
            batch = await self._runtime.arun(search.next())
            for thread_id, stored in batch:
                if found := search.accept(self._tuple(thread_id, stored)):
                    yield found
            if not batch:
                return

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """What the ancestors of a checkpoint wrote to some channels, back to the nearest stored value.

        Args:
            config: The checkpoint, or the latest of the config's namespace.
            channels: The channels.

        Returns:
            For every channel, its writes, oldest first, and, where there is one, the stored value (`seed`) that they
            start from.

        Raises:
            ValueError: If the config has no thread id.

        Example:
            >>> saver = LSMSaver.from_conn_string("memory://")
            >>> saver.get_delta_channel_history(config={"configurable": {"thread_id": "1"}}, channels=["messages"])
            {'messages': {'writes': []}}
        """
        where, names = address(config), checked_names(channels, "channels")
        return self._histories(self._runtime.run(self._engine.history(*where, names))) if names else {}

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Async version of `get_delta_channel_history`."""
        where, names = address(config), checked_names(channels, "channels")
        return self._histories(await self._runtime.arun(self._engine.history(*where, names))) if names else {}

    def _histories(self, found: Mapping[str, ChannelHistory]) -> dict[str, DeltaChannelHistory]:
        return {channel: self._history(each) for channel, each in found.items()}

    def _history(self, found: ChannelHistory) -> DeltaChannelHistory:
        entry: DeltaChannelHistory = {"writes": [self._pending(write) for write in found.writes]}
        if found.seed is not None:
            entry["seed"] = self.serde.loads_typed(found.seed)
        return entry

    def _pending(self, write: Any) -> PendingWrite:
        return write.task_id, write.channel, self.serde.loads_typed(write.value)

    def _tuple(self, thread_id: str, stored: Stored) -> CheckpointTuple:
        checkpoint: Any = self.serde.loads_typed(stored.checkpoint)
        checkpoint["channel_versions"] = dict(stored.versions)
        checkpoint["channel_values"] = {
            channel: self.serde.loads_typed(value) for channel, value in stored.values.items()
        }
        parent = config_of(thread_id, stored.namespace, stored.parent) if stored.parent else None
        return CheckpointTuple(
            config_of(thread_id, stored.namespace, stored.id),
            checkpoint,
            self.serde.loads_typed(stored.metadata),
            parent,
            [self._pending(write) for write in stored.writes],
        )

    # Writing.

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint. It is durable when this returns.

        Args:
            config: The thread and namespace; its `checkpoint_id` is the parent.
            checkpoint: The checkpoint.
            metadata: Its metadata.
            new_versions: The channels whose values are new, with their versions.

        Returns:
            The config that points at the stored checkpoint.

        Raises:
            ValueError: If the config has no thread id, or the checkpoint no id.
            lsm.errors.ConcurrentRunError: With `concurrent_runs="refuse"`, if another run was faster.
            lsm.errors.LSMError: If it could not be stored.

        Example:
            >>> from langgraph.checkpoint.base import empty_checkpoint
            >>> saver = LSMSaver.from_conn_string("memory://")
            >>> start = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}
            >>> stored = saver.put(start, empty_checkpoint(), {"source": "input", "step": -1}, {})
            >>> saver.get_tuple(stored).metadata["source"]
            'input'
        """
        steps, stored = self._put(config, checkpoint, metadata, new_versions)
        self._runtime.run(steps)
        return stored

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Async version of `put`."""
        steps, stored = self._put(config, checkpoint, metadata, new_versions)
        await self._runtime.arun_detached(steps)
        return stored

    def _put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> tuple[Steps[None], RunnableConfig]:
        where = address(config)
        rest: dict[str, Any] = dict(mapping("checkpoint", checkpoint))
        id_ = text("the checkpoint's id", rest.get("id"))
        if not id_:
            raise ValueError("the checkpoint's id is empty")
        values = mapping("channel_values", rest.pop("channel_values", {}))
        stored = versions("channel_versions", rest.pop("channel_versions", {}))
        new = versions("new_versions", new_versions)
        merged = get_checkpoint_metadata(config, mapping("metadata", metadata))  # type: ignore[arg-type]
        counters = merged.get("counters_since_delta_snapshot")
        parents = merged.get("parents")
        root = parents.get("") if isinstance(parents, Mapping) else None
        steps = self._engine.put(
            where.thread_id,
            where.namespace,
            id_,
            where.checkpoint_id,
            self._dump(rest),
            self._dump(merged),
            stored,
            {
                channel: (version, self._dump(values[channel]) if channel in values else None)
                for channel, version in new.items()
            },
            root=text("a parent", root) if isinstance(root, str) else None,
            terms=terms_of(merged),
            deltas=_names_in(counters) if isinstance(counters, Mapping) else None,
            intended=merged.get("source") in ("fork", "update"),
        )
        return steps, config_of(where.thread_id, where.namespace, id_)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store the writes of a task. They are durable when this returns.

        Args:
            config: The checkpoint that the task ran on.
            writes: Channels and values.
            task_id: The task.
            task_path: Its path.

        Raises:
            ValueError: If the config does not say which checkpoint.
            lsm.errors.LSMError: If they could not be stored.

        Example:
            >>> saver = LSMSaver.from_conn_string("memory://")
            >>> at = {"configurable": {"thread_id": "1", "checkpoint_ns": "", "checkpoint_id": "1"}}
            >>> saver.put_writes(at, [("messages", "hello")], task_id="a")
        """
        if steps := self._put_writes(config, writes, task_id, task_path):
            self._runtime.run(steps)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Async version of `put_writes`."""
        if steps := self._put_writes(config, writes, task_id, task_path):
            await self._runtime.arun_detached(steps)

    def _put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> Steps[None] | None:
        where = address(config)
        if where.checkpoint_id is None:
            raise ValueError("the config has no checkpoint_id: writes belong to a checkpoint")
        task_id, task_path = text("task_id", task_id), text("task_path", task_path)
        packed = []
        for index, (channel, value) in enumerate(writes):
            channel = text("a channel", channel)
            packed.append((WRITES_IDX_MAP.get(channel, index), channel, self._dump(value)))
        if not packed:
            return None
        return self._engine.put_writes(
            where.thread_id, where.namespace, where.checkpoint_id, task_id, task_path, packed
        )

    def _dump(self, value: Any) -> Typed:
        kind, data = self.serde.dumps_typed(value)
        if type(data) is not bytes:
            if not isinstance(data, (bytes, bytearray, memoryview)):
                raise TypeError(f"the serialiser must make bytes, not {type(data).__name__}")
            data = bytes(data)
        return text("the serialiser's name of a type", kind), data

    def get_next_version(self, current: str | None, channel: None) -> str:
        """The version after `current`: one higher, with a random part, so that branches never share a version.

        Example:
            >>> saver = LSMSaver.from_conn_string("memory://")
            >>> saver.get_next_version(saver.get_next_version(None, None), None).split(".")[0].lstrip("0")
            '2'
        """
        return InMemorySaver.get_next_version(self, current, channel)  # type: ignore[arg-type]

    # Whole threads.

    def delete_thread(self, thread_id: str) -> None:
        """Remove a thread: all its checkpoints, writes and objects.

        Args:
            thread_id: The thread; one that does not exist is no error.

        Example:
            >>> LSMSaver.from_conn_string("memory://").delete_thread("1")
        """
        self._runtime.run(self._engine.delete(checked_thread_id(thread_id)))

    async def adelete_thread(self, thread_id: str) -> None:
        """Async version of `delete_thread`."""
        await self._runtime.arun(self._engine.delete(checked_thread_id(thread_id)))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove the checkpoints, with their writes, that some runs made, in all threads.

        What a `DeltaChannel` of another checkpoint is rebuilt from stays, invisibly.

        Args:
            run_ids: The runs.

        Raises:
            TypeError: If `run_ids` is a single string.

        Example:
            >>> LSMSaver.from_conn_string("memory://").delete_for_runs(["run-1"])
        """
        self._runtime.run(self._delete_for_runs(run_ids))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Async version of `delete_for_runs`."""
        await self._runtime.arun(self._delete_for_runs(run_ids))

    def _delete_for_runs(self, run_ids: Sequence[str]) -> Steps[None]:
        ids = set(checked_names(run_ids, "run_ids"))
        terms = [group[0] for run_id in sorted(ids) for group in terms_for({"run_id": run_id})]

        def made_by_them(metadata: Typed) -> bool:
            return self.serde.loads_typed(metadata).get("run_id") in ids

        return self._engine.delete_runs(terms, made_by_them)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all checkpoints and writes of a thread to another. Into a thread that exists, they are merged.

        Args:
            source_thread_id: The thread to copy; one that does not exist is no error.
            target_thread_id: Where to.

        Example:
            >>> LSMSaver.from_conn_string("memory://").copy_thread("1", "2")
        """
        self._runtime.run(self._copy_thread(source_thread_id, target_thread_id))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Async version of `copy_thread`."""
        await self._runtime.arun(self._copy_thread(source_thread_id, target_thread_id))

    def _copy_thread(self, source: str, target: str) -> Steps[None]:
        return self._engine.copy(checked_thread_id(source), checked_thread_id(target))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Reduce threads to what is needed to go on, or remove them.

        `"keep_latest"` keeps the latest checkpoint of every namespace, with its writes; a namespace of a finished
        subgraph call goes with the root checkpoint that it started from. What a `DeltaChannel` of a kept checkpoint is
        rebuilt from stays, invisibly. `"delete"` removes the threads.

        Args:
            thread_ids: The threads; those that do not exist are no error.
            strategy: `"keep_latest"` or `"delete"`.

        Raises:
            TypeError: If `thread_ids` is a single string.
            ValueError: If the strategy is unknown.

        Example:
            >>> LSMSaver.from_conn_string("memory://").prune(["1", "2"], strategy="keep_latest")
        """
        self._runtime.run(self._prune(thread_ids, strategy))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Async version of `prune`."""
        await self._runtime.arun(self._prune(thread_ids, strategy))

    def _prune(self, thread_ids: Sequence[str], strategy: str) -> Steps[None]:
        _one_of("strategy", strategy, _STRATEGIES)
        ids = [checked_thread_id(each) for each in checked_sequence(thread_ids, "thread_ids")]
        return self._engine.delete_all(ids) if strategy == "delete" else self._engine.prune(ids)

    def flush(self, thread_id: str) -> None:
        """Move what lies in a thread's manifest into a segment. It happens by itself; this is for tests and tools."""
        self._runtime.run(self._engine.flush(checked_thread_id(thread_id)))

    async def aflush(self, thread_id: str) -> None:
        """Async version of `flush`."""
        await self._runtime.arun_detached(self._engine.flush(checked_thread_id(thread_id)))

    def compact(self, thread_id: str) -> None:
        """Rewrite all segments of a thread into one. It happens by itself as far as it pays."""
        self._runtime.run(self._engine.compact(checked_thread_id(thread_id)))

    async def acompact(self, thread_id: str) -> None:
        """Async version of `compact`."""
        await self._runtime.arun(self._engine.compact(checked_thread_id(thread_id)))


class _Search:
    """One call of `list`: what is still wanted."""

    def __init__(
        self,
        engine: Engine,
        config: RunnableConfig | None,
        filter: dict[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ):
        if limit is not None and not isinstance(limit, int):
            raise TypeError(f"limit must be a number, not {type(limit).__name__}: {limit!r}")
        if filter is not None and not isinstance(filter, Mapping):
            raise TypeError(f"filter must be a dict of metadata, not {type(filter).__name__}: {filter!r}")
        self._filter = filter
        self._left = None if limit is None else max(0, limit)
        thread_ids, namespace, id_ = search(config)
        self._listing: Listing = engine.list(thread_ids, namespace, id_, before_id(before), terms_for(filter or {}))
        self._engine = engine
        # LangGraph replays a subgraph from the checkpoint that its namespace had last before the root's one.
        self._replayed: tuple[str, str] | None = None
        if thread_ids and namespace and before and limit == 1:
            self._replayed = thread_ids[0], namespace

    @property
    def count(self) -> int:
        """How many to ask for next; 0 at the end."""
        return _BATCH if self._left is None else min(self._left, _LARGEST_BATCH)

    def next(self) -> Steps[list[tuple[str, Stored]]]:
        found = yield from self._listing.next(self.count)
        if self._replayed is not None:
            yield from self._engine.address(*self._replayed, found[0][1].id if found else None)
            self._replayed = None
        return found

    def accept(self, found: CheckpointTuple) -> CheckpointTuple | None:
        """The checkpoint, if it is wanted."""
        if self._left == 0 or not matches(found.metadata, self._filter):
            return None
        if self._left is not None:
            self._left -= 1
        return found


def _names_in(counters: Mapping[Any, Any]) -> list[str]:
    """The channels that are counted: nothing else of what is in there can be one."""
    return [text("a channel", each) for each in counters if isinstance(each, str)]


def _one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(map(repr, choices))}.{hint}")


def _check_options(options: Mapping[str, Any], more: Sequence[str] = ()) -> None:
    known = [*list(inspect.signature(LSMSaver._configure).parameters)[2:], *more]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 3)
            hint = f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(sorted(known))}"
            raise TypeError(f"LSMSaver has no option {name!r}{hint}")


def _reopen(kind: type[LSMSaver], storage: Storage, options: dict[str, Any]) -> LSMSaver:
    return kind.from_storage(storage, **options)
