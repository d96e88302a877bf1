"""What makes no sense is refused with an error that says so, before anything is stored."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore.store
import pytest

from langgraph.checkpoint.lsm import LSMSaver
from lsm.errors import ConditionalWritesUnsupported, LSMError
from tests.conftest import S3, Backend
from tests.support.checkpoints import at, checkpoint, listed, put
from tests.support.moto import moto_server, store_options
from tests.support.proxy import Fault, Rule, S3Proxy

WRONG_CONFIGS = {
    "no thread_id": {"configurable": {"checkpoint_ns": ""}},
    "an empty thread_id": at(""),
    "thread_id None": at(None),  # type: ignore[arg-type]
    "nothing configurable": {},
    "a thread_id that is an object": at(object()),  # type: ignore[arg-type]
    "a checkpoint_ns that is a number": at("thread", namespace=7),  # type: ignore[arg-type]
    "a checkpoint_id that is a number": at("thread", 7),  # type: ignore[arg-type]
}
CALLS: dict[str, Callable[[LSMSaver, Any], Any]] = {
    "get_tuple": lambda saver, config: saver.get_tuple(config),
    "aget_tuple": lambda saver, config: asyncio.run(saver.aget_tuple(config)),
    "list": lambda saver, config: list(saver.list(config or {"configurable": {}})),
    "put": lambda saver, config: saver.put(config, checkpoint({"a": 1}), {}, {"a": 1}),
    "aput": lambda saver, config: asyncio.run(saver.aput(config, checkpoint({"a": 1}), {}, {"a": 1})),
    "put_writes": lambda saver, config: saver.put_writes(_addressed(config), [("a", 1)], "task"),
    "aput_writes": lambda saver, config: asyncio.run(saver.aput_writes(_addressed(config), [("a", 1)], "task")),
    "get_delta_channel_history": lambda saver, config: saver.get_delta_channel_history(config=config, channels=["a"]),
}


def _addressed(config: Any) -> Any:
    """Writes need a checkpoint; what is wrong with the config stays wrong."""
    return {"configurable": {"checkpoint_id": "1", **config["configurable"]}} if config else config


@pytest.fixture
def saver() -> LSMSaver:
    return LSMSaver.from_conn_string("memory://")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("config", WRONG_CONFIGS.values(), ids=WRONG_CONFIGS.keys())
def test_configs_that_address_nothing(saver: LSMSaver, call: Callable[[LSMSaver, Any], Any], config: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        call(saver, config)
    assert any(word in str(raised.value) for word in ("thread_id", "checkpoint_ns", "checkpoint_id", "configurable"))
    assert listed(saver, None) == []


def test_a_missing_thread_id_is_a_value_error_that_says_so(saver: LSMSaver) -> None:
    with pytest.raises(ValueError, match="thread_id"):
        saver.get_tuple({"configurable": {}})
    with pytest.raises(ValueError, match="thread_id"):
        saver.put(at(""), checkpoint(), {}, {})


def test_a_checkpoint_needs_a_namespace_that_is_a_string(saver: LSMSaver) -> None:
    # `list` takes `None` as InMemorySaver does, for any namespace.
    with pytest.raises((ValueError, TypeError), match="checkpoint_ns"):
        saver.put(at("thread", namespace=None), checkpoint(), {}, {})  # type: ignore[arg-type]
    put(saver, at("thread", namespace="child"))
    assert len(listed(saver, at("thread", namespace=None))) == 1  # type: ignore[arg-type]


def test_writes_without_a_checkpoint_id(saver: LSMSaver) -> None:
    with pytest.raises((ValueError, TypeError), match="checkpoint_id"):
        saver.put_writes(at("thread"), [("a", 1)], "task")


@pytest.mark.parametrize("thread_id", ["..", "a/b", "/", "é", "x" * 1000, "a b?c#d%2F", "\N{PILE OF POO}", "\x00", " "])
def test_any_string_that_is_not_empty_is_a_thread_id(backend: Backend, thread_id: str) -> None:
    with backend.open() as saver:
        neighbours = [thread_id + "x", thread_id.upper() + "X"]
        for number, name in enumerate([thread_id, *neighbours]):
            put(saver, at(name), {"a": number})
        for number, name in enumerate([thread_id, *neighbours]):
            assert saver.get_tuple(at(name)).checkpoint["channel_values"] == {"a": number}
        assert {found.config["configurable"]["thread_id"] for found in saver.list(None)} == {thread_id, *neighbours}
        saver.delete_thread(thread_id)
        assert saver.get_tuple(at(thread_id)) is None
        assert len(listed(saver, None)) == 2


THREAD_CALLS: dict[str, Callable[[LSMSaver, Any], Any]] = {
    "delete_thread": lambda saver, thread_id: saver.delete_thread(thread_id),
    "adelete_thread": lambda saver, thread_id: asyncio.run(saver.adelete_thread(thread_id)),
    "copy_thread from": lambda saver, thread_id: saver.copy_thread(thread_id, "other"),
    "copy_thread to": lambda saver, thread_id: saver.copy_thread("thread", thread_id),
    "prune": lambda saver, thread_id: saver.prune(["thread", thread_id], strategy="delete"),
    "aprune": lambda saver, thread_id: asyncio.run(saver.aprune(["thread", thread_id], strategy="delete")),
}


@pytest.mark.parametrize("call", THREAD_CALLS.values(), ids=THREAD_CALLS.keys())
@pytest.mark.parametrize("thread_id", ["", None, 7.5, b"thread"], ids=repr)
def test_thread_ids_that_are_none(saver: LSMSaver, call: Callable[[LSMSaver, Any], Any], thread_id: Any) -> None:
    config = put(saver, at("thread"), {"a": 1})
    with pytest.raises((ValueError, TypeError), match="thread"):
        call(saver, thread_id)
    # Refused as a whole: the good thread of the same call is untouched.
    assert listed(saver, None) == [config["configurable"]["checkpoint_id"]]


def test_a_string_where_a_list_of_ids_belongs(saver: LSMSaver) -> None:
    # Threads and runs of one letter are what a string would be read as.
    config = put(saver, at("t"), {"a": 1}, run_id="r")
    for call in (
        lambda: saver.prune("t", strategy="delete"),
        lambda: saver.delete_for_runs("r"),
        lambda: asyncio.run(saver.aprune("t", strategy="delete")),
        lambda: asyncio.run(saver.adelete_for_runs("r")),
        lambda: saver.get_delta_channel_history(config=at("t"), channels="a"),
    ):
        with pytest.raises((ValueError, TypeError), match=r"list|sequence|string|str"):
            call()
    assert listed(saver, at("t")) == [config["configurable"]["checkpoint_id"]]


@pytest.mark.parametrize("strategy", ["keep_lastest", "", None, "KEEP_LATEST"])
def test_an_unknown_prune_strategy(saver: LSMSaver, strategy: Any) -> None:
    put(saver, put(saver, at("thread"), {"a": 1}), {"a": 2})
    with pytest.raises((ValueError, TypeError), match="keep_latest"):
        saver.prune(["thread"], strategy=strategy)
    with pytest.raises((ValueError, TypeError), match="keep_latest"):
        saver.prune([], strategy=strategy)
    assert len(listed(saver, at("thread"))) == 2


@pytest.mark.parametrize("limit", ["1", 1.5])
def test_a_limit_that_is_no_number_of_checkpoints(saver: LSMSaver, limit: Any) -> None:
    put(saver, at("thread"), {"a": 1})
    with pytest.raises((ValueError, TypeError), match="limit"):
        list(saver.list(at("thread"), limit=limit))


class Unserialisable:
    """Pickle and msgpack both refuse it."""

    def __reduce__(self) -> Any:
        raise TypeError("this value does not serialise")


def test_an_unserialisable_value_is_refused(backend: Backend) -> None:
    with backend.open() as saver:
        config = put(saver, at("thread"), {"a": 1})
        for call in (
            lambda: saver.put_writes(config, [("a", 1), ("b", Unserialisable())], "task"),
            lambda: put(saver, config, {"a": 2, "b": Unserialisable()}),
            lambda: put(saver, config, {"a": 2}, note=Unserialisable()),
            lambda: asyncio.run(saver.aput_writes(config, [("b", Unserialisable())], "task")),
        ):
            with pytest.raises(TypeError):
                call()
        # Neither a part of them is stored, nor does the failure stand in the way of what comes next.
        assert saver.get_tuple(at("thread")).pending_writes == []
        assert listed(saver, at("thread")) == [config["configurable"]["checkpoint_id"]]
        saver.put_writes(config, [("a", 1)], "task")
        assert saver.get_tuple(at("thread")).pending_writes == [("task", "a", 1)]


def test_an_unserialisable_value_does_not_hurt_those_it_shares_a_commit_with(backend: Backend) -> None:
    with backend.open() as saver, ThreadPoolExecutor(16) as pool:
        config = put(saver, at("thread"), {"a": 1})
        together = threading.Barrier(16)

        def write(number: int) -> bool:
            together.wait()
            value = Unserialisable() if number % 4 == 0 else number
            try:
                saver.put_writes(config, [("a", value)], f"task-{number:02}")
            except TypeError:
                return False
            return True

        stored = list(pool.map(write, range(16)))
        assert stored == [number % 4 != 0 for number in range(16)]
        expected = [(f"task-{number:02}", "a", number) for number in range(16) if number % 4]
        assert saver.get_tuple(at("thread")).pending_writes == expected


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("s4://bucket/prefix", "s3"),
        ("flie:///tmp/x", "file"),
        ("gcs://bucket", "gs"),
        ("postgresql://localhost/db", "memory"),
        ("/tmp/checkpoints", "file"),
        ("", "file"),
        ("s3://", "bucket"),
        ("file://relative/path", "file:///"),
    ],
)
def test_an_address_without_a_storage(url: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        LSMSaver.from_conn_string(url)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"compresion": "zstd"}, "compression"),
        ({"cache_size": 1}, "cache_bytes"),
        ({"store_option": {}}, "store_options"),
        ({"Fsync": True}, "fsync"),
    ],
)
def test_an_unknown_option_names_the_close_ones(options: dict[str, Any], hint: str) -> None:
    with pytest.raises((ValueError, TypeError), match=hint):
        LSMSaver.from_conn_string("memory://", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zip"},
        {"compaction": "on"},
        {"concurrent_runs": "queue"},
        {"cache_bytes": -1},
        {"cache_bytes": "256"},
        {"store_options": {"region": "x"}},  # a store in memory has none
    ],
    ids=repr,
)
def test_an_option_with_a_value_it_cannot_have(options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        LSMSaver.from_conn_string("memory://", **options)


def test_an_unknown_store_option(s3: S3) -> None:
    with (
        pytest.raises((ValueError, TypeError, LSMError), match="aws_regio"),
        LSMSaver.from_conn_string(s3.url(), store_options={**s3.store_options, "aws_regio": "eu-central-1"}) as saver,
    ):
        saver.setup()


def test_a_store_that_is_no_obstore_store(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="from_conn_string"):
        LSMSaver(str(tmp_path))


def test_a_ready_store_is_used_as_it_is(s3: S3) -> None:
    prefix = s3.url().rpartition("/")[2]
    store = obstore.store.S3Store(s3.bucket, **s3.store_options)
    with (
        LSMSaver(store, prefix) as saver,
        LSMSaver.from_conn_string(s3.url(prefix), store_options=s3.store_options) as other,
    ):
        put(saver, at("thread"), {"a": 1})
        assert other.get_tuple(at("thread")).checkpoint["channel_values"] == {"a": 1}


UNREACHABLE: list[Callable[[LSMSaver], Any]] = [
    lambda saver: saver.setup(),
    lambda saver: put(saver, at("thread"), {"a": 1}),
    lambda saver: saver.put_writes(at("thread", "1"), [("a", 1)], "task"),
    lambda saver: asyncio.run(saver.aput(at("thread"), checkpoint({"a": 1}), {}, {"a": 1})),
]
reached_by = pytest.mark.parametrize("call", UNREACHABLE, ids=["setup", "put", "put_writes", "aput"])


@reached_by
def test_a_missing_bucket(s3: S3, call: Callable[[LSMSaver], Any]) -> None:
    saver = LSMSaver.from_conn_string("s3://no-such-bucket/prefix", store_options=s3.store_options)
    with pytest.raises(LSMError, match="no-such-bucket"):
        call(saver)
    saver.close()


def test_a_missing_bucket_is_no_empty_store(s3: S3) -> None:
    with LSMSaver.from_conn_string("s3://no-such-bucket/prefix", store_options=s3.store_options) as saver:
        for read in (lambda: saver.get_tuple(at("thread")), lambda: list(saver.list(None))):
            with pytest.raises(LSMError, match="no-such-bucket"):
                read()


def test_wrong_credentials() -> None:
    with moto_server(check_credentials=True) as server:
        bucket = server.make_bucket("private")
        with LSMSaver.from_conn_string(f"s3://{bucket}/prefix", store_options=server.store_options) as saver:
            for call in [
                *UNREACHABLE,
                lambda saver: saver.get_tuple(at("thread")),
                lambda saver: list(saver.list(None)),
            ]:
                with pytest.raises(LSMError, match=r"(?i)credential|permission|denied|access"):
                    call(saver)


@reached_by
def test_a_store_that_ignores_conditional_writes(s3: S3, call: Callable[[LSMSaver], Any]) -> None:
    with S3Proxy(s3.server.endpoint) as proxy:
        proxy.rules.append(Rule(Fault.IGNORE_CONDITION))
        url = s3.url()
        with LSMSaver.from_conn_string(url, store_options=store_options(proxy.endpoint)) as saver:
            with pytest.raises(ConditionalWritesUnsupported, match="condition"):
                call(saver)
            with pytest.raises(ConditionalWritesUnsupported):
                call(saver)  # it is not asked once and then forgotten
    with LSMSaver.from_conn_string(url, store_options=s3.store_options) as honest:
        assert listed(honest, None) == []


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("not a directory")
    with LSMSaver.from_conn_string((tmp_path / "taken").as_uri()) as saver, pytest.raises(LSMError, match="taken"):
        put(saver, at("thread"), {"a": 1})
    assert (tmp_path / "taken").read_text() == "not a directory"
