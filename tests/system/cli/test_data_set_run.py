"""A data set of many rows begins at once, and a killed run of it takes up at the row where it was."""

import json
import time
import tomllib
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import tomli_w

from harness.suite.record.rollout_table import read_rollouts
from tests.harness_command import harness, start_harness, wait, write_scenario

ROWS = 100_000
PLAY = """
import asyncio, pathlib
import httpx

begun = 0

async def run(base_url, prompt, request_kwargs, metadata, *, api_key, **kwargs):
    global begun
    begun += 1
    while begun == 6 and not pathlib.Path(KILLED).exists():
        await asyncio.sleep(0.05)
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, trust_env=False) as client:
        body = {"messages": [{"role": "user", "content": prompt}], **request_kwargs}
        (await client.post(f"{base_url}/chat/completions", json=body)).raise_for_status()
    return {"prompt": prompt, "level": metadata["level"]}
"""
CHECK = """
def score(session, result, metadata):
    assert result == {"prompt": f"Say {metadata['answer']}.", "level": metadata["level"]}
    return float(metadata["answer"])
"""


def _write(directory: Path) -> None:
    write_scenario(directory, check=CHECK, samples_per_prompt=1, agent={"function": "play.py:run"})
    keys = tomllib.loads((directory / "scenario.toml").read_text())
    del keys["prompts"]
    keys |= {"prompts_file": "rows.parquet", "data": {"metadata": ["level"], "check_metadata": ["answer"]}}
    (directory / "scenario.toml").write_text(tomli_w.dumps(keys))
    (directory / "play.py").write_text(PLAY.replace("KILLED", repr(str(directory.parent / "killed"))))
    numbers = range(ROWS)
    columns = {"question": [f"Say {n}." for n in numbers], "level": [n % 4 for n in numbers], "answer": list(numbers)}
    pq.write_table(pa.table(columns), directory / "rows.parquet")


def _rewards(run: Path) -> list[float | None]:
    return [record.reward for _, record in sorted(read_rollouts(run / "run.db").items())]


def test_a_killed_run_goes_on_with_the_next_row(tmp_path: Path):
    """Every row that the filter leaves of the first so many of a shuffled order is played twice, killed or not."""
    directory, run = tmp_path / "s", tmp_path / "run"
    _write(directory)
    chosen = ("--filter", "level=3", "--shuffle", "7", "--limit", "12", "--epochs", "2", "-n", "1")
    process = start_harness("run", directory, "--out", run, *chosen)
    deadline = time.monotonic() + 120
    while not ((run / "run.db").is_file() and len(_rewards(run)) == 5):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    wait(process)
    (tmp_path / "killed").touch()
    before = _rewards(run)
    resumed = harness("run", run, "--resume", "-n", "4", "--json")
    again = harness("run", directory, "--out", tmp_path / "again", *chosen[:-1], "4", "--json")
    rewards = _rewards(run)

    assert (resumed.code, again.code) == (0, 0), resumed.stderr + again.stderr
    assert json.loads((run / "result.json").read_text())["scenarios"][0]["sessions"] == 24
    assert before == rewards[: len(before)]
    assert rewards == _rewards(tmp_path / "again")
    assert set(Counter(rewards).values()) == {2}
    assert all(reward is not None and reward % 4 == 3 for reward in rewards)
    assert rewards[:12] != sorted(rewards[:12], key=float)
