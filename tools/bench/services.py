"""Where peers store: folders, an S3 server behind a proxy, a Postgres server; and what a place weighs.

Rules of this module:

- Every peer has a fresh place for each workload, gone after it: no workload finds a server that another one filled.
- S3 is the server of the tests, behind the proxy of the tests. One that failed is replaced.
- A service starts when it is first asked for: one that only skipped peers need never does.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

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
        self._s3_running = self._running.enter_context(ExitStack())

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

    def s3(self) -> tuple[MotoServer, S3Proxy]:
        """The S3 server and its proxy, started when first asked for, and again where they failed."""
        if self._s3 is None:
            moto = self._s3_running.enter_context(moto_server())
            self._s3 = moto, self._s3_running.enter_context(S3Proxy(moto.endpoint, delay=self._delay))
        return self._s3

    def place(self, peer: Peer, name: str) -> Place:
        """A fresh place for a peer; `name` is like no other's in this run."""
        place = Place(name, delay=self._delay)
        match peer.storage:
            case "file":
                return replace(place, directory=tempfile.mkdtemp(prefix=f"{name}-", dir=self._scratch))
            case "postgres":
                return replace(place, dsn=self.postgres().create(name))
            case "s3":
                moto, proxy = self.s3()
                keys = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
                return replace(place, endpoint=proxy.endpoint, bucket=moto.make_bucket(name), **keys)
            case _:
                return place

    def filling(self, place: Place) -> Place:
        """The same place for what is stored unmeasured: past the proxy, and without syncs."""
        return replace(place, endpoint=self.s3()[0].endpoint if place.bucket else "", filling=True)

    def forget_requests(self) -> None:
        """Count from here on."""
        self.s3()[1].clear()

    def requests(self, place: Place) -> list[Request]:
        """The requests of a place since `forget_requests`, in order; what others do meanwhile is not in it."""
        return [request for request in self.s3()[1].requests if request.bucket == place.bucket]

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
        if place.bucket and self._s3 is not None:
            try:
                self._delete_bucket(place)
            except (BotoCoreError, ClientError):  # the server is of no use to the next workload
                self._s3 = None
                self._s3_running.close()

    def _weigh_bucket(self, place: Place) -> int:
        return sum(entry["Size"] for page in self._pages(place) for entry in page)

    def _delete_bucket(self, place: Place) -> None:
        for page in self._pages(place):
            keys = [{"Key": entry["Key"]} for entry in page]
            self._client(place).delete_objects(Bucket=place.bucket, Delete={"Objects": keys, "Quiet": True})
        self._client(place).delete_bucket(Bucket=place.bucket)

    def _pages(self, place: Place) -> Iterator[list[Any]]:
        """What a bucket holds; each page before anything of it is deleted."""
        for page in self._client(place).get_paginator("list_objects_v2").paginate(Bucket=place.bucket):
            if page.get("Contents"):
                yield page["Contents"]

    def _client(self, place: Place) -> Any:
        """A client that is not counted: it goes past the proxy."""
        return boto3.client(
            "s3",
            endpoint_url=self.s3()[0].endpoint,
            region_name=REGION,
            aws_access_key_id=place.access_key,
            aws_secret_access_key=place.secret_key,
            config=Config(connect_timeout=10, read_timeout=60, retries={"max_attempts": 1}),
        )
