"""Which interpreter runs a peer: ours where it has what the peer needs, else one of the peer's own.

Rules of this module:

- A peer's environment has the same versions of LangGraph as ours, so that only the savers differ; unless the peer
  does not work with them.
- Environments are kept under `build/bench/` and made once; the folder's name says what is in it.
- What cannot be installed raises `Unavailable`, with the installer's own words.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ("langgraph", "langgraph-checkpoint", "langchain-core")


class Unavailable(Exception):
    """A peer cannot take part here; the message is the reason."""


def interpreter(name: str, requires: Sequence[str], langgraph: Sequence[str] = ()) -> str:
    """Path of an interpreter that has these distributions.

    Args:
        name: The peer's name.
        requires: What it needs beside LangGraph, as pip takes it.
        langgraph: LangGraph as it needs it, where it does not work with ours.
    """
    if not langgraph and all(_version(_distribution(requirement)) for requirement in requires):
        return sys.executable
    shared = langgraph or [f"{distribution}=={metadata.version(distribution)}" for distribution in SHARED]
    wanted = [*requires, *shared]
    digest = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()[:8]
    folder = ROOT / "build" / "bench" / "environments" / f"{name}-{digest}"
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if not complete.exists():
        print(f"  installing {', '.join(requires)} for {name} ...", file=sys.stderr, flush=True)
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted)
        complete.touch()
    return str(python)


def _distribution(requirement: str) -> str:
    """The distribution that must be there: `psycopg[binary]` is `psycopg-binary`, `x[s3]` is not told from `x`."""
    name, _, extra = requirement.rstrip("]").partition("[")
    return f"{name}-{extra}" if extra == "binary" else name


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise Unavailable(f"cannot be installed: {' '.join(last)}")
