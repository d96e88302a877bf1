"""What was uploaded and is not named yet: a collector may take it, whatever its grace, and its writer learns that.

The collector raises the fence in the manifest first. So what is uploaded for a thread is uploaded once the thread has a
manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from langgraph.checkpoint.lsm import LSMSaver
from lsm.drive import run
from lsm.engine import Engine
from lsm.steps import Create
from lsm.storage.memory import MemoryStorage
from tests.support.checkpoints import at, put


class Recording(MemoryStorage):
    """Notes in which order keys are written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def execute(self, request: Any) -> Any:
        answer = super().execute(request)
        if hasattr(request, "body"):
            self.written.append(request.key)
        return answer


def assert_manifest_first(written: list[str], thread_id: str) -> None:
    segments = [number for number, key in enumerate(written) if key.startswith("segments/") and f"/{thread_id}/" in key]
    manifests = [number for number, key in enumerate(written) if key.startswith("manifests/") and thread_id in key]
    assert segments
    assert manifests[0] < segments[0]


def test_the_first_large_commit_of_a_thread() -> None:
    storage = Recording()
    with LSMSaver.from_storage(storage, compaction="off") as saver:
        put(saver, at("thread"), {"text": "".join(map(str, range(20_000)))})
        assert_manifest_first(storage.written, "thread")


def test_a_copy_into_a_new_thread() -> None:
    storage = Recording()
    with LSMSaver.from_storage(storage, compaction="off") as saver:
        put(saver, at("source"), {"text": "hello"})
        saver.copy_thread("source", "target")
        assert_manifest_first(storage.written, "target")
        assert saver.get_tuple(at("target")).checkpoint["channel_values"] == {"text": "hello"}


class Meanwhile(MemoryStorage):
    """Has something happen once, just after a segment was uploaded."""

    def __init__(self) -> None:
        super().__init__()
        self.what: Callable[[], None] | None = None

    def execute(self, request: Any) -> Any:
        answer = super().execute(request)
        if self.what is not None and isinstance(request, Create) and request.key.startswith("segments/"):
            what, self.what = self.what, None
            what()
        return answer


def collected(storage: MemoryStorage) -> Callable[[], None]:
    """Another process, which collects without any grace."""

    def collect() -> None:
        found = run(Engine(storage.url, storage.appends, os.urandom).collect(0.0), storage)
        assert found.objects == 1, "the upload is garbage by then"

    return collect


LARGE = "".join(map(str, range(20_000)))


def test_a_value_that_is_collected_before_its_commit_is_uploaded_anew() -> None:
    storage = Meanwhile()
    with LSMSaver.from_storage(storage, compaction="off") as saver:
        config = put(saver, at("thread"), {"text": "first"})
        storage.what = collected(storage)
        put(saver, config, {"text": LARGE})
        assert storage.what is None
    with LSMSaver.from_storage(storage) as other:
        assert other.get_tuple(at("thread")).checkpoint["channel_values"] == {"text": LARGE}


def test_a_flush_that_is_collected_before_it_lands_is_made_anew() -> None:
    storage = Meanwhile()
    with LSMSaver.from_storage(storage, compaction="off") as saver:
        put(saver, at("thread"), {"text": "first"})
        storage.what = collected(storage)
        run(saver._engine.flush("thread"), storage)
        assert storage.what is None
    with LSMSaver.from_storage(storage) as other:
        assert other.get_tuple(at("thread")).checkpoint["channel_values"] == {"text": "first"}


def test_a_rewrite_that_is_collected_before_its_swap_begins_again() -> None:
    storage = Meanwhile()
    with LSMSaver.from_storage(storage, compaction="off") as saver:
        config = at("thread")
        for number in range(3):
            config = put(saver, config, {"text": f"{number} {LARGE}"})
            run(saver._engine.flush("thread"), storage)
        storage.what = collected(storage)
        run(saver._engine.compact("thread"), storage)
        assert storage.what is None
    with LSMSaver.from_storage(storage) as other:
        assert [each.checkpoint["channel_values"]["text"][:2] for each in other.list(at("thread"))] == [
            "2 ",
            "1 ",
            "0 ",
        ]


def test_a_copy_that_is_collected_before_its_graft_begins_again() -> None:
    storage = Meanwhile()
    with LSMSaver.from_storage(storage, compaction="off") as saver:
        put(saver, at("source"), {"text": "hello"})
        run(saver._engine.flush("source"), storage)
        storage.what = collected(storage)
        saver.copy_thread("source", "target")
        assert storage.what is None
    with LSMSaver.from_storage(storage) as other:
        assert other.get_tuple(at("target")).checkpoint["channel_values"] == {"text": "hello"}
