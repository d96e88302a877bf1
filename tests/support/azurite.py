"""A real Azure blob server, Microsoft's Azurite, where it is installed (`npm install --global azurite`).

Rules of this module:

- Without Azurite, `COMMAND` is `None`, and the tests that take it leave Azure out.
- The server is on a port of its own, keeps its blobs in a folder that goes with it, and ends with its parent.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from typing import Any

COMMAND = shutil.which("azurite-blob")

# The account that every Azurite has: https://learn.microsoft.com/azure/storage/common/storage-connect-azurite
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_WATCHED = '"$@" & read -r _; kill $!'  # standard input ends when the parent does


class AzuriteServer:
    """A running server.

    Attributes:
        store_options: What obstore needs to reach it (account, key, endpoint).
    """

    def __init__(self, port: int) -> None:
        self._endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        self.store_options: dict[str, Any] = {
            "account_name": ACCOUNT,
            "account_key": KEY,
            "endpoint": self._endpoint,
            "client_options": {"allow_http": True},
        }

    def make_container(self, name: str) -> str:
        """Create a container and return its name."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        signed = "".join(f"{each}:{value}\n" for each, value in headers.items())
        what = f"PUT{12 * chr(10)}{signed}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        digest = hmac.digest(base64.b64decode(KEY), what.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        url = f"{self._endpoint}/{name}?restype=container"
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=30):
            return name


@contextmanager
def azurite_server() -> Iterator[AzuriteServer]:
    """Start a server; it answers when this yields, and is gone when this returns.

    Example:
        with azurite_server() as azurite:
            container = azurite.make_container("checkpoints")
    """
    assert COMMAND is not None
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="azurite-") as folder:
        options = [
            "--blobPort",
            str(port),
            "--location",
            folder,
            "--silent",
            "--skipApiVersionCheck",
            "--disableTelemetry",
        ]
        process = subprocess.Popen(
            ["sh", "-c", _WATCHED, "sh", COMMAND, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        try:
            _wait_for(port)
            yield AzuriteServer(port)
        finally:
            process.stdin.close()
            process.wait(30)


def _wait_for(port: int) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
