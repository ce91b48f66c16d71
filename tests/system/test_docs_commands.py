"""Every command and every piece of Python that the docs show is run as it stands."""

import ast
import asyncio
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import harness
from harness import ServerSettings
from tests.checkout import ROOT
from tests.harness_command import harness as run_harness
from tests.harness_command import write_scenario
from tests.run_to_end import run_to_end
from tests.session_servers.scripted import scripted_server
from tests.shown_blocks import (
    PAGES,
    commands_on_path,
    forked_commands_on_path,
    is_quickstart_of_the_readme,
    shown_blocks,
)

START_S = 200  # a model that is loaded on a machine that does ten other things
BLOCK_S = 100
DOORS = {door.__name__: {*door.__all__} for door in (harness, harness.training)}
ADMIN_TOKEN = "the-token-of-the-operator"


def _blocks(language: str) -> list[object]:
    """Page and text of each block in that language; tests are called by page and line.

    Less the quickstart of the README, a minute of the real model, which is spent once.
    """
    return [
        pytest.param(block.page, block.text, id=f"{block.page}:{block.line}")
        for block in shown_blocks(language)
        if not is_quickstart_of_the_readme(block.page, block.text)
    ]


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
        env=forked_commands_on_path(tmp_path.with_name(f"{tmp_path.name}-bin")),
        check=False,
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert done.returncode == 0, f"{page}:\n{block}\n{done.stdout}{done.stderr}"


def _check_serves(command: str, directory: Path) -> None:
    port = re.search(r"--port (\d+)", command)
    assert port is not None
    server = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=directory, env=commands_on_path())
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


@pytest.mark.model
@pytest.mark.agent
@pytest.mark.parametrize(("page", "block"), _blocks("python"))
async def test_a_block_of_python_runs(page: str, block: str, tmp_path: Path) -> None:
    """A reader who saves a block as a file and runs it sees it end well.

    A block that wants a session server finds one in `SESSION_SERVER` and `HARNESS_ADMIN_TOKEN`, and `demo` is a run.
    """
    (tmp_path / "block.py").write_text(block)
    if "from examples." in block:  # the page says to copy the folder
        shutil.copytree(ROOT / "examples", tmp_path / "examples")
    if 'read_run("demo")' in block:
        scenario = write_scenario(tmp_path / "small")
        assert (await asyncio.to_thread(run_harness, "run", scenario, "--out", tmp_path / "demo")).code == 0
    async with scripted_server(settings=ServerSettings(admin_token=ADMIN_TOKEN)) as server:
        env = commands_on_path() | {"SESSION_SERVER": server.url, "HARNESS_ADMIN_TOKEN": ADMIN_TOKEN}
        code, output, errors = await run_to_end(sys.executable, "block.py", within_s=BLOCK_S, cwd=tmp_path, env=env)
    assert code == 0, f"{page}:\n{block}\n{output}{errors}"


@pytest.mark.parametrize(("page", "block"), _blocks("python"))
def test_a_block_of_python_uses_public_names_only(page: str, block: str) -> None:
    """Everything of ours comes from the front doors; the guard's own page imports the guard, which is no part of it."""
    imported = set()
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
            if node.module in DOORS:
                assert {alias.name for alias in node.names} <= DOORS[node.module]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in DOORS:
            assert node.attr in DOORS[ast.unparse(node.value)]
    assert not [module for module in imported - {*DOORS} if module.startswith("harness.")]
    assert page == "repeat-guard.md" or not [module for module in imported if module.startswith("server_patch")]


def test_make_targets_of_the_docs_exist() -> None:
    """`make WORD` in the docs is a recipe of the Makefile."""
    recipes = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    shown = {word for page in PAGES for word in re.findall(r"\bmake ([a-z-]+)`|\$ make ([a-z-]+)", page.read_text())}
    assert {word for pair in shown for word in pair if word} <= recipes
