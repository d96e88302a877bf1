"""Python code in processes of its own, that end when the test ends.

Rules of this module:

- The code is a script's text; it gets one argument, a JSON object, as `ARGS`. It runs with the same interpreter
  and import path as the tests.
- A process that outlives its `with` block is killed, with the group that it leads; one that takes too long fails the
  test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_PRELUDE = "import faulthandler, json, sys; sys.path[:] = json.loads(sys.argv[2]); ARGS = json.loads(sys.argv[1])\n"


@contextmanager
def running(
    script: str,
    arguments: Mapping[str, Any],
    *,
    folder: Path | None = None,
    talk: bool = False,
    group: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """Start a script; on the way out of the block it is killed if it still runs.

    Args:
        script: Python source.
        arguments: What the script finds in `ARGS`; JSON.
        folder: Its working directory.
        talk: Whether it has a standard input to be told something by.
        group: Whether it leads a process group of its own, as what is started from a terminal does.
    """
    command = [sys.executable, "-c", _PRELUDE + script, json.dumps(dict(arguments)), json.dumps(sys.path)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE if talk else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        process_group=0 if group else None,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        if group:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def output(process: subprocess.Popen[str], *, seconds: float = 60) -> str:
    """Wait for the process to end well, and return what it printed.

    Raises:
        AssertionError: It failed, or took longer than `seconds`; with what it wrote to its standard error.
    """
    try:
        printed, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        printed, errors = process.communicate()
        raise AssertionError(f"still running after {seconds} s\n{printed}\n{errors}") from None
    assert process.returncode == 0, f"ended with {process.returncode}\n{printed}\n{errors}"
    return printed


def run(script: str, arguments: Mapping[str, Any], *, seconds: float = 60) -> str:
    """Run a script to its end, and return what it printed."""
    with running(script, arguments) as process:
        return output(process, seconds=seconds)
