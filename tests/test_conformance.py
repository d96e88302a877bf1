"""The official conformance suite for checkpointers, whole, on every backend."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import Capability

from langgraph.checkpoint.lsm import LSMSaver
from tests.conftest import Backend
from tests.support import azurite

BACKENDS = ["memory", "file", "s3", *(["azure"] if azurite.COMMAND else [])]


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
async def test_every_capability_of_the_official_suite_passes(backend: Backend) -> None:
    @checkpointer_test(name=f"LSMSaver on {backend.name}")
    async def lsm_saver() -> AsyncGenerator[LSMSaver, None]:
        async with backend.open() as saver:
            yield saver

    report = await validate(lsm_saver)

    failures = {name: result.failures for name, result in report.results.items() if result.failures}
    assert failures == {}
    assert {name for name, result in report.results.items() if result.detected and result.tests_passed} == {
        capability.value for capability in Capability
    }
    assert len(Capability) == 8
    assert report.conformance_level() == "FULL"
