"""What every storage answers to every request: one contract, for memory, files and object stores."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from lsm.errors import Conflict, NotFound
from lsm.steps import (
    AbortUpload,
    Append,
    Appended,
    Create,
    Delete,
    DeleteIf,
    FinishUpload,
    Found,
    Get,
    GetRanges,
    List,
    OpenUpload,
    PutIf,
    UploadPart,
)
from lsm.storage import Storage, files, memory, objects

Ask = Callable[[Any], Any]


def keys(page: Any) -> list[str]:
    return [entry.key for entry in page.entries]


def test_what_was_created_is_read(ask: Ask) -> None:
    assert ask(Get("a/b")) is None
    tag = ask(Create("a/b", b"hello"))
    assert ask(Get("a/b")) == Found(b"hello", tag)
    assert isinstance(ask(Get("a/b")).body, bytes)


def test_an_empty_object_is_one(ask: Ask) -> None:
    tag = ask(Create("empty", b""))
    assert ask(Get("empty")) == Found(b"", tag)


def test_create_refuses_what_exists(ask: Ask) -> None:
    tag = ask(Create("a", b"first"))
    with pytest.raises(Conflict):
        ask(Create("a", b"second"))
    with pytest.raises(Conflict):
        ask(PutIf("a", b"second", None))
    assert ask(Get("a")) == Found(b"first", tag)


def test_put_if_replaces_only_the_state_it_names(ask: Ask) -> None:
    first = ask(PutIf("a", b"first", None))
    second = ask(PutIf("a", b"second", first))
    assert second != first
    with pytest.raises(Conflict):
        ask(PutIf("a", b"third", first))
    assert ask(Get("a")) == Found(b"second", second)


def test_append_adds_only_to_the_state_it_names(ask: Ask) -> None:
    first = ask(Create("a", b"one,"))
    second = ask(Append("a", [b"o", b"ne,"], b"two,", first))
    with pytest.raises(Conflict):
        ask(Append("a", [b"one,"], b"lost", first))
    third = ask(Append("a", [b"one,two,"], b"three", second))
    assert ask(Get("a")) == Found(b"one,two,three", third)
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("write", [lambda tag: PutIf("a", b"x", tag), lambda tag: Append("a", [b"1"], b"x", tag)])
def test_a_write_to_what_is_gone_conflicts(ask: Ask, write: Callable[[Any], Any]) -> None:
    tag = ask(Create("a", b"1"))
    ask(Delete(["a"]))
    with pytest.raises(Conflict):
        ask(write(tag))
    assert ask(Get("a")) is None


def test_get_unless_unchanged(ask: Ask) -> None:
    first = ask(Create("a", b"one"))
    assert ask(Get("a", unless=first)) == "unchanged"
    second = ask(PutIf("a", b"two", first))
    assert ask(Get("a", unless=first)) == Found(b"two", second)
    ask(Delete(["a"]))
    assert ask(Get("a", unless=second)) is None


def test_get_from_a_known_length_gives_the_rest_or_all(ask: Ask) -> None:
    first = ask(Create("a", b"one,"))
    second = ask(Append("a", [b"one,"], b"two", first))
    assert ask(Get("a", unless=first, start=4)) in (Appended(b"two", second), Found(b"one,two", second))
    third = ask(PutIf("a", b"another, and longer", second))
    assert ask(Get("a", unless=second, start=7)) == Found(b"another, and longer", third)


def test_ranges(ask: Ask) -> None:
    ask(Create("a", bytes(range(100))))
    ranges = [(90, 95), (0, 3), (2, 5), (7, 7)]
    assert ask(GetRanges("a", ranges)) == [bytes(range(*each)) for each in ranges]
    assert ask(GetRanges("a", [])) == []


@pytest.mark.parametrize("past", [(98, 200), (100, 101), (5000, 6000), (2**40, 2**41)])
def test_ranges_past_the_end_are_short(ask: Ask, past: tuple[int, int]) -> None:
    ask(Create("a", bytes(range(100))))
    assert ask(GetRanges("a", [(1, 3), past])) == [b"\x01\x02", bytes(range(100))[slice(*past)]]
    assert ask(GetRanges("a", [past])) == [bytes(range(100))[slice(*past)]]


def test_ranges_far_apart(ask: Ask) -> None:
    body = bytes(range(256)) * 16384
    ask(Create("a", body))
    ranges = [(len(body) - 10, len(body) + 10), (0, 10), (2**21, 2**21 + 10)]
    assert ask(GetRanges("a", ranges)) == [body[start:end] for start, end in ranges]


def test_ranges_of_nothing(ask: Ask) -> None:
    with pytest.raises(NotFound) as caught:
        ask(GetRanges("a", [(0, 1)]))
    assert caught.value.key == "a"


def test_delete(ask: Ask) -> None:
    for key in ("a/1", "a/2", "b"):
        ask(Create(key, b"x"))
    ask(Delete(["a/1", "never/was", "b"]))
    ask(Delete([]))
    assert keys(ask(List("a/"))) == ["a/2"]
    assert ask(Get("b")) is None


def test_delete_if(ask: Ask, storage: Storage) -> None:
    if not storage.conditional_deletes:
        pytest.skip("it cannot: see tests/test_tombstones.py")
    first = ask(Create("a", b"one"))
    second = ask(PutIf("a", b"two", first))
    with pytest.raises(Conflict):
        ask(DeleteIf("a", first))
    assert ask(Get("a")) is not None
    ask(DeleteIf("a", second))
    assert ask(Get("a")) is None
    with pytest.raises(Conflict):
        ask(DeleteIf("a", second))


def test_list_is_in_order_of_keys(ask: Ask) -> None:
    tags = {key: ask(Create(key, b"12345")) for key in ("m/b/1", "m/a/2", "m/a-b", "m/a/1", "n/1", "m2/1")}
    page = ask(List("m/"))
    assert keys(page) == ["m/a-b", "m/a/1", "m/a/2", "m/b/1"]
    assert not page.more
    for entry in page.entries:
        assert entry.size == 5
        assert entry.tag == tags[entry.key]
        assert abs(entry.modified - time.time()) < 60
    assert keys(ask(List("m/a/"))) == ["m/a/1", "m/a/2"]
    assert keys(ask(List("nothing/"))) == []


def test_list_after_a_key(ask: Ask) -> None:
    for key in ("m/a-b", "m/a/1", "m/a/2", "m/b/1", "m/c"):
        ask(Create(key, b""))
    assert keys(ask(List("m/", after="m/a/1"))) == ["m/a/2", "m/b/1", "m/c"]
    assert keys(ask(List("m/", after="m/a/15"))) == ["m/a/2", "m/b/1", "m/c"]
    assert keys(ask(List("m/", after="m/c"))) == []


def test_list_in_pages(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, memory, objects):
        monkeypatch.setattr(module, "PAGE", 3)
    expected = [f"m/{number % 2}/{number}" for number in (0, 2, 4, 6, 1, 3, 5)]
    for key in expected:
        ask(Create(key, b""))
    listed, after, more = [], None, True
    while more:
        page = ask(List("m/", after))
        assert len(page.entries) <= 3
        listed += keys(page)
        more, after = page.more, listed[-1]
    assert listed == expected


@pytest.mark.parametrize("parts", [[], [b""], [b"one", b"", b"two"], [b"x" * 9_000_000, b"y" * 9_000_000]])
def test_an_upload_is_visible_when_finished(ask: Ask, parts: list[bytes]) -> None:
    handle = ask(OpenUpload("s/1/big"))
    for part in parts:
        ask(UploadPart(handle, part))
    assert ask(Get("s/1/big", most=1 << 25)) is None
    assert keys(ask(List("s/"))) == []
    ask(FinishUpload(handle))
    assert ask(Get("s/1/big", most=1 << 25)).body == b"".join(parts)
    assert keys(ask(List("s/"))) == ["s/1/big"]


@pytest.mark.parametrize("size", [10, 20_000_000])
def test_an_aborted_upload_leaves_nothing(ask: Ask, size: int) -> None:
    handle = ask(OpenUpload("s/1/big"))
    ask(UploadPart(handle, b"x" * size))
    ask(AbortUpload(handle))
    ask(AbortUpload(handle))
    assert ask(Get("s/1/big", most=1 << 25)) is None
    assert keys(ask(List("s/"))) == []
    assert keys(ask(List("tmp/"))) == []


def test_close_is_harmless(storage: Storage) -> None:
    tag = storage.execute(Create("a", b"x"))
    storage.close()
    storage.close()
    assert storage.execute(Get("a")) == Found(b"x", tag)
