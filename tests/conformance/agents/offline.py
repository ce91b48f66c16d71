"""Plays the scenes where there is no network: in a namespace that has loopback and nothing else.

A kernel that refuses the namespace leaves the agents a proxy where nobody listens.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.rollouts.agents.install import install_agent
from harness.rollouts.agents.programs import bundled_profile
from tests.checkout import ROOT
from tests.conformance.agents.parts import AGENTS
from tests.conformance.agents.scenes import QWEN3, Findings
from tests.conformance.families.packages import fetch_tokenizer

NAMESPACE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
NOWHERE = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
OPERATORS = {"ANTHROPIC_API_KEY": "sk-of-the-operator", "OPENAI_API_KEY": "sk-of-the-operator"}


def play_offline(names: Sequence[str] = ()) -> Findings:
    """Every scene with every agent, or those with `names`, which are installed first."""
    chosen = names or AGENTS
    fetch_tokenizer(QWEN3)
    for name in chosen:
        asyncio.run(install_agent(bundled_profile(name), print))
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        found = Path(folder) / "findings.json"
        run_offline("tests.conformance.agents.scenes", folder, str(found), *chosen)
        return msgspec.json.decode(found.read_bytes(), type=Findings)


def run_offline(module: str, *arguments: str) -> None:
    """Run a module of this checkout as a program that has no network but loopback."""
    subprocess.run(
        [*_namespace(), sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, **NOWHERE, **OPERATORS, "NO_PROXY": "127.0.0.1"},
        check=True,
    )


def _namespace() -> tuple[str, ...]:
    if shutil.which("unshare") and shutil.which("ip"):
        tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False)
        if not tried.returncode:
            return NAMESPACE
    return ()
