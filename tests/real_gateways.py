"""The real gateways, installed on first use like the engines."""

import pytest

from harness.gateway.router.gateway_program import GatewayProgram, gateway_program


@pytest.fixture(scope="session", name="smg")
def _smg() -> GatewayProgram:
    return gateway_program("smg", print)


@pytest.fixture(scope="session", name="sglang_router")
def _sglang_router() -> GatewayProgram:
    return gateway_program("sglang-router", print)
