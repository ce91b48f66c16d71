"""What the wheel contains, and what the base install pulls in."""

import importlib.util
import re
import subprocess
import sys
import tomllib
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
        "harness/models/chatml_hermes.jinja",
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


def test_embedding_needs_no_uv() -> None:
    """Only commands build environments; a trainer that brings its own agents pays nothing for that."""
    code = "import sys; from harness import AgentTask, SessionManager, open_engine, serve; print('uv' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_every_dependency_is_imported_somewhere() -> None:
    """Nobody installs what nothing uses; an extra comes with the feature that needs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: wanted for name, wanted in project["optional-dependencies"].items() if name != "dev"}
    wanted = [*project["dependencies"], *(each for group in extras.values() for each in group)]
    names = {re.split(r"[<>=]", each)[0].replace("-", "_") for each in wanted}
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "harness").rglob("*.py"))
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", source, flags=re.MULTILINE))
    assert names - imported == {
        "httptools"
    }  # uvicorn's protocol, which `server/http_protocol.py` extends, is made of it


def test_the_wheel_carries_its_license(wheel_names: list[str]) -> None:
    """Whoever installs it may read under which terms."""
    assert [name for name in wheel_names if name.endswith("/licenses/LICENSE")]
