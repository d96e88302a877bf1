"""Fixtures of all tests: the backends, and one S3 server (one Azure server) for the whole run.

`backend` runs a test once for each backend: `memory://`, `file://` and S3. Each test gets a store of its own.

Fast tests draw the same in every run, hypothesis included (`tests.support.chance`). Slow ones draw anew, from the seed
that the head of the report names; `--seed` repeats it.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from langgraph.checkpoint.lsm import LSMSaver
from tests.support import azurite
from tests.support.chance import fixed, fixed_ids
from tests.support.moto import MotoServer, moto_server

BUCKET = "checkpoints"

settings.register_profile("fast", derandomize=True, database=None)
settings.register_profile("quick", derandomize=True, database=None, phases=(Phase.explicit, Phase.generate))
settings.register_profile("slow", database=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", help="what slow tests draw from; a fresh one if left out")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose what is drawn from: before any test is defined, and, with several workers, for all of them."""
    option = config.option
    given = getattr(config, "workerinput", {}).get("seed") or option.seed  # a worker draws from what the run draws from
    option.seed = given or str(random.SystemRandom().randrange(1 << 32))
    if _is_fast(config):
        settings.load_profile("fast")
        return
    settings.load_profile("slow")
    option.hypothesis_seed = option.hypothesis_seed or str(random.Random(option.seed).getrandbits(32))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist the seed of the run."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if _is_fast(config) else f"seed: slow tests draw from --seed {config.option.seed}"


def _is_fast(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "not slow")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> str:
    """What a test draws from: always the same for a fast one, the run's for a slow one."""
    slow = request.node.get_closest_marker("slow") is not None
    return request.config.option.seed if slow else "fast"  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _chance(request: pytest.FixtureRequest, seed: str) -> Iterator[None]:
    with fixed(f"{seed} {request.node.nodeid}"):
        yield


@pytest.fixture(autouse=True, scope="module")
def _ids(request: pytest.FixtureRequest) -> Iterator[None]:
    """By module, not by test: histories that several tests share go on growing."""
    shared = request.node.get_closest_marker("processes") is not None
    with nullcontext() if shared else fixed_ids():
        yield


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
