"""Fixtures of all tests: the backends, and one S3 server (one Azure server) for the whole run.

`backend` runs a test once for each backend: `memory://`, `file://` and S3. Each test gets a store of its own.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from langgraph.checkpoint.lsm import LSMSaver
from tests.support import azurite
from tests.support.moto import MotoServer, moto_server

BUCKET = "checkpoints"


@dataclass(frozen=True)
class Backend:
    """Where the store of one test is.

    Attributes:
        name: `"memory"`, `"file"`, `"s3"` or `"azure"`.
        url: Address of the store, as `LSMSaver.from_conn_string` takes it.
        options: What goes with it: `LSMSaver.from_conn_string(backend.url, **backend.options)`.
    """

    name: str
    url: str
    options: dict[str, Any] = field(default_factory=dict)

    def open(self, **options: Any) -> LSMSaver:
        """A new saver on the store."""
        return LSMSaver.from_conn_string(self.url, **self.options, **options)


@dataclass(frozen=True)
class S3:
    """A bucket on the S3 server of this run."""

    server: MotoServer
    bucket: str
    store_options: dict[str, Any]
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def url(self, prefix: str | None = None) -> str:
        """Address of a store in the bucket: at `prefix`, or at a place that no test has used yet."""
        return f"s3://{self.bucket}/{prefix if prefix is not None else f'store-{next(self._numbers)}'}"


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    with moto_server() as server:
        yield S3(server, server.make_bucket(BUCKET), server.store_options)


@dataclass(frozen=True)
class Azure:
    """A container on the Azure blob server of this run."""

    container: str
    store_options: dict[str, Any]

    def url(self) -> str:
        """Address of a store in the container, at a place that no test has used yet."""
        return f"az://{self.container}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def azure() -> Iterator[Azure]:
    with azurite.azurite_server() as server:
        yield Azure(server.make_container(BUCKET), server.store_options)


@pytest.fixture(params=["memory", "file", "s3"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """A fresh store on each kind of backend."""
    match request.param:
        case "memory":
            return Backend("memory", f"memory://{uuid.uuid4().hex}")
        case "file":
            return Backend("file", (tmp_path / "store").as_uri())
        case "s3":
            s3: S3 = request.getfixturevalue("s3")
            return Backend("s3", s3.url(), {"store_options": s3.store_options})
        case "azure":
            azure: Azure = request.getfixturevalue("azure")
            return Backend("azure", azure.url(), {"store_options": azure.store_options})
        case other:
            raise ValueError(other)
