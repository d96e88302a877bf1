"""What comes from storage, or from a caller as a name, is data: it runs no code and leads nowhere.

Rules of this module:

- A `Trap` tells when it is made. Values of it are stored by a saver that allows everything, and read by one that
  does not.
- Names are stored and found again to the letter, and whatever they are, no path outside of the root comes of them.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

import lsm
from langgraph.checkpoint.lsm import LSMSaver
from lsm.drive import run
from lsm.engine import Engine
from lsm.storage import open_storage
from lsm.verify import verify_store
from tests.conftest import Backend
from tests.support.checkpoints import at, listed, put

made: list[str] = []


@dataclass
class Trap:
    """Says when one is made."""

    name: str

    def __post_init__(self) -> None:
        made.append(self.name)


def sprung(look: Callable[[], Any]) -> list[str]:
    """The traps that go off meanwhile."""
    made.clear()
    look()
    return list(made)


# LangGraph's allowlist.

READS: dict[str, Callable[[LSMSaver, Any], Any]] = {
    "get": lambda saver, _: saver.get_tuple(at("thread")),
    "get by id": lambda saver, config: saver.get_tuple(config),
    "list": lambda saver, _: list(saver.list(at("thread"))),
    "list all": lambda saver, _: list(saver.list(None)),
    "list with a filter": lambda saver, _: list(saver.list(at("thread"), filter={"step": 0})),
    "delta history": lambda saver, _: saver.get_delta_channel_history(config=at("thread"), channels=["log", "value"]),
}


@pytest.fixture(params=["in the manifest", "in segments"])
def trapped(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any]:
    """A store with traps in values, metadata and writes: its address, and a checkpoint."""
    url = (tmp_path / "store").as_uri()
    with LSMSaver.from_conn_string(url, fsync=False, serde=JsonPlusSerializer(allowed_msgpack_modules=True)) as saver:
        first = put(saver, at("thread"), {"value": Trap("seed")}, extra=Trap("metadata"))
        saver.put_writes(first, [("log", Trap("write"))], "task")
        second = put(saver, first, {"value": Trap("value")})
        saver.put_writes(second, [("log", Trap("pending")), ("__error__", Trap("special"))], "task")
        if request.param == "in segments":
            saver.flush("thread")
    return url, first


@pytest.mark.parametrize("read", READS)
def test_a_strict_allowlist_holds_on_every_path(trapped: tuple[str, Any], read: str) -> None:
    url, config = trapped
    allowing = JsonPlusSerializer(allowed_msgpack_modules=[(__name__, "Trap")])
    with LSMSaver.from_conn_string(url, serde=allowing) as saver:
        assert sprung(lambda: READS[read](saver, config))
    with LSMSaver.from_conn_string(url, serde=JsonPlusSerializer(allowed_msgpack_modules=None)) as saver:
        assert sprung(lambda: READS[read](saver, config)) == []


@pytest.mark.parametrize("read", READS)
def test_what_one_clone_may_read_another_still_may_not(trapped: tuple[str, Any], read: str) -> None:
    """Clones share a cache; what is in it is bytes."""
    url, config = trapped
    with LSMSaver.from_conn_string(url, serde=JsonPlusSerializer(allowed_msgpack_modules=None)) as strict:
        clone = strict.with_allowlist([(__name__, "Trap")])
        assert sprung(lambda: READS[read](clone, config))
        assert sprung(lambda: READS[read](strict, config)) == []


CHANGES: dict[str, Callable[[LSMSaver], Any]] = {
    "delete_for_runs": lambda saver: saver.delete_for_runs(["run"]),
    "prune": lambda saver: saver.prune(["thread"]),
    "copy_thread": lambda saver: saver.copy_thread("thread", "copy"),
    "compact": lambda saver: saver.compact("thread"),
    "verify": lambda saver: saver._runtime.run(verify_store(saver._engine.process)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_strict_allowlist_holds_where_threads_are_rewritten(tmp_path: Path, change: str) -> None:
    url = (tmp_path / "store").as_uri()
    with LSMSaver.from_conn_string(url, serde=JsonPlusSerializer(allowed_msgpack_modules=True)) as saver:
        for number in range(3):
            put(
                saver,
                at("thread"),
                {"value": Trap("value")},
                run_id="run" if number else "other",
                more=Trap("metadata"),
            )
    with LSMSaver.from_conn_string(url, serde=JsonPlusSerializer(allowed_msgpack_modules=None)) as strict:
        assert sprung(lambda: CHANGES[change](strict)) == []
        assert sprung(lambda: list(strict.list(None))) == []


_PROBE = """
import json, sys
from langgraph.checkpoint.lsm import LSMSaver
from tests import test_hostile
url, config = json.loads(sys.argv[1])
with LSMSaver.from_conn_string(url) as saver:
    reads = test_hostile.READS.items()
    print(json.dumps({name: test_hostile.sprung(lambda: read(saver, config)) for name, read in reads}))
