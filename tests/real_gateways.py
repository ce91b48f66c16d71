"""The real gateways, installed on first use like the engines."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.gateway.router.gateway_program import GatewayProgram, gateway_program


def _install(name: str) -> GatewayProgram:
    # In a thread of its own: a test with a running loop may ask for the fixture.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(gateway_program(name, print))).result()


@pytest.fixture(scope="session", name="smg")
def _smg() -> GatewayProgram:
    return _install("smg")


@pytest.fixture(scope="session", name="sglang_router")
def _sglang_router() -> GatewayProgram:
    return _install("sglang-router")
