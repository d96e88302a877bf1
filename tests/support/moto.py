"""A real S3 server, moto's, in a process of its own.

Rules of this module:

- The server runs in a child process and ends with it: on the way out of `moto_server()`, and also when the
  parent was killed (the child reads its standard input to the end, and that end comes with the parent's).
- Requests are served one at a time. moto compares the condition of a write and then writes, without a lock;
  two threads of it would lose updates that S3 would not lose.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"
REGION = "us-east-1"


class MotoServer:
    """A running server.

    Attributes:
        endpoint: Its address, as in `http://127.0.0.1:54321`.
        store_options: What obstore needs to reach it (credentials, region, endpoint).
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.store_options = store_options(endpoint)

    def make_bucket(self, name: str) -> str:
        """Create a bucket and return its name."""
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            return name


def store_options(endpoint: str) -> dict[str, Any]:
    """What obstore needs to reach an S3 server of the tests at `endpoint` (moto itself, or a proxy of it)."""
    return {
        "aws_endpoint": endpoint,
        "aws_access_key_id": ACCESS_KEY,
        "aws_secret_access_key": SECRET_KEY,
        "aws_region": REGION,
        "aws_virtual_hosted_style_request": False,
        "client_options": {"allow_http": True},
    }


@contextmanager
def moto_server(*, check_credentials: bool = False) -> Iterator[MotoServer]:
    """Start an S3 server on a free port; it answers when this yields, and is gone when this returns.

    Args:
        check_credentials: Refuse every request but the first (which may create a bucket) unless it is signed by
            a known user. There are none, so that all credentials are wrong.

    Example:
        with moto_server() as moto:
            bucket = moto.make_bucket("checkpoints")
    """
    environment = dict(os.environ, MOTO_ALLOW_NONEXISTENT_REGION="true")
    if check_credentials:
        environment["INITIAL_NO_AUTH_ACTION_COUNT"] = "1"
    # -P: this file's folder is not a place to import from; it holds a module named like moto itself.
    process = subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline().decode().strip()
        if not port:
            raise RuntimeError(f"the moto server ended while starting, with code {process.wait(10)}")
        yield MotoServer(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def _serve() -> None:
    """The child process: serve, and end with the parent."""
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    application = create_backend_app("s3")
    one_at_a_time = threading.Lock()

    def serialised(environ: dict[str, Any], start_response: Any) -> Any:
        with one_at_a_time:
            return application(environ, start_response)

    server = make_server("127.0.0.1", 0, serialised, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")  # it listens already: who connects from now on is answered
    sys.stdout.flush()
    server.serve_forever()


def _end_with_the_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    _serve()