"""


@pytest.mark.parametrize("strict", ["true", "false"])
def test_the_environment_can_make_it_strict(trapped: tuple[str, Any], strict: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, json.dumps(trapped)],
        env={**os.environ, "LANGGRAPH_STRICT_MSGPACK": strict, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {name: bool(traps) for name, traps in json.loads(done.stdout).items()}
    assert found == dict.fromkeys(READS, strict == "false")


# Values of encodings that could run code.


class _Command:
    def __init__(self, command: str):
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("part", ["checkpoint", "metadata", "value", "write"])
@pytest.mark.parametrize("encoding", ["pickle", "json", "no such encoding"])
def test_a_stored_value_runs_nothing(tmp_path: Path, part: str, encoding: str) -> None:
    storage = open_storage((tmp_path / "store").as_uri(), fsync=False)
    command = f"touch {tmp_path / 'touched'}"
    constructor = {"lc": 2, "type": "constructor", "id": ["os", "system"], "method": None, "args": [command]}
    evil = encoding, json.dumps(constructor).encode() if encoding == "json" else pickle.dumps(_Command(command))
    fine = JsonPlusSerializer().dumps_typed({"id": "1"})
    parts = {each: evil if each == part else fine for each in ("checkpoint", "metadata", "value", "write")}
    engine = Engine(storage.url, storage.appends, os.urandom)
    values = {"channel": ("v1", parts["value"])}
    run(engine.put("t", "", "1", None, parts["checkpoint"], parts["metadata"], {"channel": "v1"}, values), storage)
    run(engine.put_writes("t", "", "1", "task", "", [(0, "channel", parts["write"])]), storage)
    with LSMSaver.from_conn_string(storage.url) as saver:
        try:
            assert saver.get_tuple(at("t")) is not None
            assert encoding == "json"
        except NotImplementedError:  # the serialiser's own words for an encoding that it does not know
            assert encoding != "json"
    assert not (tmp_path / "touched").exists()


def test_the_engine_has_no_means_to_run_what_it_reads() -> None:
    banned = {"pickle", "marshal", "shelve", "subprocess", "ctypes", "runpy", "code", "dill", "cloudpickle"}
    for path in Path(lsm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile", "__import__"}, path
            assert not banned & {name.split(".")[0] for name in names}, path


# Names.

STRINGS = [
    ".",
    "..",
    "../../outside",
    "/etc/passwd",
    "a/b",
    "a//b",
    "a/../b",
    "\\..\\..\\outside",
    "C:\\outside",
    "%2e%2e%2f",
    "~",
    ".hidden",
    "tmp",
    "tmp/x",
    "lsm.json",
    "manifests",
    "manifests/c6/user-1",
    "con",
    "A",
    "a",
    "=41",
    "==" + "0" * 64,
    "é",
    "e\u0301",
    "ﬁ",
    "\u202egnp.exe",
    "\0",
    "a\0b",
    "new\nline",
    "\r\n\r\nHTTP/1.1 200",
    "'; DROP TABLE checkpoints; --",
    "${jndi:ldap://x}",
    "{thread_id}",
    " ",
    "a ",
    "|",
    ":",
    "\ud800",
    "\U0010ffff",
    "\U0010ffff\U0010ffff",
    "\U0010ffff" * 60,
    "long" * 300,
    "long" * 300 + "er",
]


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder whose content must stay as it is, around the root of a store."""
    (tmp_path / "outside").write_text("outside")
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {"outside", "store"}
    assert (tmp_path / "outside").read_text() == "outside"
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789-_.=")
    for path in (tmp_path / "store").rglob("*"):
        assert set(path.name) <= allowed
        assert len(path.name) <= 120
        assert not path.is_symlink()


def test_thread_ids_on_files(outside: Path) -> None:
    _check_thread_ids(lambda: LSMSaver.from_conn_string((outside / "store").as_uri(), fsync=False))


def test_thread_ids_everywhere(backend: Backend) -> None:
    _check_thread_ids(backend.open)


def _check_thread_ids(open_saver: Callable[[], LSMSaver]) -> None:
    with open_saver() as saver:
        for number, thread_id in enumerate(STRINGS):
            put(saver, at(thread_id), {"number": number})
            if number % 2:
                saver.flush(thread_id)
    with open_saver() as saver:
        for number, thread_id in enumerate(STRINGS):
            found = saver.get_tuple(at(thread_id))
            assert found is not None
            assert found.checkpoint["channel_values"] == {"number": number}
        everything = [found.config["configurable"]["thread_id"] for found in saver.list(None)]
        assert sorted(everything) == sorted(STRINGS)
        for thread_id in STRINGS[::2]:
            saver.delete_thread(thread_id)
        left = [found.config["configurable"]["thread_id"] for found in saver.list(None)]
        assert sorted(left) == sorted(STRINGS[1::2])


@pytest.mark.parametrize("flushed", [False, True])
def test_namespaces_and_ids(outside: Path, flushed: bool) -> None:
    url = (outside / "store").as_uri()
    names = ["", *(each for each in STRINGS if each != "\ud800")]  # LangGraph's serialiser does not take that one
    with LSMSaver.from_conn_string(url, fsync=False) as saver:
        for name in names:
            config = at("thread", name + "parent", namespace=name)
            checkpoint = {"v": 1, "id": name or "id", "ts": "", "channel_values": {name: name}}
            checkpoint |= {"channel_versions": {name: name}, "versions_seen": {}}
            stored = saver.put(config, checkpoint, {"name": ascii(name)}, {name: name})  # type: ignore[arg-type,typeddict-item]
            saver.put_writes(stored, [(name, name)], name, name)
        if flushed:
            saver.flush("thread")
    with LSMSaver.from_conn_string(url, fsync=False) as saver:
        for name in names:
            latest = saver.get_tuple(at("thread", namespace=name))
            by_id = saver.get_tuple(at("thread", name or "id", namespace=name))
            [one] = saver.list(at("thread", namespace=name), filter={"name": ascii(name)})
            for found in (latest, by_id, one):
                assert found is not None
                assert found.config["configurable"]["checkpoint_ns"] == name
                assert found.checkpoint["id"] == (name or "id")
                assert found.checkpoint["channel_values"] == {name: name}
                assert found.metadata == {"name": ascii(name)}
                assert found.pending_writes == [(name, name, name)]
        ids = listed(saver, {"configurable": {"thread_id": "thread"}})
        assert ids == sorted([name or "id" for name in names], reverse=True)
