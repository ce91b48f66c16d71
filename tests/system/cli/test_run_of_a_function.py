"""`harness run` of a scenario that a function of its own plays, on a scripted engine."""

from pathlib import Path

from tests.harness_command import harness, write_scenario

PLAY = '''
"""Asks for two turns."""

import aiohttp

from .neighbor import NAME


async def run(base_url, prompt, request_kwargs, metadata, api_key, **kwargs):
    print("a line for whoever looks")
    messages = [{"role": "user", "content": prompt}]
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {api_key}"}) as client:
        for _ in range(2):
            body = {**request_kwargs, "messages": messages}
            async with client.post(f"{base_url}/chat/completions", json=body) as response:
                answer = (await response.json())["choices"][0]["message"]
            messages += [answer, {"role": "user", "content": "Go on."}]
    return {"turns": 2, "name": NAME}
'''


def _write(directory: Path) -> Path:
    agent = {"function": "play.py:run", "deadline_s": 60.0}
    directory.mkdir()
    (directory / "play.py").write_text(PLAY)
    (directory / "neighbor.py").write_text("NAME = 'neighbor'\n")
    return write_scenario(directory, agent=agent, prompts=[{}], samples_per_prompt=1)


def test_a_function_plays_as_a_program_does(tmp_path: Path):
    """Turns, result and reward; what it prints goes where it disturbs nothing."""
    ended = harness("run", _write(tmp_path / "s"), "--out", tmp_path / "run", "--json")
    [rollout] = ended.document["scenarios"][0]["rollouts"]

    assert ended.code == 0, ended.stderr
    assert (rollout["outcome"], rollout["reward"], rollout["score"]) == ("finished", 0.2, {"told": 2})
    assert "a line for whoever looks" in ended.stderr
    assert ended.document["ledger"]["difference"] == 0
