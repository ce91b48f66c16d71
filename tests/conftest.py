"""Fixtures of every test."""

import ctypes
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from harness.models import resolve_model

pytest_plugins = (
    "tests.installed_harness",
    "tests.local_model",
    "tests.processes.fixtures",
    "tests.real_engines",
    "tests.real_gateways",
)


def pytest_configure() -> None:
    """Programs that tests start heed Ctrl+C, also when the tests are a background job of a shell, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", name="model_dir")
def _model_dir() -> Path:
    """The folder of the real model; fetching it is part of what is tested, so a failure is a failure."""
    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="module", autouse=True)
def _memory_given_back() -> Iterator[None]:
    """What the models of a module held goes back to the system: the allocator keeps gigabytes of it otherwise."""
    yield
    if sys.platform == "linux" and "torch" in sys.modules:
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(name="quiet_logs")
def _quiet_logs() -> Iterator[None]:
    """State machines do in a second what a server does in a day: nobody reads its log."""
    structlog.configure(processors=[_drop])
    yield
    structlog.reset_defaults()


def _drop(logger: Any, method: str, event: Any) -> Any:
    raise structlog.DropEvent
