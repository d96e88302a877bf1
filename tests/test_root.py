"""The proof of a root: stores that keep their promises, and stores that do not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from obstore.store import LocalStore

from langgraph.checkpoint.lsm import LSMSaver
from lsm.drive import run
from lsm.errors import (
    ConditionalWritesUnsupported,
    CorruptionError,
    FormatVersionError,
    Throttled,
    Unavailable,
)
from lsm.format.names import manifest_key
from lsm.root import verify_root
from lsm.steps import All, Create, Delete, Enclosing, Entry, Get, List, Now, Steps
from lsm.storage import Storage, open_storage
from lsm.storage.objects import ObjectStorage
from lsm.walk import delete_all
from tests.conftest import Backend
from tests.support.checkpoints import at, put
from tests.support.moto import store_options
from tests.support.proxy import Answer, Fault, Request, Rule, S3Proxy


@pytest.fixture(params=["memory", "file", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Any) -> Storage:
    if request.param == "s3":
        s3 = request.getfixturevalue("s3")
        return open_storage(s3.url(), store_options=s3.store_options)
    return open_storage("memory://" if request.param == "memory" else (tmp_path / "root").as_uri())


@pytest.fixture
def proxy(s3: Any) -> Iterator[S3Proxy]:
    with S3Proxy(s3.server.endpoint) as running:
        yield running


def through(proxy: S3Proxy, url: str) -> Storage:
    return open_storage(url, store_options={**store_options(proxy.endpoint), "retry_config": {"max_retries": 2}})


def stored(storage: Storage) -> list[str]:
    return [entry.key for folder in ("", "probe/") for entry in storage.execute(List(folder)).entries]


def test_a_new_root(storage: Storage) -> None:
    run(verify_root(storage.url, os.urandom), storage)
    content = json.loads(storage.execute(Get("lsm.json")).body)
    assert content["format"] == 1
    assert content["conditional_writes"] == "verified"
    assert content["created_by"].startswith("langgraph-checkpoint-lsm/")
    assert stored(storage) == ["lsm.json"]


def test_a_known_root_is_one_request(s3: Any, proxy: S3Proxy) -> None:
    storage = through(proxy, s3.url())
    run(verify_root(storage.url, os.urandom), storage)
    proxy.clear()
    run(verify_root(storage.url, os.urandom), storage)
    assert [(each.method, each.status) for each in proxy.requests] == [("GET", 200)]


def conditional(request: Request, header: str) -> bool:
    return request.method == "PUT" and header in request.headers


@pytest.mark.parametrize("ignored", ["if-match", "if-none-match"])
def test_a_store_that_ignores_a_condition(s3: Any, proxy: S3Proxy, ignored: str) -> None:
    storage = through(proxy, s3.url())
    proxy.rules.append(Rule(Fault.IGNORE_CONDITION, when=lambda request: conditional(request, ignored)))
    with pytest.raises(ConditionalWritesUnsupported, match=f"{storage.url}: the store accepted a"):
        run(verify_root(storage.url, os.urandom), storage)
    assert stored(storage) == []


def test_a_store_that_refuses_every_condition(s3: Any, proxy: S3Proxy) -> None:
    storage = through(proxy, s3.url())
    proxy.rules.append(Rule(Answer(412, "PreconditionFailed"), when=lambda request: conditional(request, "if-match")))
    with pytest.raises(ConditionalWritesUnsupported, match="right ETag"):
        run(verify_root(storage.url, os.urandom), storage)
    assert stored(storage) == []


def test_a_store_that_knows_no_conditions(s3: Any, proxy: S3Proxy) -> None:
    storage = through(proxy, s3.url())
    proxy.rules.append(Rule(Answer(501, "NotImplemented"), when=lambda request: conditional(request, "if-match")))
    with pytest.raises(ConditionalWritesUnsupported, match="no conditional writes"):
        run(verify_root(storage.url, os.urandom), storage)
    assert stored(storage) == []


def test_a_ready_local_store_is_told_of_file_urls(tmp_path: Any) -> None:
    storage = ObjectStorage(LocalStore(tmp_path))
    with pytest.raises(ConditionalWritesUnsupported, match="file:///directory"):
        run(verify_root(storage.url, os.urandom), storage)
    assert not list(tmp_path.glob("lsm.json"))


@pytest.mark.parametrize("lost", range(1, 7))
def test_lost_answers_do_not_fool_it(s3: Any, proxy: S3Proxy, lost: int) -> None:
    """Each of the writes in turn is done although its answer is lost, and meets itself when it is sent again."""
    storage = through(proxy, s3.url())
    proxy.rules.append(Rule(Fault.LOSE_ANSWER, when=lambda request: request.method == "PUT", every=lost, times=1))
    run(verify_root(storage.url, os.urandom), storage)
    assert proxy.rules[0].applied == 1
    assert stored(storage) == ["lsm.json"]


def test_a_throttled_probe_is_patient() -> None:
    """GCS allows one write a second to a name; the probe makes more than that."""
    steps = verify_root("test://", os.urandom)
    request = next(steps)
    assert request == Get("lsm.json")
    assert isinstance(steps.send(None), Enclosing)
    assert steps.send(None) == Now()
    first = steps.send(0.0).of[0]
    create = next(first)
    assert isinstance(create, Create)
    pause = first.throw(Throttled("slow down"))
    assert pause.seconds > 0
    assert first.send(None) == create
    with pytest.raises(StopIteration) as stop:
        first.send("tag")
    assert stop.value.value == "tag"


def test_somebody_else_is_first(storage: Storage) -> None:
    steps = verify_root(storage.url, os.urandom)
    answer = storage.execute(next(steps))
    assert answer is None
    run(verify_root(storage.url, os.urandom), storage)  # meanwhile
    run(resumed(steps, answer), storage)
    assert stored(storage) == ["lsm.json"]


def resumed(steps: Steps[None], answer: Any) -> Steps[None]:
    """Steps that have been begun, from the answer to their last request on."""
    request = steps.send(answer)
    with contextlib.suppress(StopIteration):
        while True:
            request = steps.send((yield request))


def test_a_store_is_not_blamed_for_what_a_collector_removed(storage: Storage) -> None:
    """The probe was delayed for so long that its objects were taken for garbage, between its requests."""

    def delayed(steps: Steps[None]) -> Steps[None]:
        request, asked, clock = next(steps), 0, 0.0
        with contextlib.suppress(StopIteration):
            while True:
                if isinstance(request, Now):
                    request = steps.send(clock)
                    continue
                asked += isinstance(request, All)
                if asked == 2:
                    storage.execute(Delete([key for key in stored(storage) if key.startswith("probe/")]))
                    clock = 4000.0
                request = steps.send((yield request))

    with pytest.raises(Unavailable, match="proves nothing"):
        run(delayed(verify_root(storage.url, os.urandom)), storage)
    run(verify_root(storage.url, os.urandom), storage)
    assert stored(storage) == ["lsm.json"]


def test_a_failing_store_is_not_a_wrong_one(s3: Any, proxy: S3Proxy) -> None:
    storage = through(proxy, s3.url())
    proxy.rules.append(Rule(Answer(500, "InternalError"), when=lambda request: conditional(request, "if-match")))
    with pytest.raises(Unavailable):
        run(verify_root(storage.url, os.urandom), storage)
    assert stored(storage) == []
    proxy.rules.clear()
    run(verify_root(storage.url, os.urandom), storage)


def test_a_newer_root(storage: Storage) -> None:
    newer = {"format": 2, "conditional_writes": "verified", "created_by": "langgraph-checkpoint-lsm/9.0"}
    storage.execute(Create("lsm.json", json.dumps(newer).encode()))
    with pytest.raises(FormatVersionError, match=r"format 2, written by langgraph-checkpoint-lsm/9\.0.* format 1\b"):
        run(verify_root(storage.url, os.urandom), storage)


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff", b"[]", b"{}", b"null", b'{"format": "1", "conditional_writes": "verified"}', b'{"format": 1}'],
)
def test_a_damaged_root(body: bytes) -> None:
    storage = open_storage("memory://")
    storage.execute(Create("lsm.json", body))
    with pytest.raises(CorruptionError, match=r"lsm\.json"):
        run(verify_root(storage.url, os.urandom), storage)


def vanish(backend: Backend, saver: LSMSaver) -> None:
    """Remove all that a store consists of, its root folder included."""
    if backend.name == "file":
        shutil.rmtree(saver._storage._root)
    else:
        entries = saver._runtime.run(everything())
        assert {entry.key for entry in entries} >= {"lsm.json"}
        saver._runtime.run(delete_all([entry.key for entry in entries]))


def everything() -> Steps[list[Entry]]:
    return list((yield List("")).entries)


@pytest.mark.parametrize("known", [True, False], ids=["a thread that is at hand", "a thread that is new"])
def test_a_root_that_vanished_under_a_live_process_is_written_anew(backend: Backend, known: bool) -> None:
    with backend.open(compaction="off") as saver, backend.open() as other:
        put(saver, at("thread"), {"a": 1})
        vanish(backend, saver)
        name = "thread" if known else "another"
        put(saver, at(name), {"a": 2})
        keys = [entry.key for entry in saver._runtime.run(everything())]
        assert sorted(keys) == ["lsm.json", manifest_key(name)]
        assert [found.checkpoint["channel_values"] for found in other.list(None)] == [{"a": 2}]
