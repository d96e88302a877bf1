"""How threads end on stores that do not delete on a condition (S3): a commit that comes in between stays.

Every test interferes just before a request of the deletion is sent, or has its process die there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from lsm import removal
from lsm.errors import CommitTimeout, Unavailable
from lsm.stats import store_stats
from lsm.steps import Delete, PutIf
from lsm.verify import verify_store
from tests.support.checkpoints import at, put
from tests.support.plant import plant


@pytest.fixture
def savers(s3: Any) -> Iterator[tuple[LSMSaver, LSMSaver]]:
    url = s3.url()

    def opened() -> LSMSaver:
        return LSMSaver.from_conn_string(url, store_options=s3.store_options, compaction="off")

    with opened() as one, opened() as other:
        yield one, other


def before(saver: LSMSaver, kind: type, do: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Do something once, just before a saver sends a request of a kind. Answers what was sent until then."""
    execute, sent, done = saver._storage.execute, [], []

    def meddle(request: Any) -> Any:
        if isinstance(request, kind) and not done:
            done.append(request)
            do()
        sent.append(request)
        return execute(request)

    monkeypatch.setattr(saver._storage, "execute", meddle)
    return sent


def die() -> None:
    raise Unavailable("the process died")


def leave_tombstone(saver: LSMSaver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread whose deletion ends after it wrote the tombstone."""
    put(saver, at("thread"), {"a": 1})
    before(saver, Delete, die, monkeypatch)
    with pytest.raises(Unavailable):
        saver.delete_thread("thread")


def values(saver: LSMSaver) -> list[Any]:
    return [found.checkpoint["channel_values"] for found in saver.list(at("thread"))]


def test_a_commit_before_the_tombstone_is_deleted_by_a_deletion_that_has_seen_it(
    savers: tuple[LSMSaver, LSMSaver], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = savers
    config = put(one, at("thread"), {"a": 1})
    sent = before(one, PutIf, lambda: put(other, config, {"a": 2}) and None, monkeypatch)
    one.delete_thread("thread")
    assert [type(request) for request in sent].count(PutIf) == 2, "the first was made for the state before that commit"
    assert values(other) == values(one) == []


def test_a_commit_after_the_tombstone_waits_until_it_is_gone(
    savers: tuple[LSMSaver, LSMSaver], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = savers
    process = other._engine.process
    monkeypatch.setattr(process, "limits", replace(process.limits, commit_deadline=0.2))
    put(one, at("thread"), {"a": 1})

    def write() -> None:
        assert values(other) == [], "it has ended for readers"
        with pytest.raises(CommitTimeout, match="being deleted"):
            put(other, at("thread"), {"a": 2})

    before(one, Delete, write, monkeypatch)
    one.delete_thread("thread")
    put(other, at("thread"), {"a": 3})
    assert values(one) == values(other) == [{"a": 3}]


def test_a_tombstone_that_was_left_is_removed_by_who_has_seen_it_for_long(
    savers: tuple[LSMSaver, LSMSaver], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = savers
    process = other._engine.process
    monkeypatch.setattr(process, "limits", replace(process.limits, commit_deadline=0.2))
    leave_tombstone(one, monkeypatch)
    other.delete_thread("thread")  # it has ended already
    with pytest.raises(CommitTimeout, match="being deleted"):
        put(other, at("thread"), {"a": 2})
    monkeypatch.setattr(removal.clear, "__defaults__", (0.0,))
    put(other, at("thread"), {"a": 3})
    assert values(one) == values(other) == [{"a": 3}]


def test_a_tombstone_that_was_left_counts_for_nothing_and_is_collected(
    savers: tuple[LSMSaver, LSMSaver], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = savers
    leave_tombstone(one, monkeypatch)
    engine, run = other._engine, other._runtime.run
    assert list(other.list(None)) == []
    assert run(store_stats(engine.process)).threads == run(verify_store(engine.process)).threads == 0
    found = run(engine.collect(3600.0))
    assert (found.objects, found.waiting_objects) == (0, 1)
    monkeypatch.setattr("lsm.collect.TOMBSTONE", 0.0)
    assert run(engine.collect(-5.0)).objects == 0, "it has not been watched for long enough"
    monkeypatch.setattr(removal.clear, "__defaults__", (0.0,))
    assert run(engine.collect(-5.0)).objects == 1
    assert run(engine.collect(-5.0)).objects == 0
    put(other, at("thread"), {"a": 2})
    assert values(other) == [{"a": 2}]


@pytest.mark.parametrize(
    ("where", "old", "new"),
    [
        (
            "lsm.commit:_send",
            "        yield from make_room(process, thread)\n        view = _first_view(process, thread)\n",
            (
                "        view = _first_view(process, thread)\n"
                "        view = replace(view, tag=thread.tombstone.tag if thread.tombstone is not None else None)\n"
            ),
        ),
        ("lsm.removal:clear", "if (yield Monotonic()) - found.since < age:", "if False:"),
    ],
    ids=["a writer writes over a tombstone", "another's tombstone is removed at once"],
)
def test_planted_faults_are_found(
    savers: tuple[LSMSaver, LSMSaver], monkeypatch: pytest.MonkeyPatch, where: str, old: str, new: str
) -> None:
    """By a test and not by the simulator: there a deletion that is under way excuses what it takes."""
    plant(monkeypatch, where, old, new)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_commit_after_the_tombstone_waits_until_it_is_gone(savers, monkeypatch)
