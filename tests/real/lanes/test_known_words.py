"""The tiny random model says known words on a real engine: real ids, real template, real scheduler, scripted text."""

from pathlib import Path

import httpx
import pytest

from harness.lanes import Dtype, LaneEngine, LaneSpec, open_lane
from harness.models import resolve_model
from harness.tokens.tokenizer import Tokenizer
from tests.real_engines import on_real

SAYING = '<tool_call>\n{"name": "guess", "arguments": {"number": 12}}\n</tool_call><|im_end|>'
MESSAGES = [{"role": "user", "content": "Guess my number."}]


@pytest.fixture(name="tiny", scope="module")
def _tiny() -> Path:
    return resolve_model("tiny-random-qwen3")


@pytest.mark.parametrize(
    ("engine", "parameter"),
    [
        pytest.param(LaneEngine.SGLANG, "custom_params", marks=on_real(LaneEngine.SGLANG)),
        pytest.param(LaneEngine.VLLM, "vllm_xargs", marks=on_real(LaneEngine.VLLM)),
    ],
)
async def test_a_chat_client_reads_the_script(engine: LaneEngine, parameter: str, tiny: Path) -> None:
    """Over the engine's own chat route, to the end-of-turn id that ends the script."""
    script = Tokenizer.load(tiny).encode(SAYING)
    async with open_lane(LaneSpec(engine, tiny, dtype=Dtype.BFLOAT16)) as lane, httpx.AsyncClient() as http:
        body = {"model": lane.model, "messages": MESSAGES, "max_tokens": 100, parameter: {"force_ids": script}}
        answer = (await http.post(f"{lane.url}/v1/chat/completions", json=body, timeout=300)).raise_for_status().json()

    [choice] = answer["choices"]
    assert choice["message"]["content"].strip() == SAYING.removesuffix("<|im_end|>")
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", len(script))
