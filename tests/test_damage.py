"""Damaged stores: an error that names the object, or the right answer; never a wrong one.

Rules of this module:

- Everything goes through a saver that knows nothing yet, on `file://`, with the answers of the sound store to compare.
- One exception: a manifest that ends within its last commits looks as after a crash, and may answer as before them.
- Answers are compared by their `repr`, which tells `1` from `True` and from `1.0`, and is fast.
- A manifest *is* its thread: one that is removed leaves a thread that does not exist, and one that ends exactly
  between two commits has never had the later ones.
"""

from __future__ import annotations

import itertools
import logging
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from lsm.collect import collect
from lsm.drive import run
from lsm.engine import Engine
from lsm.errors import CorruptionError, LSMError
from lsm.format.manifest import MARK_SIZE, unpack_frames, unpack_header
from lsm.format.names import manifest_key, segments_prefix
from lsm.storage import open_storage
from tests.data import samples
from tests.support.checkpoints import at, put

MAIN = "Main/thread"
OTHER = "other"
LONG = "long " * 40  # its name is a digest
MEMORY = 96 << 20
"""How much the process may grow while it reads damaged stores, in bytes."""

READS: dict[str, Callable[[LSMSaver, list[Any]], Any]] = {
    "latest": lambda saver, _: saver.get_tuple(at(MAIN)),
    "latest of a child": lambda saver, _: saver.get_tuple(at(MAIN, namespace="child:1")),
    "first": lambda saver, configs: saver.get_tuple(configs[0]),
    "second": lambda saver, configs: saver.get_tuple(configs[min(1, len(configs) - 1)]),
    "list": lambda saver, _: list(saver.list(at(MAIN))),
    "filter": lambda saver, _: list(saver.list(at(MAIN), filter={"parity": 1}, limit=2)),
    "history": lambda saver, _: saver.get_delta_channel_history(config=at(MAIN), channels=["log", "count"]),
    "all": lambda saver, _: list(saver.list(None)),
}


