"""Fixtures of every test."""

from pathlib import Path

import pytest

from harness.models import resolve_model

pytest_plugins = ("tests.real_engines", "tests.installed")


@pytest.fixture(scope="session", name="model_dir")
def _model_dir() -> Path:
    """The folder of the real model; fetching it is part of what is tested, so a failure is a failure."""
    return resolve_model("smollm2-135m-instruct")
