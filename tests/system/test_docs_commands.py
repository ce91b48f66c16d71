"""Every command that the docs show is run as it stands."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.checkout import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
START_S = 60


def _blocks(language: str) -> list[tuple[str, str]]:
    pattern = re.compile(rf"^```{language}\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
    return [(page.name, block) for page in PAGES for block in pattern.findall(page.read_text(encoding="utf-8"))]


def _environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.model
@pytest.mark.agent
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("page", "block"), _blocks("sh"))
def test_a_block_of_commands_runs(page: str, block: str, tmp_path: Path, model_dir: Path) -> None:
    """A reader who copies a block gets what the text promises; servers start, answer and stop."""
    del model_dir  # fetched before, so that no block waits for it
    if block.startswith("harness serve"):
        _check_serves(block, tmp_path)
        return
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        env=_environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert done.returncode == 0, f"{page}:\n{block}\n{done.stdout}{done.stderr}"


def _check_serves(command: str, directory: Path) -> None:
    port = re.search(r"--port (\d+)", command)
    assert port is not None
    server = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=directory, env=_environment())
    try:
        _wait_for(f"http://127.0.0.1:{port[1]}/health", server)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"{url} did not answer")


@pytest.mark.parametrize(("page", "block"), _blocks("python"))
def test_a_block_of_python_runs(page: str, block: str) -> None:
    """Examples import what exists and are valid Python."""
    exec(compile(block, page, "exec"), {"__name__": "docs"})  # our own text


def test_make_targets_of_the_docs_exist() -> None:
    """`make WORD` in the docs is a recipe of the Makefile."""
    recipes = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    shown = {word for page in PAGES for word in re.findall(r"\bmake ([a-z-]+)`|\$ make ([a-z-]+)", page.read_text())}
    assert {word for pair in shown for word in pair if word} <= recipes
