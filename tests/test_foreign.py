"""What is not ours stays: only objects whose whole name is one that the store makes are seen, counted or removed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from langgraph.checkpoint.lsm.jobs import compact_store
from lsm.errors import LSMError, NestedStoreError
from lsm.format.names import kind_of, manifest_key, segment_key, sweep_key
from lsm.stats import store_stats
from lsm.steps import Create, Get
from lsm.storage import open_storage
from lsm.sweep import Options, sweep
from lsm.verify import verify_store
from tests.conftest import Backend
from tests.support.checkpoints import at, put

ULID = "0" * 26
FOREIGN = [
    "tmp/notes.txt",
    "tmp/" + "g" * 32,
    "tmp/sub/" + "0" * 32,
    "probe/" + "0" * 23,
    "segments/readme",
    f"segments/00/thread/{ULID}",
    segment_key("thread", ULID[1:]),
    segment_key("thread", "8" + ULID[1:]),
    segment_key("thread", ULID) + "/more",
    manifest_key("thread") + ".bak",
    "manifests/00/thread",
    f"manifests/00/==01{'0' * 62}",
    "sweep/0-of-0x",
    "other/file",
]


@pytest.mark.parametrize("key", FOREIGN)
def test_foreign_names(key: str) -> None:
    assert kind_of(key) is None


@pytest.mark.parametrize("thread_id", ["thread", "A/b", "..", "é" * 300, "x" * 121])
def test_own_names(thread_id: str) -> None:
    assert kind_of(manifest_key(thread_id)) == "manifest"
    assert kind_of(segment_key(thread_id, ULID)) == "segment"
    assert [kind_of(key) for key in (sweep_key(3, 16), "lsm.json", "probe/" + "0" * 24, "tmp/" + "f" * 32)] == [
        "sweep",
        "root",
        "probe",
        "temporary",
    ]


def test_what_is_foreign_is_neither_seen_nor_removed(backend: Backend) -> None:
    with backend.open(compaction="off") as saver:
        put(saver, at("thread"), {"a": 1})
        execute = saver._storage.execute
        foreign = [key for key in FOREIGN if key != segment_key("thread", ULID) + "/more"]
        for key in foreign:
            execute(Create(key, b"somebody else's"))
        run, engine = saver._runtime.run, saver._engine
        assert run(engine.collect(-5.0)).objects == 0
        assert run(sweep(engine, Options(grace=0.0))).threads == 1
        stats, report = run(store_stats(engine.process)), run(verify_store(engine.process))
        assert (stats.threads, stats.garbage_objects, stats.failures) == (1, 0, {})
        assert (report.threads, report.garbage.objects, report.problems) == (1, 0, {})
        assert len(list(saver.list(None))) == 1
        assert [execute(Get(key)).body for key in foreign] == [b"somebody else's"] * len(foreign)


@pytest.mark.parametrize("folder", ["segments", "manifests", "probe"])
def test_a_store_in_the_folders_of_another_is_named_and_left_alone(backend: Backend, folder: str) -> None:
    with backend.open(compaction="off") as saver:
        put(saver, at("thread"), {"a": 1})
        saver._storage.execute(Create(f"{folder}/lsm.json", b"{}"))
        run, engine = saver._runtime.run, saver._engine
        if folder != "manifests" or backend.name == "s3":  # elsewhere no garbage is looked for there
            with pytest.raises(NestedStoreError, match=f"{folder}/lsm.json"):
                run(engine.collect(-5.0))
        if folder == "manifests":
            with pytest.raises(NestedStoreError, match=f"{folder}/lsm.json"):
                list(saver.list(None))
            with pytest.raises(NestedStoreError, match=f"{folder}/lsm.json"):
                run(sweep(engine, Options()))
        assert saver.get_tuple(at("thread")) is not None


@pytest.mark.parametrize("url", ["file:///", "file:////", "file:///."])
def test_the_root_of_the_file_system_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="root of the file system"):
        open_storage(url)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    done = (
        mount
        and os.geteuid() == 0
        and subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
        == 0
    )
    if not done:
        pytest.skip("a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_freed_of_what_needs_no_write(small: Path) -> None:
    root = small / "store"
    with LSMSaver.from_conn_string(root.as_uri(), compaction="off") as saver:
        for thread_id in ("first", "second"):
            config = at(thread_id)
            for number in range(3):
                config = put(saver, config, {"text": os.urandom(20_000).hex()[:30_000] + str(number)})
                saver._runtime.run(saver._engine.flush(thread_id))
            saver._runtime.run(saver._engine.compact(thread_id))
            saver._storage.execute(Create(segment_key(thread_id, ULID), b"an orphan"))
        failures: dict[str, LSMError] = {}
        with (small / "filler").open("wb", buffering=0) as filler:
            size = 1 << 16
            while size:
                try:
                    filler.write(bytes(size))
                except OSError:
                    size //= 2
        assert os.statvfs(small).f_bavail == 0
        found = saver._runtime.run(saver._engine.collect(-5.0, failed=lambda key, error: failures.update({key: error})))
        assert found.objects >= 6, "what was retired"
        assert os.statvfs(small).f_bavail > 0
        again = saver._runtime.run(saver._engine.collect(-5.0))
        assert found.objects + again.objects >= 8, "and the orphans, once there is room for a fence"
        assert len(list(saver.list(None))) == 6


@pytest.mark.parametrize("inside", ["segments", "tmp/mine", "manifests/a/b"])
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_new_root_in_the_folders_of_another_store_is_refused(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, inside: str
) -> None:
    s3 = request.getfixturevalue("s3") if kind == "s3" else None
    url = s3.url() if s3 is not None else (tmp_path / "store").as_uri()
    options = {"store_options": s3.store_options} if s3 is not None else {}
    with LSMSaver.from_conn_string(url, **options) as outer:
        put(outer, at("thread"), {"a": 1})
    with LSMSaver.from_conn_string(f"{url}/{inside}", **options) as inner, pytest.raises(NestedStoreError, match=url):
        put(inner, at("thread"), {"a": 1})
    with pytest.raises(NestedStoreError, match=url):
        compact_store(f"{url}/{inside}", **options)
    with LSMSaver.from_conn_string(f"{url}/other/{inside}", **options) as beside:
        put(beside, at("thread"), {"a": 1})
