"""What the wheel contains, and what the base install pulls in."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.checkout import ROOT

TOP_LEVEL = {"harness", "server_patch", "session_harness-0.1.0.dist-info"}


@pytest.fixture(name="wheel_names")
def _wheel_names(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_has_one_package_and_its_metadata(wheel_names: list[str]) -> None:
    """Nothing of ours lands beside other people's packages: no top-level `agents`, `scenarios` or `tests`."""
    assert {name.split("/")[0] for name in wheel_names} == TOP_LEVEL


def test_the_wheel_ships_agents_scenarios_and_templates(wheel_names: list[str]) -> None:
    """What the repository offers is there after `pip install`, under our own namespace."""
    expected = {
        "harness/py.typed",
        "server_patch/environments/smg.txt",
        "server_patch/router/leash.py",
        "harness/tokens/templates/chatml_hermes.jinja",
        "harness/_bundled/agents/plain_chat/agent.py",
        "harness/_bundled/agents/react_chat/agent.py",
        "harness/_bundled/scenarios/quickstart/scenario.toml",
        "harness/_bundled/scenarios/long_session/scenario.toml",
        "harness/_bundled/scenarios/length_limited/scenario.toml",
    }
    assert expected - set(wheel_names) == set()


def test_the_wheel_has_no_leftovers(wheel_names: list[str]) -> None:
    """No caches, databases or weights."""
    assert [name for name in wheel_names if name.endswith((".pyc", ".db", ".safetensors", ".gguf", ".log"))] == []


def test_agents_are_not_importable() -> None:
    """A package `agents` in this repository would shadow openai-agents."""
    assert list((ROOT / "agents").rglob("__init__.py")) == []
    spec = importlib.util.find_spec("agents")
    assert spec is None or spec.origin is None or "openai" in spec.origin or str(ROOT) not in spec.origin


@pytest.mark.parametrize("module", ["harness.cli.main", "harness.server.serving", "harness.engines.base"])
def test_the_base_install_imports_nothing_heavy(module: str) -> None:
    """The library is usable without torch, transformers, pyarrow or an agent's SDK."""
    code = f"import sys, {module}; print([m for m in {sorted(HEAVY)} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


HEAVY = {"torch", "transformers", "pyarrow", "ray", "openai", "sglang", "vllm"}