@dataclass
class Store:
    """A store, the answers that are right, and those that were right after each of the last commits."""

    root: Path
    configs: list[Any] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    before: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file())

    @property
    def manifest(self) -> Path:
        return self.root / manifest_key(MAIN)

    @property
    def segments(self) -> list[Path]:
        return sorted((self.root / segments_prefix(MAIN)).iterdir())

    def open(self) -> LSMSaver:
        """A saver that knows nothing yet."""
        return LSMSaver.from_conn_string(self.root.as_uri(), fsync=False, compaction="off")

    def read(self, name: str) -> Any:
        """What a read answers now, or its error."""
        with self.open() as saver:
            try:
                return repr(READS[name](saver, self.configs))
            except LSMError as error:
                return error

    def read_all(self) -> dict[str, Any]:
        return {name: self.read(name) for name in READS}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Made once; tests damage copies."""
    store = Store(tmp_path_factory.mktemp("damage") / "store")
    with store.open() as saver:
        for thread_id in (OTHER, LONG):
            put(saver, at(thread_id), {"count": thread_id})
            put(saver, at(thread_id), {"count": thread_id + "!"})
            saver.flush(thread_id)  # so that their manifests have no frames
        for step in range(6):
            parent = store.configs[-1] if store.configs else at(MAIN)
            values = {"count": step, "messages": "".join(f"message {n}; " for n in range(60 + step))}
            if step in (1, 5):
                values["large"] = str(step) * 30_000
            store.configs.append(put(saver, parent, values, step=step, parity=step % 2))
            _note(store)
            saver.put_writes(store.configs[-1], [("log", f"entry {step}"), ("other", step)], f"task-{step}")
            _note(store)
            if step % 2:
                child = at(MAIN, namespace="child:1")
                put(saver, child, {"inner": step}, step=step)
                _note(store)
            if step == 2:
                saver.flush(MAIN)
                store.before.clear()
                _note(store)
    store.answers = store.read_all()
    assert not any(isinstance(answer, LSMError) for answer in store.answers.values())
    assert len(store.segments) >= 3
    return store


def _note(store: Store) -> None:
    store.before[store.manifest.stat().st_size] = store.read_all()


@pytest.fixture
def store(sound: Store, tmp_path: Path) -> Store:
    """A copy to damage."""
    shutil.copytree(sound.root, tmp_path / "store")
    return Store(tmp_path / "store", sound.configs, sound.answers, sound.before)


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the body makes this process grow by more than `MEMORY`."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MEMORY


def judge(store: Store, what: str, *right: dict[str, Any]) -> int:
    """Read everything: every answer is one of the right ones, or an error that names the thread or an object of it.

    Returns:
        How many reads ended in an error.
    """
    names = [repr(MAIN), repr(OTHER), repr(LONG)[:40], "lsm.json", "manifests/", "segments/"]
    errors = 0
    for name in READS:
        answer = store.read(name)
        if isinstance(answer, LSMError):
            errors += 1
            assert any(each in str(answer) for each in names), f"{what}, {name}: {answer} names nothing"
        else:
            assert any(answer == each[name] for each in right), f"{what}, {name}: a wrong answer"
    return errors


def flip_bytes(store: Store, step: int) -> tuple[int, int]:
    """Damage bytes one at a time, in turn by a bit, by another, by all eight.

    Returns:
        How many there were, and how many made some read fail.
    """
    tried = noticed = 0
    for path in store.files:
        sound = path.read_bytes()
        for position in range(0, len(sound), step):
            pattern = (0x01, 0x80, 0xFF)[tried % 3]
            with path.open("r+b") as file:
                file.seek(position)
                file.write(bytes([sound[position] ^ pattern]))
            tried += 1
            noticed += judge(store, f"{path.name}, byte {position} ^ {pattern:#x}", store.answers) > 0
            path.write_bytes(sound)
    return tried, noticed


def test_some_bytes_flipped(store: Store) -> None:
    with bounded():
        tried, noticed = flip_bytes(store, 53)
    assert tried > 50
    assert noticed > tried // 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_byte_flipped(store: Store) -> None:
    with bounded():
        tried, noticed = flip_bytes(store, 1)
    assert noticed > tried // 2


def truncate_at_every_length(store: Store, step: int) -> None:
    for path in store.files:
        sound = path.read_bytes()
        for length in range(0, len(sound), step):
            path.write_bytes(sound[:length])
            right = [store.answers]
            if path == store.manifest:
                whole = [size for size in store.before if size - MARK_SIZE <= length]  # only its mark is missing
                right = [store.before[max(whole)]] if whole else []
            judge(store, f"{path.name} cut to {length} bytes", *right)
        path.write_bytes(sound)


def test_some_lengths(store: Store) -> None:
    with bounded():
        truncate_at_every_length(store, 53)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_length(store: Store) -> None:
    with bounded():
        truncate_at_every_length(store, 1)


def test_bytes_behind_the_end(store: Store) -> None:
    """What follows the last mark of a manifest is a torn append, whatever it is. Behind a segment nobody looks."""
    for path, more in itertools.product(store.files, (b"\0" * 100, b"x", b"x" * 100)):
        sound = path.read_bytes()
        path.write_bytes(sound + more)
        judge(store, f"{path.name} with more behind it", store.answers)
        path.write_bytes(sound)


def test_files_in_the_place_of_others(store: Store) -> None:
    """Every file instead of every other one: of the same thread, of another, of another kind."""
    bodies = {path: path.read_bytes() for path in store.files}
    for path, other in itertools.permutations(bodies, 2):
        path.write_bytes(bodies[other])
        judge(store, f"{other.name} in the place of {path.name}", store.answers)
        path.write_bytes(bodies[path])


def test_files_that_changed_places(store: Store) -> None:
    bodies = {path: path.read_bytes() for path in store.files}
    for path, other in itertools.combinations(bodies, 2):
        path.write_bytes(bodies[other])
        other.write_bytes(bodies[path])
        judge(store, f"{other.name} and {path.name} swapped", store.answers)
        path.write_bytes(bodies[path])
        other.write_bytes(bodies[other])


def test_a_manifest_under_another_name(store: Store) -> None:
    """In the folder of another hash, or under a name that no thread has: a listing of all threads says so."""
    for name in ("manifests/00/" + store.manifest.name, "manifests/00/=zz", "manifests/00/==" + "0" * 64):
        moved = store.root / name
        moved.parent.mkdir(parents=True, exist_ok=True)
        store.manifest.rename(moved)
        error = store.read("all")
        assert isinstance(error, CorruptionError)
        assert name in str(error)
        moved.rename(store.manifest)
    assert judge(store, "all back", store.answers) == 0


def test_segments_that_are_gone(store: Store) -> None:
    for path in store.segments:
        sound = path.read_bytes()
        path.unlink()
        assert judge(store, f"{path.name} removed", store.answers) > 0
        path.write_bytes(sound)


def test_a_folder_or_a_link_in_the_place_of_a_file(store: Store, tmp_path: Path) -> None:
    for path in (store.manifest, *store.segments):
        sound = path.read_bytes()
        path.unlink()
        path.mkdir()
        judge(store, f"{path.name} is a folder", store.answers, _without_main(store))
        path.rmdir()
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(sound)
        path.symlink_to(elsewhere)
        judge(store, f"{path.name} is a link", store.answers, _without_main(store))
        path.unlink()
        path.write_bytes(sound)


def test_a_manifest_that_is_gone(store: Store) -> None:
    store.manifest.unlink()
    assert judge(store, "no manifest", _without_main(store)) == 0


def _without_main(store: Store) -> dict[str, Any]:
    """The answers of a store in which the main thread does not exist."""
    nothing: dict[str, Any] = {name: repr([]) for name in ("list", "filter")}
    nothing |= {name: repr(None) for name in ("latest", "latest of a child", "first", "second")}
    nothing["history"] = repr({"log": {"writes": []}, "count": {"writes": []}})
    with store.open() as saver:
        others = [each for thread_id in (OTHER, LONG) for each in saver.list(at(thread_id))]
    nothing["all"] = repr(sorted(others, key=lambda each: each.checkpoint["id"], reverse=True))
    return nothing


def test_without_lsm_json_all_is_read(store: Store) -> None:
    (store.root / "lsm.json").unlink()
    assert judge(store, "no lsm.json", store.answers) == 0


@pytest.mark.parametrize("body", [b"", b"{}", b"[" * 100_000, b"\xff", b'{"format": 1e999, "conditional_writes": 1}'])
def test_no_writing_under_a_root_that_is_damaged(store: Store, body: bytes) -> None:
    (store.root / "lsm.json").write_bytes(body)
    with store.open() as saver, pytest.raises(CorruptionError, match=r"lsm\.json"):
        put(saver, at(MAIN), {"count": 1})


# The one exception, and the next writer.


@pytest.mark.parametrize("cut", ["within the last commit", "within the one before", "a tail of zeros"])
def test_the_next_writer_warns_of_a_manifest_that_ends_within_a_commit(
    store: Store, caplog: pytest.LogCaptureFixture, cut: str
) -> None:
    sizes = sorted(store.before)
    body = store.manifest.read_bytes()
    if cut == "a tail of zeros":
        left, torn = sizes[-2], body[: sizes[-2]] + bytes(sizes[-1] - sizes[-2])
    else:
        left = sizes[-2] if cut == "within the last commit" else sizes[-3]
        torn = body[: left + 50]
    store.manifest.write_bytes(torn)
    assert judge(store, cut, store.before[left]) == 0
    with store.open() as saver, caplog.at_level(logging.WARNING, "lsm"):
        assert repr(saver.get_tuple(at(MAIN))) == store.before[left]["latest"]
        assert caplog.records == []
        new = put(saver, store.configs[-1], {"count": 99})
        put(saver, new, {"count": 100})
    [warning] = caplog.records
    assert warning.name == "lsm"
    assert repr(MAIN) in warning.getMessage()
    assert manifest_key(MAIN) in warning.getMessage()
    with store.open() as saver:
        found = saver.get_tuple(new)
        assert found is not None
        assert found.checkpoint["channel_values"]["count"] == 99
        first = saver.get_tuple(store.configs[0])
        assert repr(first) == store.answers["first"]


def test_no_warning_about_a_sound_manifest(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with store.open() as saver, caplog.at_level(logging.WARNING, "lsm"):
        put(saver, at(MAIN), {"count": 99})
    assert caplog.records == []


def test_a_writer_does_not_replace_what_is_damaged(store: Store) -> None:
    """A flipped byte in a confirmed commit is no torn append: the manifest stays as it is, for whoever can mend it."""
    body = bytearray(store.manifest.read_bytes())
    body[-1 - MARK_SIZE] ^= 1
    store.manifest.write_bytes(body)
    with store.open() as saver, pytest.raises(CorruptionError, match="manifests/"):
        put(saver, at(MAIN), {"count": 99})
    assert store.manifest.read_bytes() == body


def test_the_collector_removes_nothing_by_the_manifest_of_another_thread(tmp_path: Path) -> None:
    """The names of two long thread ids do not tell which is whose."""
    store = Store(tmp_path / "store")
    with store.open() as saver:
        for thread_id in (LONG, LONG + "er"):
            put(saver, at(thread_id), {"count": 1})
            saver.flush(thread_id)
    one, other = (store.root / manifest_key(thread_id) for thread_id in (LONG, LONG + "er"))
    other.write_bytes(one.read_bytes())
    files = store.files
    storage = open_storage(store.root.as_uri(), fsync=False)
    engine = Engine(storage.url, storage.appends, os.urandom)
    with pytest.raises(CorruptionError, match="manifests/"):
        run(collect(engine.process, -60.0), storage)
    assert store.files == files


# On an object store there is no exception.


def test_an_object_never_ends_within_a_commit() -> None:
    """Objects are written whole, so a manifest of any other length than that of a whole one is damage."""
    objects = samples.make_store()
    key = manifest_key(samples.THREAD)
    body = objects[key]
    header, end = unpack_header(body, key)
    frames = unpack_frames(body, end, header.seq, header.incarnation, header.chain, False, key).frames
    whole = {end, *itertools.accumulate((frame.size for frame in frames), initial=end)}
    for length in set(range(len(body))) - whole:
        with pytest.raises(CorruptionError, match="manifests/"):
            samples.READS["latest"]({**objects, key: body[:length]}, samples.THREAD)
    with pytest.raises(CorruptionError, match="manifests/"):
        samples.READS["latest"]({**objects, key: body + bytes(100)}, samples.THREAD)
