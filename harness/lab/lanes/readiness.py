"""Readiness of a lane: it has generated a token. No log line and no health endpoint counts.

A server that dies before is reported with the end of its log and advice.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import LaneError
from harness.lab.lanes.spec import LaneEngine
from harness.lab.lanes.state import Lane

if TYPE_CHECKING:
    import httpx

_POLL_S = 0.25
_ANSWER_S = 60.0  # the first token of a server takes seconds
_TAIL_LINES = 20
_PROMPT = (1,)  # an id that every vocabulary has


async def until_it_generates(lane: Lane, *, deadline_s: float) -> None:
    """Return when `lane` has generated a token. Raises `LaneError` if it dies or takes longer than `deadline_s`."""
    import httpx  # here: a run without lanes starts sooner

    last = "nothing"
    try:
        async with asyncio.timeout(deadline_s), httpx.AsyncClient(base_url=lane.url, trust_env=False) as http:
            while last != "200":
                if not lane.is_running():
                    raise LaneError(_explain_death(lane))
                last = await _ask(http, lane)
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise LaneError(
            f"{lane.name} did not generate a token within {deadline_s:g} s, its last answer was {last};"
            f" the log is {lane.log}, its last lines are:\n{log_tail(lane.log)}"
        ) from None


async def _ask(http: "httpx.AsyncClient", lane: Lane) -> str:
    import httpx

    path = "/generate"
    body: dict[str, object] = {"input_ids": _PROMPT, "sampling_params": {"max_new_tokens": 1}}
    if lane.engine == LaneEngine.VLLM:
        path, body = "/v1/completions", {"model": lane.model, "prompt": _PROMPT, "max_tokens": 1}
    try:
        response = await http.post(path, json=body, timeout=_ANSWER_S)
    except httpx.HTTPError as error:
        return type(error).__name__
    return str(response.status_code)


def log_tail(log: Path) -> str:
    """Return the last lines of `log`."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])


_ADVICE = {
    "address already in use": "its port is taken: choose another with --port, or none to get a free one",
    "unrecognized arguments": "the engine does not know an argument after `--`: correct or remove it",
    "enomem": "memory ran out: stop other lanes (`harness engine list`) or take a smaller model",
    "cannot allocate memory": "memory ran out: stop other lanes (`harness engine list`) or take a smaller model",
    "no space left on device": "the disk is full: free some space",
}


def _explain_death(lane: Lane) -> str:
    text = lane.log.read_text(encoding="utf-8", errors="replace").lower()
    known = (advice for symptom, advice in _ADVICE.items() if symptom in text)
    advice = next(known, "if it names no cause it was killed from outside, most likely because memory ran out")
    return (
        f"{lane.name} ended while it started; {advice}; the log is {lane.log}, its last lines are:\n"
        f"{log_tail(lane.log)}"
    )
