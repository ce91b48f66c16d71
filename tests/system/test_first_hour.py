"""The first hour of somebody who has a fresh environment with the extra `run`, and nothing else of ours."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.machine.program import run_uv
from tests.checkout import ROOT
from tests.toy_model import write_toy_model

INSTALL_S = 600.0
COMMAND_S = 240.0
HEAVY = {
    "torch",
    "transformers",
    "pyarrow",
    "ray",
    "matplotlib",
    "openai",
    "renderers",
    "pytest",
    "tensorboardX",
    "wandb",
}

pytestmark = pytest.mark.timeout(900)  # it installs, and calls a dozen commands

_CUT = re.compile(r"(?<=drained after 3 turns: )\d+ generated = \d+ trained")

Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(name="prefix", scope="module")
def _prefix(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment in which somebody has said `pip install 'session-harness[run]'`."""
    prefix = tmp_path_factory.mktemp("fresh") / "venv"
    asyncio.run(run_uv("venv", "--python", sys.executable, str(prefix), deadline_s=INSTALL_S))
    asyncio.run(run_uv("pip", "install", "--python", str(prefix / "bin/python"), f"{wheel}[run]", deadline_s=INSTALL_S))
    return prefix


@pytest.fixture(name="call")
def _call(prefix: Path, tmp_path: Path) -> Call:
    """Calls `harness` of that environment in an empty folder."""
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [prefix / "bin/harness", *arguments],
            cwd=tmp_path,
            env=outside,
            check=False,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )

    return call


def test_the_install_brings_nothing_heavy(prefix: Path) -> None:
    """A handful of packages, none of them an engine, a learner or a plot."""
    listed = asyncio.run(run_uv("pip", "list", "--python", str(prefix / "bin/python"), "--format=json", deadline_s=60))
    names = {package["name"].lower() for package in json.loads(listed)}

    assert "session-harness" in names
    assert names & HEAVY == set()
    assert len(names) < 60


@pytest.mark.agent
def test_everything_that_the_start_page_says_works(call: Call, tmp_path: Path) -> None:
    """Play, look, compare, begin, run: each with the exit code that is documented, and no download of weights."""
    demo = call("demo", "--out", "demo")
    assert demo.returncode == 0, demo.stderr
    assert "harness view" in demo.stdout
    [shown] = re.findall(r"^\$ harness demo\n(.*?)^\$ ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    # A busy machine samples a token or two more before the abort.
    assert _CUT.sub("", demo.stderr) == _CUT.sub("", shown)
    for arguments in (
        ("show", "demo/sessions.db"),
        ("view", "demo/sessions.db", "--out", "demo.html"),
        ("init", "mine"),
        ("run", "mine", "--out", "one"),
        ("run", "mine", "--out", "two"),
        ("diff", "one", "two"),
        ("view", "one", "--out", "one.html"),
        ("replay", "one", "0"),
        ("run", "quickstart", "--engine", "scripted", "--out", "quick"),
    ):
        done = call(*arguments)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    assert "<script" in (tmp_path / "one.html").read_text(encoding="utf-8")

    assert call("run", "mine", "--out", "one").returncode == 4  # there is a run already
    local = call("run", "quickstart", "--engine", "local", "--out", "local")
    assert local.returncode != 0
    assert "session-harness[local]" in local.stderr


def test_a_family_that_needs_another_package_says_so(call: Call, tmp_path: Path) -> None:
    """Not at the second turn, and not by a branch for every turn."""
    write_toy_model(tmp_path / "toy")
    template = tmp_path / "rewrites.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}{% if loop.last %} LAST{% endif %}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}<|im_start|>assistant\n"
    )
    served = call("serve", "--engine", "sglang=http://127.0.0.1:1", "--tokenizer", "toy", "--template", str(template))
    assert served.returncode == 6, served.stderr
    assert "session-harness[renderers]" in served.stderr
