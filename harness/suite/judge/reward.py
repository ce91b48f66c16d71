"""From a finished session to its reward, by the scenario's `check.py`.

    def score(session: dict, result: dict | None, metadata: dict) -> float | dict: ...

A check runs in a process of its own with a deadline. One that raises, hangs, kills itself or returns something that is
no finite number costs its own session the reward and nothing else: the reason is in `Score.error`.
"""

import asyncio
import json
import math
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import ScenarioError
from harness.machine.process_group import reap, signal_group
from harness.types import Json

_RUNNER = Path(__file__).with_name("check_runner.py")
_MAX_ERROR = 500
"""Characters of a check's last words that are kept."""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a check on a session."""

    reward: float | None = None
    """None when the scenario has no check, or the check failed."""
    details: Json = field(default_factory=dict)
    """The rest of the check's answer, without the reward."""
    error: str | None = None
    """Why there is no reward although there is a check."""


async def score_session(check: Path, session: Json, result: Json | None, metadata: Json, *, deadline_s: float) -> Score:
    """The score that `check` gives."""
    request = {"check": str(check), "session": session, "result": result, "metadata": metadata}
    try:
        answer = await _run_check(json.dumps(request).encode(), deadline_s)
        if "error" in answer:
            raise ScenarioError(answer["error"])
        score = answer["score"]
        if not isinstance(score, dict):
            return Score(_finite(score))
        if "reward" not in score:
            raise ScenarioError(f"expected a number under 'reward', got the keys {sorted(score)}")
        return Score(_finite(score.pop("reward")), score)
    except ScenarioError as error:
        return Score(error=f"{check.name}: {error.message}")


async def _run_check(request: bytes, deadline_s: float) -> Any:
    """The runner's answer to `request`. Raises `ScenarioError` when the check leaves none."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        str(_RUNNER),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(deadline_s):
            output, messages = await process.communicate(request)
    except TimeoutError:
        raise ScenarioError(f"gave no score within {deadline_s:g} s") from None
    finally:
        # Nothing of the check is left, what it started included.
        signal_group(process.pid, signal.SIGKILL)
        await process.communicate()
        reap(process.pid)
    try:
        answer = json.loads(output)
        json.dumps(answer, ensure_ascii=False).encode()
        return answer
    except UnicodeEncodeError as error:
        raise ScenarioError(f"expected text, got a lone surrogate ({error})") from None
    except ValueError:
        last_words = messages.decode(errors="replace").strip()[-_MAX_ERROR:]
        raise ScenarioError(f"ended with code {process.returncode} and no score; {last_words}".rstrip("; ")) from None


def _finite(reward: object) -> float:
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise ScenarioError(f"expected a finite number as the reward, got {reward!r}")
    return float(reward)
