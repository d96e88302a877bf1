"""Where peers store: folders, an S3 server behind a proxy, a Postgres server; and what a place weighs.

Rules of this module:

- Every peer has a fresh place for each workload, gone after it.
- S3 is the server of the tests, behind the proxy of the tests; one server per workload, so that no workload finds a
  server that another one filled.
- A service that only skipped peers need is not started.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tests.support.moto import ACCESS_KEY, SECRET_KEY, MotoServer, moto_server
from tests.support.proxy import Request, S3Proxy
from tools.bench.peers import REGION, Peer, Place
from tools.bench.postgres import PostgresServer, postgres_server


class Services:
    """The places of one run.

    Args:
        delay: Seconds by which the proxy delays each request.
        scratch: The folder under which files are stored.
    """

    def __init__(self, delay: float, scratch: Path) -> None:
        self._delay = delay
        self._scratch = scratch
        self._running = ExitStack()
        self._postgres: PostgresServer | None = None
        self._s3: tuple[MotoServer, S3Proxy] | None = None

    def close(self) -> None:
        """Stop what runs."""
        self._running.close()

    def postgres(self) -> PostgresServer:
        """The Postgres server, started when first asked for.

        Raises:
            tools.bench.environments.Unavailable: There is none on this machine.
        """
        if self._postgres is None:
            self._postgres = self._running.enter_context(postgres_server(self._scratch))
        return self._postgres

    @contextmanager
    def s3(self) -> Iterator[None]:
        """An S3 server and its proxy, while the block runs."""
        with moto_server() as moto, S3Proxy(moto.endpoint, delay=self._delay) as proxy:
            self._s3 = (moto, proxy)
            try:
                yield
            finally:
                self._s3 = None

    def place(self, peer: Peer, name: str) -> Place:
        """A fresh place for a peer; `name` is like no other's in this run."""
        place = Place(name, delay=self._delay)
        match peer.storage:
            case "file":
                return replace(place, directory=tempfile.mkdtemp(prefix=f"{name}-", dir=self._scratch))
            case "postgres":
                return replace(place, dsn=self.postgres().create(name))
            case "s3":
                moto, proxy = self._the_s3()
                keys = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
                return replace(place, endpoint=proxy.endpoint, bucket=moto.make_bucket(name), **keys)
            case _:
                return place

    def filling(self, place: Place) -> Place:
        """The same place for what is stored unmeasured: past the proxy, and without syncs."""
        return replace(place, endpoint=self._the_s3()[0].endpoint if place.bucket else "", filling=True)

    def requests(self) -> list[Request]:
        """The requests of the measurement that is going on, in order; `clear` them before it."""
        return self._the_s3()[1].requests

    def weigh(self, place: Place) -> int:
        """Bytes stored at a place."""
        if place.dsn:
            return self.postgres().size(place.name)
        if place.bucket:
            return self._weigh_bucket(place)
        return sum(path.stat().st_size for path in Path(place.directory).rglob("*") if path.is_file())

    def clear(self, place: Place) -> None:
        """Give back the space of a place."""
        if place.directory:
            shutil.rmtree(place.directory, ignore_errors=True)
        if place.dsn:
            self.postgres().query(f'drop database if exists "{place.name}" with (force)')

    def _the_s3(self) -> tuple[MotoServer, S3Proxy]:
        assert self._s3 is not None, "within `with services.s3()` only"
        return self._s3

    def _weigh_bucket(self, place: Place) -> int:
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self._the_s3()[0].endpoint,
            region_name=REGION,
            aws_access_key_id=place.access_key,
            aws_secret_access_key=place.secret_key,
        )
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket)
        return sum(entry["Size"] for page in pages for entry in page.get("Contents", []))
