"""After `os.fork()`: a saver that does without a client goes on, one with a client that was used says so at once."""

from __future__ import annotations

import pytest

from tests.conftest import S3, Backend
from tests.support.processes import run

pytestmark = pytest.mark.processes

# The child has a deadline of its own: an object store's client would hang in it for good.
FORK = """
import os, signal
from langgraph.checkpoint.lsm import LSMSaver
from lsm.errors import ForkedProcessError
from tests.support.checkpoints import at, listed, put

saver = LSMSaver.from_conn_string(ARGS["url"], **ARGS["options"])
if ARGS["used"]:
    put(saver, at("thread"), {"a": "before the fork"})
child = os.fork()
if not child:
    signal.alarm(30)
    code = 1
    try:
        put(saver, at("thread"), {"a": "in the child"})
        saver.get_tuple(at("thread"))
        code = 0
    except ForkedProcessError as error:
        assert "fork" in str(error)
        code = 7
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
put(saver, at("thread"), {"a": "in the parent"})
values = [found.checkpoint["channel_values"]["a"] for found in saver.list(at("thread"))]
print(json.dumps([os.waitstatus_to_exitcode(status), values[::-1]]))
saver.close()
"""


def forked(backend: Backend, *, used: bool) -> str:
    return run(FORK, {"url": backend.url, "options": backend.options, "used": used})


@pytest.mark.parametrize("backend", ["file"], indirect=True)
def test_files_do_not_mind(backend: Backend) -> None:
    assert forked(backend, used=True) == '[0, ["before the fork", "in the child", "in the parent"]]\n'


@pytest.mark.parametrize("backend", ["memory"], indirect=True)
def test_in_memory_the_child_has_a_copy(backend: Backend) -> None:
    assert forked(backend, used=True) == '[0, ["before the fork", "in the parent"]]\n'


def test_a_client_that_was_not_used_before_works_in_the_child(s3: S3) -> None:
    backend = Backend("s3", s3.url(), {"store_options": s3.store_options})
    assert forked(backend, used=False) == '[0, ["in the child", "in the parent"]]\n'


def test_a_client_that_was_used_is_refused_in_the_child(s3: S3) -> None:
    backend = Backend("s3", s3.url(), {"store_options": s3.store_options})
    assert forked(backend, used=True) == '[7, ["before the fork", "in the parent"]]\n'
