"""A cache of its own for every test, in which the engines are installed already: as programs that play them."""

import sys
from pathlib import Path

import pytest

from harness.lab.lanes import INSTALLED, LaneSpec
from harness.lab.lanes.environment import Requirements

FAKE = Path(__file__).with_name("fake_python.py")


@pytest.fixture(name="cache")
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory, with a space in its name."""
    cache = tmp_path / "the cache"
    monkeypatch.setenv("HARNESS_CACHE", str(cache))
    return cache


@pytest.fixture(name="installed")
def _installed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache, where both engines are installed and serve."""
    monkeypatch.setenv("FAKE_ENGINE", "serve")
    for engine in INSTALLED:
        python = Requirements.of(engine).directory / "bin" / "python"
        python.parent.mkdir(parents=True)
        # A shell in between: a `#!` line cannot name an interpreter whose path has a space in it.
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n', encoding="utf-8")
        python.chmod(0o755)
    return cache


@pytest.fixture(name="weights")
def _weights(tmp_path: Path) -> Path:
    """A model folder of which a lane reads no more than the configuration."""
    folder = tmp_path / "toy-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 512}')
    return folder


@pytest.fixture(name="spec", params=INSTALLED)
def _spec(request: pytest.FixtureRequest, installed: Path, weights: Path) -> LaneSpec:
    """A lane of each engine."""
    return LaneSpec(request.param, weights)
