"""A real Postgres server, from the machine's own package, for as long as a `with` block.

Rules of this module:

- The cluster is new, in a temporary folder, with the server's default settings: each commit is synced.
- It listens on a unix socket in that folder only. Postgres refuses to run as root; there it runs as `postgres`.
- It is gone on the way out, and goes by itself when this process dies (its standard input is ours to hold).
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.bench.environments import Unavailable

# Outlives neither its parent nor its `with` block: the pipe on standard input ends with either.
_KEEPER = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
server = subprocess.Popen(sys.argv[2:], user=sys.argv[1], start_new_session=True, **quiet)
sys.stdin.read()
server.send_signal(signal.SIGQUIT)
server.wait()
"""


class PostgresServer:
    """A running server.

    Attributes:
        version: As the server tells it.
    """

    def __init__(self, programs: Path, socket: Path, user: str) -> None:
        self._programs, self._socket, self._user = programs, socket, user
        self.version = self.query("show server_version").split()[0]

    def create(self, database: str) -> str:
        """Make a new database; answers how to connect to it."""
        self.query(f'create database "{database}"')
        return f"host={self._socket} user={self._user} dbname={database}"

    def size(self, database: str) -> int:
        """Bytes on disk of what was added to a database since it was made. Does not count the write-ahead log."""
        self.query("checkpoint")
        return int(self.query(f"select pg_database_size('{database}') - pg_database_size('template1')"))

    def query(self, statement: str) -> str:
        """Run one statement through `psql`."""
        command = [self._programs / "psql", "-XAtq", "-h", self._socket, "-U", self._user, "-d", "postgres"]
        done = subprocess.run([*command, "-c", statement], capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            raise RuntimeError(f"postgres: {done.stderr.strip()}")
        return done.stdout.strip()


@contextmanager
def postgres_server(parent: Path) -> Iterator[PostgresServer]:
    """Start a server whose cluster is in a new folder below `parent`.

    Raises:
        Unavailable: There is no Postgres on this machine.
    """
    programs = _programs()
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir=parent))
    user = None
    if os.geteuid() == 0:
        try:
            user = pwd.getpwnam("postgres").pw_name
        except KeyError:
            raise Unavailable("runs as root here, and there is no user `postgres` to run the server") from None
        shutil.chown(folder, user)
    name = user or pwd.getpwuid(os.geteuid()).pw_name
    try:
        initdb = [programs / "initdb", "-D", folder / "data", "-U", name, "-A", "trust", "-E", "UTF8", "--locale=C"]
        done = subprocess.run(initdb, user=user, cwd="/", capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"initdb failed: {done.stderr.strip()}")
        command = [programs / "postgres", "-D", folder / "data", "-k", folder, "-c", "listen_addresses="]
        keeper = subprocess.Popen(
            [sys.executable, "-c", _KEEPER, name, *map(str, command)], cwd="/", stdin=subprocess.PIPE
        )
        assert keeper.stdin is not None
        try:
            yield _when_ready(programs, folder, name, keeper)
        finally:
            keeper.stdin.close()
            keeper.wait(60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _programs() -> Path:
    """The folder with `initdb`, `postgres` and `psql`: Debian's newest, else where the path has them."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: float(folder.parent.name))
    on_path = [Path(folder) for folder in os.get_exec_path()]
    for folder in [*reversed(debian), *on_path]:
        if all((folder / program).exists() for program in ("initdb", "postgres", "psql")):
            return folder
    raise Unavailable("no Postgres server is installed (Debian: apt-get install postgresql)")


def _when_ready(programs: Path, folder: Path, user: str, keeper: subprocess.Popen[bytes]) -> PostgresServer:
    deadline = time.monotonic() + 60
    while True:
        try:
            return PostgresServer(programs, folder, user)
        except RuntimeError as error:
            if keeper.poll() is not None or time.monotonic() > deadline:
                raise Unavailable(f"the server does not start: {error}") from error
            time.sleep(0.1)
