"""Steps that are asked to stop: where they meet it, how often, and what they may still do."""

from __future__ import annotations

from typing import Any

import pytest

from lsm.drive import run
from lsm.steps import AbortUpload, All, Create, Delete, FinishUpload, Get, OpenUpload, Steps, UploadPart
from lsm.stop import Stop, Stopped
from lsm.storage import open_storage


class Storage:
    """One in memory, that notes what it is asked, and has a stop asked for before it answers to a certain key."""

    def __init__(self, stop: Stop, at: str):
        self._storage: Any = open_storage("memory://")
        self._stop, self._at = stop, at
        self.local = True
        self.asked: list[Any] = []

    def execute(self, request: Any) -> Any:
        self.asked.append(request)
        if getattr(request, "key", None) == self._at:
            self._stop.ask()
        return self._storage.execute(request)


def run_until(at: str, steps: Steps[Any]) -> list[Any]:
    """The requests of steps that are asked to stop while they wait for one of them."""
    stop = Stop()
    storage: Any = Storage(stop, at)
    with pytest.raises(Stopped):
        run(stop.unless_asked(steps), storage)
    return storage.asked


def test_the_request_under_way_is_answered_and_the_next_is_not_made() -> None:
    answers: list[Any] = []

    def steps() -> Steps[None]:
        answers.append((yield Get("a")))
        answers.append((yield Get("b")))
        answers.append((yield Get("c")))

    assert run_until("b", steps()) == [Get("a"), Get("b")]
    assert answers == [None, None]


def test_it_is_met_once_and_what_tidies_up_is_done() -> None:
    def steps() -> Steps[None]:
        try:
            yield Create("a", b"")
            yield Create("b", b"")
        finally:
            yield All([Delete(["a"]), tidy()])

    def tidy() -> Steps[None]:
        yield Delete(["b"])
        yield Delete(["c"])

    assert run_until("a", steps()) == [Create("a", b""), Delete(["a"]), Delete(["b"]), Delete(["c"])]


@pytest.mark.parametrize("at", ["upload", "other"])
def test_an_upload_is_aborted_wherever_it_is_asked_for(at: str) -> None:
    def steps() -> Steps[None]:
        handle = yield OpenUpload("upload")
        try:
            yield UploadPart(handle, b"x")
            yield Get("other")
            yield FinishUpload(handle)
        except Exception:
            yield AbortUpload(handle)
            raise

    kinds = [type(request) for request in run_until(at, steps())]
    assert kinds[-1] is AbortUpload
    assert FinishUpload not in kinds


def test_letting_go_is_no_request_that_fails() -> None:
    def steps() -> Steps[None]:
        handle = yield OpenUpload("upload")
        yield AbortUpload(handle)
        yield Get("more")

    assert [type(request) for request in run_until("upload", steps())] == [OpenUpload, AbortUpload]


def test_what_runs_side_by_side_ends_too_and_what_began_it_tidies_up() -> None:
    outcomes: list[Any] = []

    def item(key: str) -> Steps[None]:
        yield Get(key)
        yield Get(f"{key} again")

    def steps() -> Steps[None]:
        outcomes.extend((yield All([item("a"), All([item("b")]), item("c")])))
        yield Delete(["tidied"])
        yield (item("d"))
        raise outcomes[0]

    asked = run_until("a", steps())
    assert asked == [Get("a"), Delete(["tidied"]), Get("d"), Get("d again")]
    assert [type(outcome) for outcome in outcomes] == [Stopped, list, Stopped]


def test_nothing_begins_after_it() -> None:
    stop = Stop()
    stop.ask()
    storage: Any = Storage(stop, "")

    def steps() -> Steps[None]:
        yield Get("a")

    with pytest.raises(Stopped):
        run(stop.unless_asked(steps()), storage)
    assert storage.asked == []


def test_other_failures_are_thrown_in_as_without_it() -> None:
    def steps() -> Steps[str]:
        with pytest.raises(KeyboardInterrupt):
            yield Get("a")
        return "went on"

    class Interrupted(Storage):
        def execute(self, request: Any) -> Any:
            raise KeyboardInterrupt

    stop = Stop()
    storage: Any = Interrupted(stop, "")
    assert run(stop.unless_asked(steps()), storage) == "went on"
