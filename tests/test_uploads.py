"""What is uploaded for a thread is uploaded once the thread has a manifest.

The collector fences off late commits by changing the manifest that they are conditional on. Without one, a commit that
is under way for longer than the grace would name a segment that has been collected.
"""

from __future__ import annotations

from typing import Any

from langgraph.checkpoint.lsm import LSMSaver
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
