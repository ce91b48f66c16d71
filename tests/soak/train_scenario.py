"""A scenario whose training takes seconds: a scripted engine, an agent that is a function, several packs a step."""

from pathlib import Path
from typing import Any

from tests.harness_command import write_scenario

PLAY = '''
"""Asks for one to four turns, which its group decides, and takes its time between two of them."""

import asyncio

import aiohttp


async def run(base_url, prompt, metadata, api_key, **_):
    drawn = metadata["group_seed"]
    messages = [{"role": "user", "content": f"{prompt} {drawn % 1000}"}]
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {api_key}"}) as client:
        for turn in range(1 + drawn % 4):
            async with client.post(f"{base_url}/chat/completions", json={"messages": messages}) as response:
                if response.status == 404:
                    break
                response.raise_for_status()
                answer = (await response.json())["choices"][0]["message"]
            messages += [answer, {"role": "user", "content": f"Go on, {turn}."}]
            await asyncio.sleep(0.01 * (drawn // 7 % 4))
    return {"messages": len(messages)}
'''

CHECK = """
def score(session, result, metadata):
    return {"reward": (metadata["group_seed"] % 5 + len(session["turns"])) / 8}
"""

SCRIPT = {
    "steps": [
        {"text": "One.", "token_delay_s": 0.002},
        {"text": "Two and more.", "token_delay_s": 0.001},
        {"text": "And three, which is the longest of all that it says."},
    ]
}

TRAIN: dict[str, Any] = {
    "rollouts_per_step": 6,
    "over_sampling": 1,
    "advantage": "reward",
    "keep_steps": 2,
    "packing": {"length": 512, "lookahead": 2},
}


def write_train_scenario(directory: Path, **train: Any) -> Path:
    """The scenario in `directory`; `train` replaces keys of its `[train]`."""
    folder = write_scenario(
        directory,
        check=CHECK,
        script=SCRIPT,
        agent={"function": "play.py:run", "deadline_s": 60.0},
        prompts=[{"metadata": {}}],
        concurrency=6,
        train={**TRAIN, **train},
    )
    (folder / "play.py").write_text(PLAY.lstrip())
    return folder
