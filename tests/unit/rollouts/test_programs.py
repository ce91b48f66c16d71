"""Programs with a PEP 723 header get an environment of their own."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from harness.errors import AgentError
from harness.rollouts.agents.programs import prepare_agent

HEADER = """# /// script
# requires-python = ">=3.11"
# dependencies = [{dependencies}]
# ///
"""


def write_script(directory: Path, *dependencies: str, source: str = "") -> Path:
    """An agent script in a folder whose name has a space in it."""
    script = directory / "my agent" / "agent.py"
    script.parent.mkdir()
    script.write_text(HEADER.format(dependencies=", ".join(f'"{name}"' for name in dependencies)) + source)
    return script


async def test_a_script_runs_in_an_environment_without_ours(tmp_path: Path):
    """Prepared several times at once, it is the same environment."""
    source = "import importlib.util as u, sys; print(u.find_spec('httpx'), sys.prefix)"
    script = write_script(tmp_path, source=source)

    agents = await asyncio.gather(*(prepare_agent(script) for _ in range(3)))

    assert agents == [agents[0]] * 3
    assert agents[0].name == "my agent"
    output = await asyncio.to_thread(subprocess.check_output, agents[0].command, text=True)
    assert output.startswith("None ")


@pytest.mark.parametrize(
    ("dependency", "words"),
    [("no such requirement!", "agent.py"), ("session-harness-no-such-package==1", "session-harness-no-such-package")],
)
async def test_an_environment_that_cannot_be_built_is_explained(tmp_path: Path, dependency: str, words: str):
    with pytest.raises(AgentError, match=words):
        await prepare_agent(write_script(tmp_path, dependency))


async def test_a_script_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(AgentError, match="no agent script at"):
        await prepare_agent(tmp_path / "agent.py")


async def test_preparing_takes_a_bounded_time(tmp_path: Path):
    with pytest.raises(AgentError, match=r"not ready within 0\.001 s"):
        await prepare_agent(write_script(tmp_path), deadline_s=0.001)


BACKEND = """
import json, os
from pathlib import Path

def build_wheel(directory, config_settings=None, metadata_directory=None):
    Path(os.environ["UV_CACHE_DIR"], "seen.json").write_text(json.dumps(dict(os.environ)))
    raise SystemExit("seen")
"""


async def test_the_build_of_a_dependency_sees_no_token_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Building a package runs its code, as whoever prepares the agent."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "backend.py").write_text(BACKEND)
    (package / "pyproject.toml").write_text(
        '[project]\nname = "looks-around"\nversion = "1"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path))
    wanted = {
        "UV_INDEX_OURS_PASSWORD": "of the index",
        "SSL_CLIENT_CERT": str(tmp_path / "client.pem"),  # without it an index that asks for one refuses
        "XDG_CONFIG_DIRS": str(tmp_path / "etc"),  # where an administrator names the indexes
    }
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    secrets = ("HARNESS_ADMIN_TOKEN", "HARNESS_ENGINE_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY")
    for name in secrets:
        monkeypatch.setenv(name, "secret")
    with pytest.raises(AgentError, match="seen"):
        await prepare_agent(write_script(tmp_path, f"looks-around @ {package.as_uri()}"))

    seen = json.loads((tmp_path / "seen.json").read_text())
    assert not set(secrets) & set(seen)
    assert seen["HOME"] == os.environ["HOME"]
    assert wanted.items() <= seen.items()
