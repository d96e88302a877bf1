"""The command `langgraph-lsm`: what it does, what it says and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from langgraph.checkpoint.lsm import LSMSaver
from langgraph.checkpoint.lsm.commands import app
from langgraph.checkpoint.lsm.jobs import compact_store
from lsm.format.names import manifest_key, segments_prefix
from tests.support import processes
from tests.support.checkpoints import at, chain, listed
from tests.test_jobs import THREADS, counts, damage, fill


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store of six threads that are to be compacted."""
    fill(tmp_path.as_uri(), fsync=False)
    return tmp_path.as_uri()


def call(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    found = CliRunner().invoke(app, list(words))
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout, found.stderr


def called(*words: str, code: int = 0) -> str:
    """The output of a call that ends with this code."""
    found, output, errors = call(*words)
    assert found == code, (output, errors)
    return output if not code else errors


def as_json(*words: str, code: int = 0) -> dict[str, Any]:
    found, output, errors = call(*words, "--json")
    assert found == code, (output, errors)
    (line,) = output.splitlines()
    answer: dict[str, Any] = json.loads(line)
    return answer


def test_compact(url: str) -> None:
    planned = as_json("compact", url, "--dry-run")
    assert (planned["compacted"], planned["dry_run"]) == (6, True)
    done = as_json("compact", url)
    waiting = {name: done[name] for name in ("waiting_objects", "waiting_bytes", "collectable_at")}
    assert {**planned, "seconds": 0, "dry_run": False, **waiting} == {**done, "seconds": 0}
    assert waiting["waiting_objects"] == 54
    said = called("compact", url)
    assert said.startswith("6 threads, of which 6 were in shape and 0 looked at")
    assert as_json("compact", url, "--grace", "0s", "--offline")["freed_objects"] == 54
    assert counts(url) == [9] * 6


def test_compact_with_processes(url: str) -> None:
    assert as_json("compact", url, "--concurrency", "2")["compacted"] == 6


@pytest.mark.slow
def test_compact_on_dask(url: str) -> None:
    assert as_json("compact", url, "--dask", "local", "--concurrency", "2")["compacted"] == 6


def test_compact_a_part(url: str) -> None:
    assert as_json("compact", url, "--threads", "thread-[01]")["threads"] == 2
    parts = [as_json("compact", url, "--shard", f"{number}/3") for number in range(3)]
    assert sum(part["threads"] for part in parts) == 6
    late = as_json("compact", url, "--max-time", "0.000001s", "--grace", "0s", "--offline")
    assert (late["looked_at"], late["left"]) == (0, 6)


def test_failures_are_named_and_all_else_is_done(url: str, tmp_path: Path) -> None:
    damage(tmp_path, THREADS[1])
    found, output, errors = call("compact", url, "--json")
    assert found == 1
    summary = json.loads(output)
    assert (summary["compacted"], list(summary["failures"])) == (5, [THREADS[1]])
    (line,) = errors.splitlines()
    assert line.startswith(f"failed: {THREADS[1]}: {segments_prefix(THREADS[1])}")


def test_retention_from_a_file_and_from_flags(url: str, tmp_path: Path) -> None:
    file = tmp_path / "retention.toml"
    file.write_text('max_checkpoints = 5\nmax_age = "30d"\nidle = "1w"\n')
    assert as_json("compact", url, "--retention", str(file))["expired"] == 24
    assert as_json("expire", url, "--retention", str(file), "--max-checkpoints", "2")["expired"] == 18
    assert counts(url) == [2] * 6


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_ages = 3", "unknown max_ages"),
        ("max_age = 3", "must be a text"),
        ("max_age = '3'", "no length of time"),
        ("=", "Invalid statement"),
        ("max_checkpoints = 0", "at least 1"),
    ],
)
def test_retentions_that_make_no_sense(url: str, tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "retention.toml"
    file.write_text(text)
    assert complaint in unwrapped(called("compact", url, "--retention", str(file), code=2))


def unwrapped(text: str) -> str:
    """A message without the box that is drawn around it."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["compact", "{url}", "--shard", "3/3"], "no shard"),
        (["compact", "{url}", "--max-age", "30"], "no length of time"),
        (["compact", "{url}", "--max-checkpoints", "0"], "max-checkpoints"),
        (["compact", "{url}", "--retention", "nowhere.toml"], "nowhere.toml"),
        (["compact", "{url}", "--store-option", "region"], "KEY=VALUE"),
        (["compact", "{url}", "--store-option", "region=x"], "store_options are for object stores"),
        (["compact", "ftp://here"], "no storage for ftp://"),
        (["compact", "memory://here"], "use compact_store"),
        (["compact"], "URL"),
        (["expire", "{url}"], "say what expires"),
        (["prune", "{url}", "a", "--strategy", "all"], "no strategy 'all'"),
        (["prune", "{url}"], "THREAD"),
        (["gc", "{url}", "--grace", "never"], "no length of time"),
        (["grow", "{url}"], "grow"),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_wrong_calls_end_with_2(url: str, words: list[str], complaint: str) -> None:
    assert complaint in unwrapped(called(*(word.replace("{url}", url) for word in words), code=2))
    assert counts(url) == [9] * 6


@pytest.mark.parametrize("command", ["compact", "gc", "verify", "stats"])
def test_a_store_that_is_not_there_is_a_failure(tmp_path: Path, command: str) -> None:
    assert "there is no store here" in called(command, (tmp_path / "typo").as_uri(), code=1)


def test_prune_and_delete(url: str) -> None:
    called("prune", url, THREADS[0], THREADS[1])
    called("prune", url, THREADS[2], "--strategy", "delete")
    called("delete", url, THREADS[3])
    assert counts(url) == [1, 1, 0, 0, 9, 9]
    called("delete", url, "nobody")


def test_prune_names_what_fails(url: str, tmp_path: Path) -> None:
    damage(tmp_path, THREADS[0])
    assert f"failed: {THREADS[0]}: " in called("prune", url, *THREADS[:2], code=1)
    with LSMSaver.from_conn_string(url) as saver:
        assert len(listed(saver, at(THREADS[1]))) == 1


@pytest.mark.parametrize("command", ["gc", "compact", "expire"])
def test_a_short_grace_needs_to_be_told_that_nobody_uses_the_store(url: str, command: str) -> None:
    words = [command, url, "--grace", "9m", *(["--max-age", "365d"] if command == "expire" else [])]
    said = called(*words, code=2)
    assert "--offline" in said
    assert "600 s" in said
    called(*words, "--offline")
    called(*words[:2], *words[4:], "--grace", "10m")
    with pytest.raises(ValueError, match="offline=True"):
        compact_store(url, grace=timedelta(minutes=9))


def test_what_waits_for_the_grace_is_said_at_the_end(url: str) -> None:
    assert "wait until" not in called("gc", url)
    said = called("prune", url, THREADS[0])
    assert "are garbage and wait until" in said
    left = as_json("prune", url, THREADS[0])
    for words in (["compact", url], ["expire", url, "--max-age", "365d"], ["gc", url]):
        found = as_json(*words)
        assert found["waiting_objects"] >= left["waiting_objects"] > 0
        assert found["waiting_bytes"] >= left["waiting_bytes"] > 0
        assert datetime.fromisoformat(found["collectable_at"]) >= datetime.fromisoformat(left["collectable_at"])
    assert "are garbage and wait until" in called("gc", url)
    called("gc", url, "--grace", "0s", "--offline")
    assert as_json("gc", url)["collectable_at"] is None


def test_gc(url: str, tmp_path: Path) -> None:
    called("compact", url)
    assert as_json("gc", url)["freed_objects"] == 0
    assert as_json("gc", url, "--grace", "0s", "--offline", "--dry-run")["freed_objects"] == 54
    assert called("gc", url, "--grace", "0s", "--offline").startswith("54 objects of ")
    (tmp_path / manifest_key(THREADS[0])).unlink()
    damaged = tmp_path / manifest_key(THREADS[1])
    damaged.write_bytes(b"nonsense")
    found = as_json("gc", url, "--grace", "0s", "--offline", code=1)
    assert (found["freed_objects"], list(found["failures"])) == (1, [manifest_key(THREADS[1])])


def test_verify(url: str, tmp_path: Path) -> None:
    assert "6 threads with 54 checkpoints" in called("verify", url)
    assert as_json("verify", url)["problems"] == {}
    path = tmp_path / manifest_key(THREADS[0])
    whole = path.read_bytes()
    with LSMSaver.from_conn_string(url) as saver:
        chain(saver, THREADS[0], [{"value": 1}])
    more = path.read_bytes()
    path.write_bytes(more + b"\0" * 50)
    assert "1 manifests end in what a crash left behind" in called("verify", url)
    assert "1 of them repaired" in called("verify", url, "--repair")
    assert path.read_bytes() == more != whole
    damage(tmp_path, THREADS[5])
    found, output, errors = call("verify", url)
    assert found == 1
    assert f"problem: {THREADS[5]}: {segments_prefix(THREADS[5])}" in output
    assert errors.startswith(f"failed: {THREADS[5]}: ")
    assert list(as_json("verify", url, code=1)["problems"]) == [THREADS[5]]


def test_stats(url: str) -> None:
    found = as_json("stats", url)
    assert (found["threads"], found["checkpoints"], found["segments"]) == (6, 54, {"class 0": 54})
    called("compact", url)
    found = as_json("stats", url)
    assert (found["segments"], found["garbage_objects"]) == ({"class 0": 6}, 54)
    assert found["space_amplification"] > 1
    assert as_json("stats", url, THREADS[0])["checkpoints"] == 9
    assert "no thread 'nobody'" in called("stats", url, "nobody", code=1)
    assert "space amplification" in called("stats", url)


def test_options_of_an_object_store(s3: Any) -> None:
    address, options = s3.url(), s3.store_options
    fill(address, store_options=options)
    words = [f"--store-option={key}={value}" for key, value in options.items() if isinstance(value, str)]
    words += ["--store-option=aws_virtual_hosted_style_request=false", "--store-option=client_options.allow_http=true"]
    assert as_json("compact", address, *words)["compacted"] == 6
    assert as_json("verify", address, *words)["threads"] == 6


def test_the_command_itself(url: str) -> None:
    found = subprocess.run(command("compact", url), capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("6 threads, of which 0 were in shape and 6 looked at")
    assert "\x1b" not in found.stdout
    found = subprocess.run(command("compact", url, "--shard", "x"), capture_output=True, timeout=60, check=False)
    assert found.returncode == 2


def command(*words: str) -> list[str]:
    path = f"import sys; sys.path[:] = {sys.path!r}; "
    return [sys.executable, "-c", f"{path}from langgraph.checkpoint.lsm.cli import main; main()", *words]


def test_without_the_extra_it_says_what_to_install() -> None:
    script = """
sys.modules["typer"] = None
from langgraph.checkpoint.lsm.cli import main
main()
"""
    with processes.running(script, {}) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "langgraph-checkpoint-lsm[cli]" in errors
