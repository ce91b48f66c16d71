"""Runs Claude Code, unchanged, on a vLLM server, and prints the reward and the tokens of each rollout."""

import asyncio
import subprocess
import sys
from pathlib import Path

import harness

PROGRAM = "def mean(numbers):\n    return sum(numbers) / len(numbers)\n"
INSTRUCTION = "`mean` in mean.py fails for an empty list. Make it return 0.0 then."
TEST = "from mean import mean; assert mean([]) == 0.0; assert mean([1, 2]) == 1.5"


def reward(folder: Path) -> float:
    """Run the test on what the agent left in its working directory."""
    done = subprocess.run([sys.executable, "-c", TEST], cwd=folder, check=False, capture_output=True)
    return float(done.returncode == 0)


async def main(vllm_url: str, model: str, rollouts: int) -> None:
    agent = await harness.prepare_agent(harness.bundled_agent("claude_code"), say=print)
    chat_tokenizer = harness.open_chat_tokenizer(harness.resolve_model(model))
    engine = harness.open_engine(f"vllm={vllm_url}", tokenizer=chat_tokenizer.tokenizer)
    async with (
        harness.serve(engine, chat_tokenizer, harness.open_store("claude_code.db")) as server,
        harness.SessionManager(server.url, engines=[engine]) as manager,
    ):

        async def play(number: int) -> None:
            folder = Path("claude_code", str(number))
            folder.mkdir(parents=True)
            (folder / "mean.py").write_text(PROGRAM)
            rollout = await manager.run(harness.AgentTask(agent, INSTRUCTION, folder, model, deadline_s=300))
            trained = sum(int(sample.loss_mask.sum()) for sample in rollout.samples)
            print(f"{number}: {rollout.outcome.kind}, reward {reward(folder)}, {trained} tokens to train")

        await asyncio.gather(*map(play, range(rollouts)))


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
