"""Chance, fixed: what the tests, the saver and LangGraph draw is the same in every run.

Rules of this module:

- Fast tests depend on no luck. Each draws from a source that is made from its name: `random`, `os.urandom` (the
  engine's entropy, and `uuid4`), and LangGraph's `uuid6`, whose clock stands still and counts.
- Slow tests are there to meet what nobody has thought of: their sources are made from the run's seed, too.
- What the system decides stays free: the order of threads and processes, the wall clock, ports.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from langgraph.checkpoint.base import id as langgraph_ids

_YEAR_2020 = 0x01B21DD213814000 + 1_577_836_800 * 10**7
"""In `uuid6`'s time: in the past, so that what other processes make is later."""


@contextmanager
def fixed(name: str) -> Iterator[None]:
    """Draw everything from a source that is made from a name, until the end of the block.

    Args:
        name: What tells this source from the others.
    """
    before = random.getstate()
    random.seed(name)
    source = random.Random(f"bytes of {name}")
    with mock.patch.object(os, "urandom", source.randbytes):
        try:
            yield
        finally:
            random.setstate(before)


@contextmanager
def fixed_ids() -> Iterator[None]:
    """Have LangGraph's ids count from a fixed one, until the end of the block. Where blocks are nested, those of the
    outer one go on behind those of the inner."""
    before = langgraph_ids._last_v6_timestamp or 0
    langgraph_ids._last_v6_timestamp = _YEAR_2020
    standing = SimpleNamespace(time_ns=lambda: 0)
    try:
        with mock.patch.object(langgraph_ids, "time", standing):
            yield
    finally:
        langgraph_ids._last_v6_timestamp = max(before, langgraph_ids._last_v6_timestamp)
