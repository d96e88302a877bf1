"""The serialiser is the user's: whatever it is, values come back as it made them, and nothing else touches them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from langgraph.checkpoint.lsm import LSMSaver
from tests.conftest import S3, Backend
from tests.support.checkpoints import at, listed, put
from tests.support.moto import store_options
from tests.support.proxy import S3Proxy


class JsonOnly:
    """A serialiser with a type name of its own, that knows JSON and nothing else."""

    def dumps_typed(self, value: Any) -> tuple[str, bytes]:
        return "my-json", json.dumps(value).encode()

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        kind, body = data
        assert kind == "my-json"
        return json.loads(body)


class Turned:
    """Not a cipher to trust, but one that leaves nothing readable."""

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "turned", bytes(byte ^ 0xA5 for byte in plaintext)

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        assert ciphername == "turned"
        return bytes(byte ^ 0xA5 for byte in ciphertext)


@dataclass
class Mine:
    """A type that LangGraph's strict mode does not know."""

    name: str


def round_trip(backend: Backend, serde: Any, value: Any) -> Any:
    with backend.open(serde=serde) as saver:
        config = put(saver, at("thread"), {"a": value}, note="in the metadata")
        saver.put_writes(config, [("a", value)], "task")
        saver.flush("thread")
        saver.put_writes(config, [("b", value)], "task-2")
    with backend.open(serde=serde) as saver:
        found = saver.get_tuple(at("thread"))
        assert found.metadata["note"] == "in the metadata"
        assert [found.checkpoint["id"]] == listed(saver, at("thread"), filter={"note": "in the metadata"})
        values = [found.checkpoint["channel_values"]["a"], *(value for _, _, value in found.pending_writes)]
        assert values == [values[0]] * 3
        return values[0]


@pytest.mark.parametrize("value", [None, "", {"nested": [1, 2.5, None, "é"]}, "x" * 300_000], ids=str)
def test_a_serialiser_of_ones_own(backend: Backend, value: Any) -> None:
    assert round_trip(backend, JsonOnly(), value) == value


@pytest.mark.parametrize("value", [None, b"", b"bytes", bytearray(b"array"), "", {"a": {1, 2}}, 0.1, -0.0], ids=repr)
def test_values_of_the_default_serialiser(backend: Backend, value: Any) -> None:
    assert repr(round_trip(backend, None, value)) == repr(value)


def test_nothing_readable_is_stored_under_an_encrypting_serialiser(tmp_path: Path) -> None:
    backend = Backend("file", (tmp_path / "store").as_uri(), {"compression": "none"})
    secret = "a value that nobody may read " * 20
    assert round_trip(backend, EncryptedSerializer(Turned()), secret) == secret
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"a value that nobody may read" not in stored
    assert b"in the metadata" not in stored
    with backend.open(serde=None) as saver, pytest.raises((ValueError, TypeError, NotImplementedError)):
        saver.get_tuple(at("thread"))


def test_strict_msgpack_and_the_allowlist_of_a_clone() -> None:
    with LSMSaver.from_conn_string("memory://", serde=JsonPlusSerializer(allowed_msgpack_modules=None)) as saver:
        put(saver, at("thread"), {"a": Mine("x")})
        clone = saver.with_allowlist([(Mine.__module__, Mine.__name__)])
        assert clone.get_tuple(at("thread")).checkpoint["channel_values"] == {"a": Mine("x")}
        assert not isinstance(saver.get_tuple(at("thread")).checkpoint["channel_values"].get("a"), Mine)


@pytest.fixture
def strict(s3: S3) -> Iterator[tuple[S3Proxy, LSMSaver, LSMSaver]]:
    """A proxy, a saver behind it, and a clone of that."""
    with S3Proxy(s3.server.endpoint) as proxy:
        serde = JsonPlusSerializer(allowed_msgpack_modules=None)
        options = store_options(proxy.endpoint)
        with LSMSaver.from_conn_string(s3.url(), serde=serde, store_options=options) as saver:
            saver.setup()
            yield proxy, saver, saver.with_allowlist([(Mine.__module__, Mine.__name__)])


def test_a_clone_shares_the_cache(strict: tuple[S3Proxy, LSMSaver, LSMSaver]) -> None:
    proxy, saver, clone = strict
    assert clone is not saver
    config = put(saver, at("thread"), {"text": "x" * 1000})
    saver.get_tuple(config)
    proxy.clear()
    assert clone.get_tuple(config).checkpoint["channel_values"] == {"text": "x" * 1000}
    assert [request.status for request in proxy.requests] == [304]  # it knows all but whether that is still so


async def test_a_clone_shares_the_commits(strict: tuple[S3Proxy, LSMSaver, LSMSaver]) -> None:
    proxy, saver, clone = strict
    config = put(saver, at("thread"), {"a": 1})
    proxy.clear()
    proxy.delay = 0.1

    def commits() -> int:
        return sum(request.conditional_write for request in list(proxy.requests))

    first = asyncio.create_task(saver.aput_writes(config, [("a", 0)], "task-0"))
    while not commits():  # noqa: ASYNC110 (counted in the proxy's thread: there is nothing to wait for)
        await asyncio.sleep(0.001)
    both = [one.aput_writes(config, [("a", n)], f"task-{n}") for n, one in enumerate([saver, clone] * 4, start=1)]
    await asyncio.gather(first, *both)
    assert commits() == 2  # who came while the first was under way shares the second


def test_clones_write_side_by_side(backend: Backend) -> None:
    serde = JsonPlusSerializer(allowed_msgpack_modules=None)
    with backend.open(serde=serde) as saver, ThreadPoolExecutor(4) as pool:
        clone = saver.with_allowlist([(Mine.__module__, Mine.__name__)])
        config = put(saver, at("thread"), {"a": 1})

        def write(number: int) -> None:
            (saver, clone)[number % 2].put_writes(config, [("a", number)], f"task-{number:02}")

        list(pool.map(write, range(20)))
        expected = [(f"task-{number:02}", "a", number) for number in range(20)]
        assert saver.get_tuple(config).pending_writes == clone.get_tuple(config).pending_writes == expected
