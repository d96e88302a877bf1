"""`make demo` tells the truth: it is run as a user runs it, and its claims are read from what it prints.

The demo itself ends with exit code 1 where a tool ran twice, or the fork changed what it left; here it is made
sure that it ran through, and that it was about something.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def said() -> str:
    command = [sys.executable, "tools/demo.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def number(pattern: str, said: str) -> int:
    found = re.search(pattern, said)
    assert found, f"nothing like {pattern!r} in:\n{said}"
    return int(found[1].replace(",", ""))


def test_the_kill_comes_in_the_middle_of_a_step(said: str) -> None:
    assert number(r"Tool calls of the unfinished step in the store: (\d+) of 2", said) == 1
    assert number(r"The agent has called (\d+) tools", said) >= 2


def test_nothing_is_done_twice_and_nothing_is_left_out(said: str) -> None:
    documents = number(r"(\d+) documents\.", said)
    assert number(r"Tool calls in both processes: (\d+)", said) == 1 + 2 * documents
    assert number(r"Different ones: (\d+)", said) == 1 + 2 * documents
    assert f"All {documents} documents have a note." in said


def test_the_documents_are_those_of_this_project(said: str) -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        words = len(path.read_text(encoding="utf-8").split())
        assert re.search(rf"{re.escape(path.relative_to(ROOT).as_posix())} +\W+ +{words} ", said), said


def test_history_fork_and_files_are_shown(said: str) -> None:
    assert "the last 8 checkpoints" in said
    assert "the end" in said
    assert re.search(r"Of the \d+ that I have read: \S+\.md\.", said)
    assert re.search(r"The end of the first branch, \S+, is as it was\.", said)
    assert "manifests/" in said


def test_history_costs_less_than_its_checkpoints_written_out(said: str) -> None:
    assert 0 < number(r"Bytes on disk: ([\d,]+)", said) < number(r"written out whole: ([\d,]+)", said)
