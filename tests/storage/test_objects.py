"""What is particular to object stores: failures and what is said of them, time limits, forks, uploads."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore

from langgraph.checkpoint.lsm import LSMSaver
from lsm import errors
from lsm.steps import (
    AbortUpload,
    Append,
    Create,
    Delete,
    FinishUpload,
    Get,
    GetRanges,
    List,
    OpenUpload,
    PutIf,
    UploadPart,
)
from lsm.storage import objects, open_storage
from lsm.storage.objects import ObjectStorage, ObjectTag
from tests.support import processes
from tests.support.checkpoints import chain
from tests.support.moto import moto_server, store_options
from tests.support.proxy import Answer, Fault, Rule, S3Proxy

TAG = ObjectTag('"0"')
REQUESTS = [
    Get("k"),
    GetRanges("k", [(0, 1)]),
    Create("k", b"x"),
    PutIf("k", b"x", TAG),
    Append("k", [b"x"], b"y", TAG),
    Delete(["k", "l"]),
    List("m/"),
]


@pytest.fixture
def proxy(s3: Any) -> Iterator[S3Proxy]:
    with S3Proxy(s3.server.endpoint) as running:
        yield running


def connect(endpoint: str, url: str, *, retries: int = 0, timeout: str = "10s") -> ObjectStorage:
    options = store_options(endpoint)
    options["client_options"] = {"allow_http": True, "timeout": timeout}
    options["retry_config"] = {"max_retries": retries}
    storage = open_storage(url, store_options=options)
    assert isinstance(storage, ObjectStorage)
    return storage


def failure(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(errors.LSMError) as caught:
        call()
    return caught.value


def both_failures(storage: ObjectStorage, request: Any) -> list[BaseException]:
    async def ask() -> Any:
        return await storage.aexecute(request)

    return [failure(lambda: storage.execute(request)), failure(lambda: asyncio.run(ask()))]


def test_a_store_that_cannot_list_from_the_middle_is_listed_in_pages(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = connect(s3.server.endpoint, s3.url())
    keys = [f"m/{number}" for number in range(8)]
    for key in keys:
        storage.execute(Create(key, b""))
    really_list = obstore.list

    def from_the_start(store: Any, *, offset: str | None, **rest: Any) -> Any:
        return really_list(store, **rest)

    monkeypatch.setattr(obstore, "list", from_the_start)
    monkeypatch.setattr(objects, "PAGE", 3)

    async def alisted(after: str | None) -> Any:
        return await storage.aexecute(List("m/", after))

    for ask in (lambda after: storage.execute(List("m/", after)), lambda after: asyncio.run(alisted(after))):
        listed: list[str] = []
        more = True
        while more:
            page = ask(listed[-1] if listed else None)
            listed += [entry.key for entry in page.entries]
            more = page.more
        assert listed == keys


def test_a_tag_is_the_same_with_and_without_quotation_marks() -> None:
    listed, answered = ObjectTag("0x8D"), ObjectTag('"0x8D"', "version")
    assert listed == answered
    assert hash(listed) == hash(answered)
    assert repr(listed) == repr(answered)
    assert answered != ObjectTag('"0x8E"', "version")
    assert answered.condition() == {"e_tag": '"0x8D"', "version": "version"}


@pytest.mark.parametrize("request_", REQUESTS, ids=repr)
def test_a_missing_bucket_is_named(s3: Any, request_: Any) -> None:
    storage = connect(s3.server.endpoint, "s3://no-such-bucket/prefix")
    for error in both_failures(storage, request_):
        assert type(error) is errors.Refused
        assert "s3://no-such-bucket/prefix: the bucket does not exist" in str(error)


@pytest.mark.parametrize("request_", REQUESTS, ids=repr)
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answer(503, "SlowDown"), errors.Throttled),
        (Answer(429, "TooManyRequests"), errors.Throttled),
        (Answer(503, "InternalMaintenance"), errors.Unavailable),
        (Answer(500, "InternalError"), errors.Unavailable),
        (Answer(400, "ExpiredToken"), errors.Refused),
        (Answer(403, "AccessDenied"), errors.Refused),
        (Answer(401, "InvalidToken"), errors.Refused),
    ],
    ids=lambda each: str(getattr(each, "code", each.__class__.__name__)),
)
def test_what_answers_become(s3: Any, proxy: S3Proxy, answer: Answer, kind: type, request_: Any) -> None:
    url = s3.url()
    connect(s3.server.endpoint, url).execute(Create("k", b"x"))
    storage = connect(proxy.endpoint, url)
    proxy.rules.append(Rule(answer))
    for error in both_failures(storage, request_):
        assert type(error) is kind
        assert url in str(error)
        assert "\n" not in str(error)


def test_a_conflict_of_two_writes_under_way(s3: Any, proxy: S3Proxy) -> None:
    storage = connect(proxy.endpoint, s3.url())
    proxy.rules.append(Rule(Answer(409, "ConditionalRequestConflict")))
    for request in (Create("k", b"x"), PutIf("k", b"x", TAG), Append("k", [], b"x", TAG)):
        assert [type(error) for error in both_failures(storage, request)] == [errors.Throttled] * 2
    assert type(failure(lambda: storage.execute(Delete(["k", "l"])))) is errors.Unavailable


def test_a_store_that_says_it_has_no_conditions(s3: Any, proxy: S3Proxy) -> None:
    storage = connect(proxy.endpoint, s3.url())
    proxy.rules.append(Rule(Answer(501, "NotImplemented")))
    assert type(failure(lambda: storage.execute(Create("k", b"x")))) is errors.ConditionalWritesUnsupported
    assert type(failure(lambda: storage.execute(Get("k")))) is errors.Unavailable


@pytest.mark.parametrize("kind", [Get, Create, PutIf, Append])
@pytest.mark.parametrize("call", [ObjectStorage.execute, lambda *given: asyncio.run(ObjectStorage.aexecute(*given))])
def test_an_answer_without_an_etag_is_refused(s3: Any, proxy: S3Proxy, kind: type, call: Callable[..., Any]) -> None:
    """Of one was made a tag that says nothing, and of that a write that says `If-Match: ""`."""
    storage = connect(proxy.endpoint, s3.url())
    tag = storage.execute(Create("k", b"x"))
    requests: dict[type, Any] = {
        Get: Get("k"),
        Create: Create("new", b"x"),
        PutIf: PutIf("k", b"y", tag),
        Append: Append("k", [b"x"], b"y", tag),
    }
    proxy.rules.append(Rule(Fault.DROP_ETAG))
    error = failure(lambda: call(storage, requests[kind]))
    assert type(error) is errors.ConditionalWritesUnsupported
    assert f"the answer about {requests[kind].key} has no ETag" in str(error)


@pytest.mark.parametrize("etag", [None, "", '""'])
def test_no_answer_becomes_a_tag_that_says_nothing(s3: Any, etag: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = connect(s3.server.endpoint, s3.url())
    storage.execute(Create("m/k", b"x"))
    (page,) = obstore.list(storage._store, "m")
    monkeypatch.setattr(obstore, "put", lambda *_, **__: {"e_tag": etag, "version": "7"})
    monkeypatch.setattr(obstore, "list", lambda *_, **__: [[{**page[0], "e_tag": etag}]])
    for request in (PutIf("m/k", b"y", TAG), List("m/")):
        with pytest.raises(errors.ConditionalWritesUnsupported, match="about m/k has no ETag"):
            storage.execute(request)


@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_a_store_that_sends_no_etags_is_not_written_to(s3: Any, proxy: S3Proxy, method: str) -> None:
    """Where writes have none, the probe tells; where reads have none, there is nothing that could be written on."""
    url = s3.url()
    if method == "GET":
        with LSMSaver.from_conn_string(url, store_options=s3.store_options) as saver:
            chain(saver, "thread", [{"a": 1}])
    before = stored(url, s3.store_options)
    proxy.rules.append(Rule(Fault.DROP_ETAG, when=lambda request: request.method == method))
    with (
        LSMSaver.from_conn_string(url, store_options=store_options(proxy.endpoint)) as saver,
        pytest.raises(errors.ConditionalWritesUnsupported, match="has no ETag"),
    ):
        chain(saver, "thread", [{"a": 2}])
    assert stored(url, s3.store_options) == before
    assert '""' not in [each.headers.get("if-match") for each in proxy.requests]


def stored(url: str, options: dict[str, Any]) -> list[Any]:
    """Names and tags of all that is stored at an address."""
    entries: list[Any] = open_storage(url, store_options=options).execute(List("")).entries
    return entries


def test_a_lost_answer_is_a_conflict_with_oneself(s3: Any, proxy: S3Proxy) -> None:
    storage = connect(proxy.endpoint, s3.url(), retries=3)
    proxy.rules.append(Rule(Fault.LOSE_ANSWER, times=1))
    with pytest.raises(errors.Conflict):
        storage.execute(Create("k", b"x"))
    assert storage.execute(Get("k")).body == b"x"


def test_wrong_credentials() -> None:
    with moto_server(check_credentials=True) as server:
        storage = connect(server.endpoint, f"s3://{server.make_bucket('bucket-one')}/p")
        for request in (Get("k"), Create("k", b"x"), List("m/")):
            for error in both_failures(storage, request):
                assert type(error) is errors.Refused
                assert "credentials" in str(error)


@pytest.mark.parametrize("request_", REQUESTS, ids=repr)
def test_a_store_that_does_not_answer(request_: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        storage = connect(endpoint, "s3://bucket/p", timeout="100ms")
        assert {type(error) for error in both_failures(storage, request_)} == {errors.Unavailable}
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        storage = connect(f"http://127.0.0.1:{unheard.getsockname()[1]}", "s3://bucket/p")
        assert {type(error) for error in both_failures(storage, request_)} == {errors.Unavailable}


def test_time_limits_are_set_and_may_be_changed() -> None:
    storage = ObjectStorage.from_url("s3://bucket", {"region": "us-east-1", "client_options": {"timeout": "3s"}})
    assert storage._store.client_options == {"connect_timeout": "5s", "timeout": "3s"}
    assert storage._store.retry_config["max_retries"] == 5
    storage = ObjectStorage.from_url("s3://bucket", {"region": "us-east-1", "retry_config": {"max_retries": 1}})
    assert storage._store.client_options["timeout"] == "30s"
    assert storage._store.retry_config["max_retries"] == 1


def test_revalidation_moves_no_body(s3: Any, proxy: S3Proxy) -> None:
    storage = connect(proxy.endpoint, s3.url())
    tag = storage.execute(Create("k", b"x" * 100_000))
    proxy.clear()
    assert storage.execute(Get("k", unless=tag)) == "unchanged"
    assert [(each.method, each.status, each.bytes_out) for each in proxy.requests] == [("GET", 304, 0)]


def test_near_ranges_are_one_request(s3: Any, proxy: S3Proxy) -> None:
    storage = connect(proxy.endpoint, s3.url())
    storage.execute(Create("k", b"x" * 3_000_000))
    proxy.clear()
    storage.execute(GetRanges("k", [(2_900_000, 2_900_010), (10, 20), (0, 5), (500_000, 500_010)]))
    ranges = sorted(each.headers["range"] for each in proxy.requests)
    assert ranges == ["bytes=0-500009", "bytes=2900000-2900009"]


def test_deleting_many_is_one_request(s3: Any, proxy: S3Proxy) -> None:
    storage = connect(proxy.endpoint, s3.url())
    storage.execute(Delete([f"k{number}" for number in range(900)]))
    assert len(proxy.requests) == 1


def test_deleting_goes_on_past_what_is_gone(tmp_path: Path) -> None:
    storage = ObjectStorage(LocalStore(tmp_path))  # minds, as GCS and Azure do
    for key in ("a", "c"):
        storage.execute(Create(key, b"x"))
    storage.execute(Delete(["a", *(f"b{number}" for number in range(50)), "c"]))
    assert storage.execute(Get("c")) is None
    asyncio.run(storage.aexecute(Create("c", b"x")))
    asyncio.run(storage.aexecute(Delete([*(f"b{number}" for number in range(50)), "c"])))
    assert storage.execute(Get("c")) is None


@pytest.mark.parametrize("end", [AbortUpload, FinishUpload])
def test_no_upload_is_left_in_the_store(s3: Any, proxy: S3Proxy, end: type) -> None:
    async def upload(storage: ObjectStorage) -> None:
        handle = await storage.aexecute(OpenUpload("a"))
        await storage.aexecute(UploadPart(handle, b"x" * 20_000_000))
        await storage.aexecute(end(handle))

    storage = connect(proxy.endpoint, s3.url())
    handle = storage.execute(OpenUpload("s"))
    storage.execute(UploadPart(handle, b"x" * 20_000_000))
    storage.execute(end(handle))
    asyncio.run(upload(storage))
    assert len([each for each in proxy.requests if "uploads" in each.query]) == 2  # both had begun one
    request = urllib.request.Request(f"{s3.server.endpoint}/{s3.bucket}?uploads")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert b"<UploadId>" not in answer.read()


FORK = """
import os, signal, sys
from lsm.errors import ForkedProcessError
from lsm.steps import Create, Get
from lsm.storage import open_storage

made = open_storage(ARGS["url"], store_options=ARGS["options"])

def in_child(use):
    sys.stdout.flush()
    if not (child := os.fork()):
        signal.alarm(20)  # a child that hangs is killed
        use()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def use_it():
    print(made.execute(Get("k")))

def be_refused():
    for storage in (made, open_storage(ARGS["url"], store_options=ARGS["options"])):
        try:
            storage.execute(Get("k"))
        except ForkedProcessError as error:
            print("refused", "spawn" in str(error))

in_child(use_it)
in_child(use_it)
made.execute(Create("k", b"x"))
in_child(be_refused)
print(made.execute(Get("k")).body)
"""


def test_a_fork(s3: Any) -> None:
    printed = processes.run(FORK, {"url": s3.url(), "options": s3.store_options})
    assert printed.splitlines() == ["None", "None", "refused True", "refused True", "b'x'"]
