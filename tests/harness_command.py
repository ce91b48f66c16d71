"""Scenario folders for tests, and the `harness` command as a real process."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from tests.toy_model import write_toy_model
from tests.warm_harness import warm_harness

AGENT = '''
# /// script
# requires-python = ">=3.11"
# ///
"""Asks for a turn as often as its metadata says; ends well when the session is over. Standard library only."""

import json, os, pathlib, sys, time, urllib.error, urllib.request

metadata = json.loads(os.environ["HARNESS_METADATA"])
messages = [{"role": "user", "content": pathlib.Path(os.environ["HARNESS_INSTRUCTION_FILE"]).read_text()}]
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
turns = 0
while turns < metadata.get("turns", 2):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        print("refused:", error.code, error.read().decode(), flush=True)
        if error.code == 404:
            break
        sys.exit(1)
    turns += 1
    print("assistant>", answer["content"], flush=True)
    messages += [answer, {"role": "user", "content": "Go on."}]
    time.sleep(metadata.get("pause_s", 0))
pathlib.Path(os.environ["HARNESS_RESULT_FILE"]).write_text(json.dumps({"turns": turns}))
'''

CHECK = """
def score(session, result, metadata):
    return {"reward": len(session["turns"]) / 10, "told": result["turns"] if result else None}
"""

SCRIPT: dict[str, Any] = {"steps": [{"text": "One."}, {"text": "Two and more."}]}


def write_scenario(
    directory: Path, *, check: str | None = CHECK, program: str = AGENT, script: Mapping[str, Any] = SCRIPT, **keys: Any
) -> Path:
    """A scenario of two groups of two sessions on a scripted engine; `keys` replace those of its scenario.toml."""
    directory.mkdir(parents=True, exist_ok=True)
    toy = write_toy_model(directory.parent / "toy")
    scenario = {
        "schema_version": 1,
        "name": directory.name,
        "description": "For tests.",
        "samples_per_prompt": 2,
        "seed": 3,
        "agent": {"profile": "agent.py", "deadline_s": 60.0},
        "engine": {"name": "scripted", "model": str(toy), "script": "script.toml"},
        "prompts": [{"metadata": {"turns": 2}}, {"metadata": {"turns": 3}}],
        **keys,
    }
    (directory / "scenario.toml").write_text(tomli_w.dumps(scenario))
    (directory / "script.toml").write_text(tomli_w.dumps(script))
    (directory / "instruction.md").write_text("Say something.")
    (directory / "agent.py").write_text(program.lstrip())
    if check is not None:
        (directory / "check.py").write_text(check)
    return directory


def make_quick(scenario: Path, run: Path) -> None:
    """Let sessions of hundreds of turns end soon when they run again, without changing the configuration of the run."""
    for path in (scenario / "scenario.toml", run / "config.toml"):
        path.write_text(re.sub(r"turns = \d{3,}", "turns = 3", path.read_text()))


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """What `--json` printed."""
        return json.loads(self.stdout)


def harness(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout_s: float = 240
) -> Ended:
    """Run `harness` to its end."""
    environment = {**os.environ, **(env or {})}
    if warm_harness().suits(environment):
        return Ended(*warm_harness().run([*map(str, arguments)], environment, cwd or Path.cwd(), timeout_s))
    with start_harness(*arguments, env=env, cwd=cwd) as process:
        return wait(process, timeout_s)


def start_harness(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None, log: Path | None = None
) -> subprocess.Popen[str]:
    """Start `harness` in a process group of its own; what it says goes to `log`, for those that say much."""
    with ExitStack() as stack:
        return subprocess.Popen(
            [sys.executable, "-m", "harness", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if log is None else stack.enter_context(log.open("w")),
            text=True,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )


def announced(process: subprocess.Popen[str]) -> Any:
    """The document that a server prints with `--json` once it answers."""
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    while lines[-1] not in ("}\n", ""):
        lines.append(process.stdout.readline())
    return json.loads("".join(lines))


def wait(process: subprocess.Popen[str], timeout_s: float = 240) -> Ended:
    """Wait for the end of `process`; one that does not end is killed and fails the test."""
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Ended(process.returncode, stdout, stderr)


def wait_for(path: Path, needle: str = "", timeout_s: float = 120) -> None:
    """Wait until the file `path` exists and holds `needle`."""
    deadline = time.monotonic() + timeout_s
    while not (path.is_file() and needle in path.read_text(errors="replace")):
        assert time.monotonic() < deadline, f"{path} does not come to hold {needle!r}"
        time.sleep(0.05)
