"""What the agents that are libraries have in common: an instruction, a shell as their one tool, and a result.

Standard library only: it is imported in environments that differ, by way of `PYTHONPATH`.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

TIMEOUT_S = 120
LONGEST_OUTPUT = 10_000

_FINDS_MODEL = ("_API_KEY", "_API_BASE", "_BASE_URL", "_SESSION_ID")
_TOOL_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.endswith(_FINDS_MODEL)}
"""The environment of commands: a program that the model writes does not find the agent's session in it."""

MAX_TURNS = int(os.environ.get("HARNESS_MAX_TURNS", "50"))
MODEL = os.environ["OPENAI_MODEL"]


def read_instruction() -> str:
    """The task."""
    return Path(os.environ["HARNESS_INSTRUCTION_FILE"]).read_text(encoding="utf-8").strip()


def run_shell(command: str) -> str:
    """Run a shell command in the working directory; the result is what it printed, and its exit code.

    Args:
        command: The command line.
    """
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            env=_TOOL_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"[no end within {TIMEOUT_S} s]"
    output = done.stdout.decode(errors="replace")[:LONGEST_OUTPUT]
    print(f"$ {command}\n{output}", flush=True)
    return f"{output}[exit code {done.returncode}]"


def leave_result(answer: Any) -> None:
    """Print the answer and leave it for the harness."""
    print(f"assistant> {answer}", flush=True)
    result = json.dumps({"answer": str(answer)})
    Path(os.environ["HARNESS_RESULT_FILE"]).write_text(result, encoding="utf-8")
