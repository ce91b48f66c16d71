"""What the wheel contains, and what the base install pulls in."""

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from deploy.clean_environments import MEGABYTE, check, measure
from harness.cli.installation.probes import EXTRAS
from harness.gateway.router.gateway_program import GatewayProgram
from tests.checkout import ROOT
from tests.fake_engines.workers import worker_processes
from tests.harness_command import announced, harness, start_harness, wait, write_scenario

TOP_LEVEL = {"harness", "server_patch", "session_harness-0.2.0.dist-info"}


@pytest.fixture(name="wheel_names")
def _wheel_names(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_has_its_packages_with_a_license_and_no_leftovers(wheel_names: list[str]) -> None:
    """Nothing of ours lands beside other people's packages: no top-level `agents`, `scenarios` or `tests`."""
    assert {name.split("/")[0] for name in wheel_names} == TOP_LEVEL
    assert [name for name in wheel_names if name.endswith("/licenses/LICENSE")]
    assert [name for name in wheel_names if name.endswith((".pyc", ".db", ".safetensors", ".gguf", ".log"))] == []


def test_the_wheel_ships_agents_scenarios_and_templates(wheel_names: list[str]) -> None:
    """What the repository offers is there after `pip install`, under our own namespace."""
    expected = {
        "harness/py.typed",
        "server_patch/environments/smg.txt",
        "server_patch/router/end_with_parent.py",
        "harness/lab/models/chatml_hermes.jinja",
        "harness/viewer/page/page.css",
        "harness/viewer/page/page.html",
        *(
            f"harness/viewer/page/{name}.js"
            for name in ("data", "keys", "live", "session", "sessions", "timeline", "tokens", "windowed")
        ),
        "harness/_bundled/agents/plain_chat/agent.py",
        "harness/_bundled/agents/react_chat/agent.py",
        "harness/_bundled/scenarios/quickstart/scenario.toml",
        "harness/_bundled/scenarios/quickstart/script.toml",
        "harness/_bundled/scenarios/long_session/scenario.toml",
        "harness/_bundled/scenarios/length_limited/scenario.toml",
    }
    assert expected - set(wheel_names) == set()


def test_agents_are_not_importable() -> None:
    """A package `agents` in this repository would shadow openai-agents."""
    assert list((ROOT / "agents").rglob("__init__.py")) == []
    spec = importlib.util.find_spec("agents")
    assert spec is None or spec.origin is None or "openai" in spec.origin or str(ROOT) not in spec.origin


def test_embedding_needs_no_uv() -> None:
    """Only commands build environments; a trainer that brings its own agents pays nothing for that."""
    code = "import sys; from harness import AgentTask, SessionManager, open_engine, serve; print('uv' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_every_dependency_is_imported_somewhere() -> None:
    """Nobody installs what nothing uses; an extra comes with the feature that needs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: wanted for name, wanted in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    wanted = [*project["dependencies"], *(each for group in extras.values() for each in group)]
    found = (re.match(r"opentelemetry|[\w-]+", each) for each in wanted)  # one namespace of many distributions
    names = {each[0].replace("-", "_") for each in found if each}
    files = [path for folder in ("harness", "bench") for path in (ROOT / folder).rglob("*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in files)
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", source, flags=re.MULTILINE))
    assert names - imported == set()


def test_the_release_installs_by_name(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a folder of its own, without any extra: `doctor` finds nothing wrong, and `demo` plays."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert check(wheel.parent, (version,)) == 1
    assert "demo: 4 games finished" in capsys.readouterr().out


def test_the_base_install_is_small(wheel: Path) -> None:
    """At most 45 packages beside our own, and 150 MB with it."""
    sizes = measure(wheel.parent, "")
    assert len(sizes) - 1 <= 45, sorted(sizes)
    assert sum(sizes.values()) / MEGABYTE <= 150, sizes


def test_the_list_of_extras_has_every_extra() -> None:
    """`python deploy/clean_environments.py sizes dist` writes it; `doctor` and pyproject.toml name the same ones."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs/start.md").read_text("utf-8")
    rows = re.findall(r"^- `(\w+)`, \+\d+, \+\d+: (.*)$", page, re.MULTILINE)
    assert dict(rows) == dict(EXTRAS)
    assert {*EXTRAS} == {*project["optional-dependencies"]} - {"dev", "docs"}


@pytest.mark.agent
async def test_a_router_and_a_run_on_it_work_outside_of_a_checkout(
    installed_wheel: Path, smg: GatewayProgram, tmp_path: Path
) -> None:
    """In a folder of nothing, with what the wheel brought: gateway, worker, sessions, agents, and the books balance."""
    del smg  # installed before anything is timed
    env = {"PYTHONPATH": str(installed_wheel), "HARNESS_ADMIN_TOKEN": "t0ken", "HARNESS_START_TIMEOUT": "120"}
    scenario = write_scenario(tmp_path / "s", samples_per_prompt=1)
    place = tmp_path / "elsewhere"
    place.mkdir()
    where = [sys.executable, "-c", "import harness, server_patch; print(harness.__file__, server_patch.__file__)"]
    found = subprocess.run(where, cwd=place, env={**os.environ, **env}, capture_output=True, text=True, check=True)
    async with worker_processes() as workers:
        worker = await workers.start()
        arguments = ("--worker-urls", worker.url, "--tokenizer", tmp_path / "toy", "--port", "0", "--json")
        router = start_harness("router", *arguments, env=env, cwd=place, log=tmp_path / "router.log")
        try:
            url = (await asyncio.to_thread(announced, router))["url"]
            asked = ("run", scenario, "--server", url, "--out", place / "run", "--json")
            ended = await asyncio.to_thread(lambda: harness(*asked, env=env, cwd=place))
        finally:
            router.terminate()
            stopped = await asyncio.to_thread(wait, router)

    assert all(each.startswith(str(installed_wheel)) for each in found.stdout.split())
    assert ended.code == 0, ended.stderr
    assert (ended.document["scenarios"][0]["outcomes"], ended.document["ledger"]["difference"]) == ({"finished": 2}, 0)
    assert ended.document["ledger"]["trained"] > 0
    assert stopped.code == 0, (tmp_path / "router.log").read_text()
