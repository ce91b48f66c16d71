"""A scenario to train on in a second: a scripted engine, a function that plays, a check that any machine can do."""

import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from tests.harness_command import write_scenario
from tests.toy_model import write_toy_weights

PLAY = '''
"""Asks for turns as often as its metadata says; from the fifth rollout on they wait for a file that it may name."""

import asyncio
import pathlib

import httpx

begun = 0


async def run(base_url, prompt, request_kwargs, metadata, session_id, api_key):
    global begun
    begun += 1
    while begun > 4 and not pathlib.Path(metadata.get("waits_for", "/")).exists():
        await asyncio.sleep(0.05)
    messages = [{"role": "user", "content": prompt}]
    turns = 0
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, timeout=30) as client:
        while turns < metadata["turns"]:
            answer = await client.post(f"{base_url}/chat/completions", json={"messages": messages, **request_kwargs})
            if answer.status_code == 404:
                break
            answer.raise_for_status()
            turns += 1
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            await asyncio.sleep(metadata.get("pause_s", 0))
    return {"turns": turns}
'''

CHECK = """
def score(session, result, metadata):
    return (len(session["turns"]) + metadata["group_seed"] % 5) / 10
"""


def write_trained_scenario(
    directory: Path, *, waits_for: Path = Path("/"), train: dict[str, Any] | None = None
) -> Path:
    """Two prompts, groups of two; a step is four rollouts, of two turns or three. The second step waits for a file."""
    write_scenario(
        directory,
        check=CHECK,
        agent={"function": "play.py:run", "deadline_s": 60.0},
        prompts=[{"metadata": {"turns": turns, "waits_for": str(waits_for)}} for turns in (2, 3)],
        train={"rollouts_per_step": 4, "packing": {"length": 128, "lookahead": 2}, **(train or {})},
    )
    (directory / "play.py").write_text(PLAY)
    return directory


def write_real_scenario(directory: Path) -> Path:
    """The same on the local engine, with random weights of its own: every turn is cut, so a rollout has one.

    Every other group thinks for a while, so that an update of the weights finds one alive.
    """
    write_trained_scenario(directory)
    weights = write_toy_weights(directory.parent / "weights", seed=0)
    scenario = tomllib.loads((directory / "scenario.toml").read_text())
    train = {"rollouts_per_step": 4, "over_sampling": 1, "partial": "resume", "max_staleness": 2, "advantage": "reward"}
    prompts = [{"metadata": {"turns": 2, "pause_s": pause_s}} for pause_s in (0, 2)]
    scenario |= {
        "prompts": prompts,
        "engine": {"name": "local", "model": str(weights)},
        "limits": {"tokens_per_turn": 24},
        "train": {**train, "packing": {"length": 256, "lookahead": 1}, "checkpoints": {"every": 2}},
        "concurrency": 6,
    }
    (directory / "scenario.toml").write_text(tomli_w.dumps(scenario))
    return directory
