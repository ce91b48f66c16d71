"""Real engines as teachers: their scores of a session with tools are those of a plain forward pass."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.engines.base import PauseMode
from harness.engines.connect import open_engine
from harness.engines.teachers import TeacherSpec
from harness.lab.lanes import LaneEngine, LaneSpec, open_lane
from harness.server.settings import ServerSettings
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Message, Sample
from tests.builders import tool, user
from tests.real_engines import on_real
from tests.session_servers.served import Client, serving_with
from tests.toy_model import write_toy_model
from tests.unit.server.test_teachers import collect

pytestmark = on_real(LaneEngine.SGLANG, LaneEngine.VLLM)

CALL = '<tool_call>\n{{"name": "guess", "arguments": {{"number": {0}}}}}\n</tool_call>'
SAYINGS = [CALL.format(11), CALL.format(12), CALL.format(13) + 300 * "!", CALL.format(14), "The number is 15."]
CUT = 2
"""Turn that is cut in the middle, while the student's weights change."""
TOP_K = 4
EXACT = 1e-5
ARGUMENTS = {
    LaneEngine.SGLANG: ("--context-length", "4096", "--max-running-requests", "4", "--max-total-tokens", "8192"),
    LaneEngine.VLLM: ("--max-model-len", "4096", "--max-num-seqs", "4"),
}
ENVIRONMENT = {LaneEngine.SGLANG: {}, LaneEngine.VLLM: {"VLLM_CPU_KVCACHE_SPACE": "1"}}


@pytest.fixture(scope="module", name="folders")
def _folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny random Qwen3, and other weights of it."""
    import torch
    import transformers

    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 4096, "initializer_range": 0.1}
    ids = {"vocab_size": 259, "eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 0}
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp("qwen3") / "qwen3"
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**shape, **more, **ids))
        model.save_pretrained(folder)
        made.append(write_toy_model(folder))
    return made[0], made[1]


def forward_pass(folder: Path, sample: Sample) -> Any:
    """Logprobs of all ids at each response token, in float32: no cache, no batch, no engine."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.from_numpy(sample.tokens.astype(np.int64))[None], use_cache=False).logits[0]
    return logits[-sample.response_length - 1 : -1].log_softmax(-1).numpy()


async def play(client: Client[Any], weights: Path) -> list[Sample]:
    """Five turns with tools and a branch from the third, which an update of the student's weights cuts."""
    steps = [{"text": text} for text in (*SAYINGS, "No.")]
    session = await client.create(script={"steps": steps})
    history: list[Message] = [user("Guess my number.")]
    for number in range(len(SAYINGS)):
        async with asyncio.TaskGroup() as group:
            saying = group.create_task(client.say(session, history, tools=[tool("guess")]))
            if number == CUT:
                while not saying.done() and not (await client.engine.health()).running:
                    await asyncio.sleep(0.01)
                await client.engine.pause(PauseMode.ABORT)
                await client.engine.update_weights(weights, "1")
                await client.engine.resume()
        history.append(saying.result())
        calls = history[-1].get("tool_calls") or ()
        history += [{"role": "tool", "tool_call_id": call["id"], "content": "No, more."} for call in calls]
    await client.say(session, [*history[:5], user("Stop.")], tools=[tool("guess")])
    held = client.server.sessions.in_memory(session.session_id)
    assert held is not None
    for teacher in client.server.teachers._teachers.values():
        await teacher.finish(held)
    return await collect(client, session)


async def test_scores_are_those_of_a_forward_pass(folders: tuple[Path, Path]) -> None:
    """Within 1e-5, on each token, by SGLang, which is the student and changes its weights, and by vLLM, which is not.

    So are the student's own logprobs.
    """
    before, after = folders
    chat_tokenizer = open_chat_tokenizer(before)
    async with AsyncExitStack() as stack:
        urls = {}
        for kind in (LaneEngine.SGLANG, LaneEngine.VLLM):
            spec = LaneSpec(kind, before, env=ENVIRONMENT[kind], arguments=ARGUMENTS[kind])
            urls[kind] = f"{kind}={(await stack.enter_async_context(open_lane(spec))).url}"
        settings = ServerSettings(
            teachers=tuple(TeacherSpec(kind, url, top_k=TOP_K) for kind, url in urls.items()), allow_forced_tokens=True
        )
        student = open_engine(urls[LaneEngine.SGLANG], tokenizer=chat_tokenizer.tokenizer)
        serving = serving_with(student, settings=settings, chat_tokenizer=chat_tokenizer)
        samples = await play(await stack.enter_async_context(serving), after)

    assert len(samples) == 2
    for sample in samples:
        is_sampled, ids = sample.behavior_versions >= 0, sample.tokens[-sample.response_length :]
        passes = [forward_pass(folder, sample)[is_sampled] for folder in folders]
        truths = [each[np.arange(is_sampled.sum()), ids[is_sampled]] for each in passes]
        versions = sample.behavior_versions[is_sampled]
        assert {*versions.tolist()} == {0, 1}
        own = np.where(versions, truths[1], truths[0])
        np.testing.assert_allclose(sample.rollout_log_probs[is_sampled], own, atol=EXACT, rtol=0)
        assert sample.metadata["teachers"]["vllm"] == {"versions": ["default"], "missing": 0}
        np.testing.assert_allclose(sample.teachers["vllm"][is_sampled], truths[0], atol=EXACT, rtol=0)
        assert sample.metadata["teachers"]["sglang"]["missing"] == 0
        errors = [np.abs(sample.teachers["sglang"][is_sampled] - truth) for truth in truths]
        assert np.minimum(*errors).max() <= EXACT
        top = sample.teacher_tops["vllm"]
        likely = -np.sort(-passes[0])[:, : TOP_K + 1]
        np.testing.assert_allclose(top.logprobs[is_sampled], likely[:, :TOP_K], atol=EXACT, rtol=0)
        is_clear = likely[:, 0] - likely[:, 1] > 1e-3  # equal ones come in any order
        assert np.array_equal(top.ids[is_sampled][is_clear, 0], passes[0].argmax(-1)[is_clear])
