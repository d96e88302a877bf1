"""Addresses: what they open, and what is said of those that make no sense."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from lsm.errors import ConditionalWritesUnsupported
from lsm.steps import Create, Get
from lsm.storage import open_storage
from lsm.storage.objects import ObjectStorage
from tests.support import processes


def test_file_with_escapes(tmp_path: Path) -> None:
    folder = tmp_path / "ä b%20c"
    storage = open_storage(folder.as_uri())
    storage.execute(Create("x", b"1"))
    assert (folder / "x").read_bytes() == b"1"
    assert storage.url == folder.as_uri()


def test_opening_makes_nothing(tmp_path: Path) -> None:
    storage = open_storage((tmp_path / "root").as_uri())
    assert storage.execute(Get("lsm.json")) is None
    assert list(tmp_path.iterdir()) == []


def test_memory_is_private_or_shared_by_name() -> None:
    open_storage("memory://").execute(Create("x", b"1"))
    assert open_storage("memory://").execute(Get("x")) is None
    open_storage("memory://test-open/shared").execute(Create("x", b"1"))
    assert open_storage("memory://test-open/shared").execute(Get("x")).body == b"1"
    assert open_storage("memory://test-open").execute(Get("x")) is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("fil:///x", "file://"),
        ("s4://bucket", "s3://"),
        ("gcs://bucket", "gs://"),
        ("/just/a/path", "no scheme"),
        ("postgres://x", "Known are file://"),
        ("file://relative/path", "file:///relative/path"),
        ("file://", "file:///directory"),
        ("s3://", "s3://bucket/prefix"),
        ("s3:///prefix", "s3://bucket/prefix"),
        ("s3://bucket/prefix?region=eu", "store_options"),
    ],
)
def test_addresses_that_make_no_sense(url: str, said: str) -> None:
    with pytest.raises(ValueError, match="://") as caught:
        open_storage(url)
    assert said in str(caught.value)


def test_options_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="regoin"):
        open_storage("s3://bucket", store_options={"regoin": "eu"})
    with pytest.raises(ValueError, match="store_options"):
        open_storage("memory://", store_options={"region": "eu"})


def test_file_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConditionalWritesUnsupported, match="Linux and macOS"):
        open_storage("file:///C:/store")


def test_pickling(tmp_path: Path) -> None:
    uri = (tmp_path / "root").as_uri()
    assert pickle.loads(pickle.dumps(open_storage(uri))).url == uri
    options = {"region": "eu-west-1", "access_key_id": "k", "secret_access_key": "s"}
    copy = pickle.loads(pickle.dumps(open_storage("s3://bucket/prefix", store_options=options)))
    assert copy.url == "s3://bucket/prefix"
    assert copy._store.config["region"] == "eu-west-1"
    ready = pickle.loads(pickle.dumps(ObjectStorage(copy._store, "below")))
    assert ready._path("key") == "below/key"


def test_memory_is_pickled_within_its_process_only() -> None:
    with pytest.raises(TypeError, match="memory://name"):
        pickle.dumps(open_storage("memory://"))
    shared = open_storage("memory://test-pickling")
    pickled = pickle.dumps(shared)
    assert pickle.loads(pickled) is shared
    script = (
        "import pickle\ntry:\n    pickle.loads(bytes.fromhex(ARGS['it']))\nexcept TypeError as error:\n    print(error)"
    )
    assert "lives in the process" in processes.run(script, {"it": pickled.hex()})
