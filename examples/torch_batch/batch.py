"""Runs your own agent loop and makes a batch of torch tensors of what it sampled."""

import asyncio
import sys
from pathlib import Path

import httpx
import torch

import harness


async def guess(base_url, prompt, request_kwargs, metadata, *, api_key, **_):
    """Ask until the model says the number, five times at most."""
    messages = [{"role": "user", "content": prompt}]
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, timeout=600) as client:
        for turn in range(5):
            body = {"messages": messages, "max_tokens": 64, **request_kwargs}
            answer = await client.post(f"{base_url}/chat/completions", json=body)
            if answer.status_code == 404:  # the session is over: a limit, or an abort
                break
            messages.append(answer.raise_for_status().json()["choices"][0]["message"])
            if str(metadata["number"]) in messages[-1]["content"]:
                return {"reward": 1 / (turn + 1)}
            messages.append({"role": "user", "content": "No. Guess again."})
    return {"reward": 0.0}


def batch_of(rollouts: list[harness.Rollout]) -> dict[str, torch.Tensor]:
    """Put one sample in each row, padded at its end; `labels` are -100 where a token is not to be trained."""
    rows = [(sample, rollout.agent_result["reward"]) for rollout in rollouts for sample in rollout.samples]
    shape = (len(rows), max(len(sample.tokens) for sample, _ in rows))
    ids, labels, logprobs = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100), torch.zeros(shape)
    for row, (sample, _) in enumerate(rows):
        end = len(sample.tokens)
        response = slice(end - sample.response_length, end)
        ids[row, :end] = torch.tensor(sample.tokens)
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        labels[row, response] = torch.where(mask, ids[row, response], -100)
        logprobs[row, response] = torch.tensor(sample.rollout_log_probs)
    return {"ids": ids, "labels": labels, "logprobs": logprobs, "rewards": torch.tensor([each for _, each in rows])}


async def main(engine: str, model: str) -> None:
    folder = harness.resolve_model(model)
    chat_tokenizer = harness.open_chat_tokenizer(folder)
    provider = harness.open_engine(engine, model_dir=folder, tokenizer=chat_tokenizer.tokenizer)
    async with (
        harness.serve(provider, chat_tokenizer, harness.MemoryStore()) as server,
        harness.SessionManager(server.url) as manager,
    ):
        agent, prompt = harness.FunctionAgent("guess", guess), "Guess my number, from 1 to 9."
        numbers = {number: Path("rollouts", number) for number in "12345678"}
        tasks = [harness.AgentTask(agent, prompt, numbers[n], model, metadata={"number": n}) for n in numbers]
        batch = batch_of(await asyncio.gather(*map(manager.run, tasks)))
    print({name: tuple(tensor.shape) for name, tensor in batch.items()}, batch["rewards"].tolist())


asyncio.run(main(*sys.argv[1:]))
