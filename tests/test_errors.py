"""What is raised: it survives being copied, as it is for every caller of a batch, and sent to another process."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

import langgraph.checkpoint.lsm
import lsm
from lsm.errors import ConcurrentRunError, LSMError, StorageError
from lsm.fetch import SegmentGone
from lsm.find import latest
from lsm.format.segment import Index, SegmentInfo
from lsm.steps import Steps
from tests.conftest import Backend
from tests.support.checkpoints import at, checkpoint, put

for package in (lsm, langgraph.checkpoint.lsm):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def classes(base: type[LSMError] = LSMError) -> Iterator[type[LSMError]]:
    """All that derive from a class, and itself."""
    yield base
    for kind in base.__subclasses__():
        yield from classes(kind)


def made(kind: type[LSMError]) -> LSMError:
    """An error as it is raised."""
    error: LSMError
    if issubclass(kind, ConcurrentRunError):
        error = kind("thread", "child:1", "1ef", None)
    elif issubclass(kind, SegmentGone):
        error = kind(SegmentInfo(3, "01JB", 900, 1, 5, 2, 4, 600, 0, b"", b"", Index((), ()), Index((), ())))
    elif issubclass(kind, StorageError):
        error = kind("the store is busy", "manifests/00/thread")
    else:
        error = kind("thread 'thread': what happened; what to do")
    error.add_note("with a note")
    return error


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {number}": lambda each, number=number: pickle.loads(pickle.dumps(each, number)) for number in range(6)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", dict.fromkeys(classes()), ids=lambda kind: kind.__name__)
def test_every_error_survives_a_copy(kind: type[LSMError], way: str) -> None:
    error = made(kind)
    again = WAYS[way](error)
    assert type(again) is kind
    assert again is not error
    assert (str(again), again.args) == (str(error), error.args)
    assert vars(again) == vars(error)
    assert again.__notes__ == ["with a note"]


@pytest.mark.parametrize("outdated", [False, True])
@pytest.mark.parametrize("backend", ["memory", "file"], indirect=True)
def test_a_segment_that_has_gone_meanwhile_is_no_answer_to_a_commit(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, outdated: bool
) -> None:
    """Whether a run may go on is looked up in segments: where these have gone, the manifest is looked at again."""
    options: dict[str, Any] = {"compaction": "off", "cache_bytes": 0}
    with backend.open(concurrent_runs="refuse", **options) as saver, backend.open(**options) as other:
        heads = [put(saver, at("thread", namespace=f"child:{number}"), {"text": "x" * 50}) for number in range(300)]
        saver.flush("thread")
        gone: list[SegmentGone] = []

        def looked_up(*args: Any) -> Steps[Any]:
            if not gone:
                if outdated:
                    put(other, heads[0], {"text": "of another run"})
                other.flush("thread")
                other.compact("thread")
                other._runtime.run(other._engine.collect(0))
            try:
                return (yield from latest(*args))
            except SegmentGone as error:
                gone.append(error)
                raise

        monkeypatch.setattr("lsm.commit.latest", looked_up)
        new = checkpoint({"text": "later"})
        with pytest.raises(ConcurrentRunError) if outdated else nullcontext():
            saver.put(heads[0], new, {"source": "loop", "step": 1, "parents": {}}, new["channel_versions"])
        assert len(gone) == 1
        assert (saver.get_tuple(at("thread", new["id"], "child:0")) is None) is outdated
