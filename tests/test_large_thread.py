"""A thread much larger than memory should be is rewritten in flat memory: measured as the peak of a real process.

`LSM_TEST_MEGABYTES` sets the size; 2,000 MB unless given.
"""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from tests.support.checkpoints import at
from tests.support.processes import run

pytestmark = pytest.mark.processes

MEGABYTES = int(os.environ.get("LSM_TEST_MEGABYTES", "2000"))

MOST = 256
"""Megabytes that a process may take to rewrite a thread of any size."""

WRITE = """
import random
from langgraph.checkpoint.lsm import LSMSaver
from tests.support.checkpoints import at, put
from tests.test_large_thread import value

with LSMSaver.from_conn_string(ARGS["url"], fsync=False, compaction="off", cache_bytes=1 << 20) as saver:
    parent, left, number = at("thread"), ARGS["megabytes"] << 20, 0
    while left > 0:
        values = {f"channel-{number % 5}": value(number), "number": number}
        parent = put(saver, parent, values, step=number)
        left, number = left - len(value(number)), number + 1
print(number)
"""

REWRITE = """
import re
from pathlib import Path
from langgraph.checkpoint.lsm import LSMSaver

with LSMSaver.from_conn_string(ARGS["url"], fsync=False, compaction="off") as saver:
    getattr(saver, ARGS["method"])(*ARGS["arguments"])
# Not `ru_maxrss`: a process that is started takes over its parent's.
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024)
"""


def value(number: int) -> bytes:
    """Of all sizes: most of the bytes are in large values, most of the values are small."""
    return random.Random(number).randbytes((700, 9_000, 60_000, 4 << 20)[number % 4])


@pytest.mark.parametrize(
    "megabytes",
    [pytest.param(MEGABYTES, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=lambda megabytes: f"{megabytes} MB",
)
def test_memory_is_flat(tmp_path: Path, megabytes: int) -> None:
    url = tmp_path.as_uri()
    count = int(run(WRITE, {"url": url, "megabytes": megabytes}, seconds=600))
    # A copy moves every byte; compaction what it deems worth it.
    for method, *arguments in (("compact", "thread"), ("copy_thread", "thread", "copy"), ("compact", "copy")):
        peak = int(run(REWRITE, {"url": url, "method": method, "arguments": arguments}, seconds=600))
        print(f"{method}: {peak} MB")  # noqa: T201 (for those who ask with -s)
        assert peak <= MOST, f"{method} took {peak} MB"
    with LSMSaver.from_conn_string(url, compaction="off", cache_bytes=1 << 20) as saver:
        for name in ("thread", "copy"):
            for found in itertools.islice(saver.list(at(name)), 0, None, max(1, count // 20)):
                number = found.metadata["step"]
                assert found.checkpoint["channel_values"][f"channel-{number % 5}"] == value(number)
        saver.prune(["thread", "copy"])
        saver._runtime.run(saver._engine.collect(0))
        assert [found.metadata["step"] for found in saver.list(None)] == [count - 1] * 2
    left = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert left < 2 * 5 * (5 << 20), "what was pruned is still there"
