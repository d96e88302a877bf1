"""The storages under test, and two ways to ask them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from lsm.storage import Storage, open_storage
from lsm.storage.objects import ObjectStorage
from tests.support import azurite


@pytest.fixture(params=["memory", "file", "s3", "obstore", *(["azure"] if azurite.COMMAND else [])])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """One of each, empty: `obstore` is a ready store (obstore's own in memory) with a prefix of ours."""
    match request.param:
        case "memory":
            opened = open_storage("memory://")
        case "file":
            opened = open_storage((tmp_path / "root").as_uri())
        case "obstore":
            opened = ObjectStorage(MemoryStore(), "some/prefix")
        case "azure":
            azure = request.getfixturevalue("azure")
            opened = open_storage(azure.url(), store_options=azure.store_options)
        case _:
            s3 = request.getfixturevalue("s3")
            opened = open_storage(s3.url(), store_options=s3.store_options)
    yield opened
    opened.close()


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, storage: Storage) -> Iterator[Callable[[Any], Any]]:
    """Send a request to the storage, by `execute` or by `aexecute`."""
    if request.param == "sync":
        yield storage.execute
    else:
        with asyncio.Runner() as runner:
            yield lambda message: runner.run(storage.aexecute(message))
