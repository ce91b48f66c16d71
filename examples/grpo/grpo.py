"""GRPO on this machine: rollouts, advantages, losses, new weights under running sessions."""

import asyncio
import sys
from pathlib import Path

import httpx

import harness
from harness import training

GROUPS, MEMBERS = 4, 8


async def tell(base_url, prompt, request_kwargs, metadata, *, api_key, **_):
    """Your agent: any loop around the model, here one turn."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 32, **request_kwargs}
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, timeout=600) as client:
        answer = await client.post(f"{base_url}/chat/completions", json=body)
    return {"said": answer.raise_for_status().json()["choices"][0]["message"]["content"] or ""}


async def reward(index: training.RolloutIndex, rollout: harness.Rollout) -> float:
    """Your check: the share of lower-case letters in what the model said."""
    said = rollout.agent_result["said"]
    return sum("a" <= letter <= "z" for letter in said) / max(len(said), 1)


def task(index: training.RolloutIndex) -> harness.AgentTask:
    """Make the task of one rollout; all members of a group get the same prompt."""
    place = f"{index.group.step}-{index.group.number}-{index.member}-{index.attempt}"
    prompt = f"Tell me about the number {index.group.number}."
    return harness.AgentTask(harness.FunctionAgent("tell", tell), prompt, Path("rollouts", place), "policy")


async def main(model: str, steps: int) -> None:
    folder = harness.resolve_model(model)
    engine = harness.HuggingFaceTokenProvider(folder)
    loss = training.LossSettings(training.LossKind.GRPO)
    learner = training.TorchLearner.open(folder, loss, training.OptimizerSettings(learning_rate=3e-3))
    rules = training.StepRules(training.StepBudget(rollouts_per_step=GROUPS * MEMBERS, group_size=MEMBERS))
    async with (
        harness.serve(engine, harness.open_chat_tokenizer(folder), harness.MemoryStore()) as server,
        harness.SessionManager(server.url, engines=[engine]) as manager,
        training.StepPipeline(
            training.SessionSource(manager, task, reward, training_seed=1), rules, learner, training.SegmentMaker(4096)
        ) as pipeline,
    ):
        for step in range(steps):
            trained = await pipeline.run(step, version=step)
            await asyncio.to_thread(learner.save, weights := Path("weights", str(step + 1)))
            async with manager.updating_weights(step + 1) as update:
                await update.apply(weights)
            rewards = [each.reward for each in trained.packed.collected.rollouts]
            print(f"step {step}: mean reward {sum(rewards) / len(rewards):.3f}")


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
