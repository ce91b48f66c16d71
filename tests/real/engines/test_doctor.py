"""`harness engine doctor` on real servers, as a user runs it."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.lab.lanes import INSTALLED
from tests.real_engines import on_real

EXAMINED = {
    "token endpoint",
    "version spans",
    "prompt logprobs",
    "raw logprobs",
    "abort",
    "pause",
    "weight updates",
    "context length",
    "vocabulary",
    "tokenizer",
    "repeat guard",
}
"""Everything; the shared servers have a repeat guard."""


async def doctor(*arguments: str) -> tuple[int | None, Any]:
    """Exit code and document of the command."""
    command = (sys.executable, "-m", "harness", "engine", "doctor", *arguments, "--json")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return process.returncode, json.loads(output)


@pytest.fixture(name="url", params=[pytest.param(each, marks=on_real(each)) for each in INSTALLED])
def _url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


async def test_a_lane_has_everything(url: str, model_dir: Path):
    code, document = await doctor(url, "--model", str(model_dir))
    found = {finding["capability"]: finding for finding in document["findings"]}

    assert {name for name, finding in found.items() if finding["answer"] == "yes"} == EXAMINED
    assert (code, document["is_usable"]) == (0, True)
    assert document["version"].startswith(("0.5.", "0.32."))
    assert all(finding["evidence"] for finding in found.values())


async def test_an_address_without_an_engine_is_an_infrastructure_failure():
    """Exit code 6, and why."""
    code, document = await doctor("http://127.0.0.1:1")

    assert code == 6
    assert "cannot be reached" in document["error"]["message"]
