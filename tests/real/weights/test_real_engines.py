"""Weight updates under real SGLang and real vLLM servers, held against each checkpoint's own forward pass.

The servers load the checkpoints through their own update endpoints. Both compute in float32 on a CPU, with kernels of
their own: where the local engine agrees to 1e-4, they do to `TOLERANCE`, measured and an order below the smallest
mean change between two checkpoints that this test accepts.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from harness.engines.connect import open_engine
from harness.lab.lanes import INSTALLED, LaneEngine
from harness.lab.models.weight_files import perturb_checkpoint
from harness.tokens.model_family import open_chat_tokenizer
from harness.tokens.tokenizer import Tokenizer
from harness.types import Json, TokenIds, as_ids
from tests import ground_truth
from tests.builders import user
from tests.controllers.weight_agents import Agents, unmet_versions, versions_of
from tests.ground_truth import logprobs_of
from tests.real_engines import on_real
from tests.session_servers.served import serving_with

pytestmark = [pytest.mark.model]

TOLERANCE = 1e-3
"""Two forward passes agree to 2e-5, one on weights of another version is off by 0.2 on average, and one behind a single
token of old keys and values by 0.03. Once, on a busy machine, 1.7e-3 was seen: `evidence` is for the next time."""
NOISE = 0.03
TURN = {"max_tokens": 120, "temperature": 0.7, "stop": [".", ",", "\n"]}
"""Ends soon and by itself: a branch that was cut at its limit could not continue."""
LONG_TURN = {"max_tokens": 200, "temperature": 0.3}
ENDLESS_TURN = {"min_tokens": 3000, "max_tokens": 3500, "temperature": 0.7}
"""Cannot end before every update has fallen into it."""
DECODING_S = 0.5


@pytest.fixture(scope="session", name="checkpoints")
def _checkpoints(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Versions 0 to 2 of the real model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    moved = {n: perturb_checkpoint(model_dir, folder / str(n), number=n, noise=NOISE) for n in (1, 2)}
    return {0: model_dir, **moved}


class RemoteAgents(Agents):
    """Agents of an engine that can only be asked how much it is doing."""

    async def further(self, *asking: asyncio.Task[None]) -> None:
        """See `Agents`; a prompt of this test is read long before that."""
        while not (await self.engine.health()).running and not all(task.done() for task in asking):
            await asyncio.sleep(0.05)
        await asyncio.wait(asking, timeout=DECODING_S, return_when=asyncio.ALL_COMPLETED)


@pytest.fixture(name="agents", params=[pytest.param(engine, marks=on_real(engine)) for engine in INSTALLED])
async def _agents(
    request: pytest.FixtureRequest, model_dir: Path, checkpoints: dict[int, Path]
) -> AsyncIterator[RemoteAgents]:
    url = request.getfixturevalue(f"{request.param}_url")
    chat_tokenizer = open_chat_tokenizer(model_dir)
    engine = open_engine(f"{request.param}={url}", tokenizer=chat_tokenizer.tokenizer)
    async with serving_with(engine, chat_tokenizer=chat_tokenizer, patience_s=600) as client:
        await engine.update_weights(model_dir, "0")
        try:
            yield RemoteAgents(client, engine, checkpoints, turn=TURN, long_turn=LONG_TURN)
        finally:
            await engine.update_weights(model_dir, "0")


async def test_real_engines_tell_the_truth_about_every_checkpoint(agents: RemoteAgents, tmp_path: Path):
    """Two updates inside one turn, two around a whole one, and a sweep for sessions that do not ask again."""
    *in_turn, between, _finished = sessions = [await agents.create() for _ in range(5)]
    await asyncio.gather(*(agents.turn(session) for session in sessions))
    endless = await agents.client.create()
    without_end = asyncio.create_task(agents.client.chat(endless, [user("Count.")], **ENDLESS_TURN))
    await agents.further(without_end)
    asking = await asyncio.gather(*(agents.long_turn(session) for session in in_turn))
    reports = [await agents.update(1)]
    await agents.turn(between)
    going_on = asyncio.create_task(agents.turn(between))
    await agents.further(*asking, going_on)
    reports.append(await agents.update(2))
    await asyncio.gather(*asking, going_on)
    await agents.turn(between)
    (await agents.client.http.post(f"/sessions/{endless.session_id}/end")).raise_for_status()
    await without_end
    (await agents.client.http.post("/sessions/sweep", json={"version": 2})).raise_for_status()

    verdict = await agents.verdict(*sessions)
    samples = [await agents.sample(session) for session in sessions]
    print("\n".join(verdict.lines()))

    assert [report.problems for report in reports] == [(), ()]
    assert verdict.third_states == []
    largest = max(verdict.behavior_difference, verdict.proximal_difference)
    assert largest < TOLERANCE, await evidence(agents, samples, tmp_path)
    assert verdict.moved > 10 * TOLERANCE
    [cut] = (await agents.client.record(endless))["turns"]
    assert len(cut["segments"]) > 1
    assert {"0", "2"} <= {span["version"] for span in cut["weight_versions"]}
    assert versions_of(samples[3]) == {0, 1, 2}
    assert set().union(*(unmet_versions(sample) for sample in samples)) <= {2}


async def evidence(agents: RemoteAgents, samples: list[Json], folder: Path) -> str:
    """Tells whether the engine was wrong then, is wrong now, or this process is wrong about the truth."""
    file = folder / "samples.jsonl"
    file.write_text("".join(f"{json.dumps(sample)}\n" for sample in samples), encoding="utf-8")
    pairs = [f"{version}={directory}" for version, directory in agents.checkpoints.items()]
    truth = await asyncio.create_subprocess_exec(
        *(sys.executable, ground_truth.__file__, str(file), *pairs), stdout=asyncio.subprocess.PIPE
    )
    said = (await truth.communicate())[0].decode()
    now = []
    for sample in samples:
        ids = as_ids(sample["tokens"])
        scored = (await agents.engine.score(ids, start=1)).logprobs
        now.append(np.abs(scored - await asyncio.to_thread(plain_logprobs, agents.checkpoints[2], ids)).max())
    kept = [f"session {n}: {sample['behavior_versions']}" for n, sample in enumerate(samples)]
    return "\n".join(["by another process:", said, f"scored again under version 2: {now}", *kept])


@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=on_real(LaneEngine.VLLM))])
async def test_vllm_on_a_cpu_keeps_the_output_projection_of_a_tied_model(
    engine: str, request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path
):
    """A trap: its packed copy of shared embeddings is made at start-up, and a reload renews only the embeddings.

    What it reports then is of no checkpoint at all. On a GPU nothing is packed. The checkpoints of this project's own
    scenarios leave embeddings alone for this reason; when this test fails, vLLM has learned to renew the copy.
    """
    moved = perturb_checkpoint(model_dir, tmp_path / "moved", number=1, noise=NOISE, moves_embeddings=True)
    tokenizer = Tokenizer.load(model_dir)
    ids = as_ids(tokenizer.encode("<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\nThe Nile"))
    async with open_engine(f"{engine}={request.getfixturevalue('vllm_url')}", tokenizer=tokenizer) as provider:
        await provider.update_weights(moved, "1")
        try:
            scored = (await provider.score(ids, start=1)).logprobs
        finally:
            await provider.update_weights(model_dir, "0")

    whole, mixed = plain_logprobs(moved, ids), plain_logprobs(moved, ids, output_of=model_dir)

    assert np.abs(scored - mixed).max() < TOLERANCE
    assert np.abs(scored - whole).max() > 10 * TOLERANCE


def plain_logprobs(folder: Path, ids: TokenIds, *, output_of: Path | None = None) -> np.ndarray:
    """Logprobs of `ids[1:]` under a checkpoint, or under it with the output projection of another one."""
    import torch
    from transformers import AutoModelForCausalLM

    def load(directory: Path):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    model = load(folder)
    if output_of is not None:
        model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
        model.lm_head.weight = torch.nn.Parameter(load(output_of).get_input_embeddings().weight.detach().clone())
    return logprobs_of(model, ids)
