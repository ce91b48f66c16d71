"""In float32 SGLang, vLLM and the local engine are one model: the same greedy tokens with the same logprobs.

The local engine is checked against the model's own forward pass when it is loaded, so it stands for the truth here, and
what is as close as this to it is close to each other.
"""

from pathlib import Path

from harness.engines.base import TokenProvider
from harness.engines.connect import open_engine
from harness.engines.examine.comparison import Comparison, compare_engines
from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.tokens.model_family import open_chat_tokenizer

ATOL = 1e-3
TOKENS = 20


async def compared(name: str, local: HuggingFaceTokenProvider, model_dir: Path) -> Comparison:
    """What the engine called `name` and the local one make of the same prompts."""
    chat = open_chat_tokenizer(model_dir)
    served: TokenProvider = open_engine(name, tokenizer=chat.tokenizer)
    async with served:
        return await compare_engines(served, local, chat, tokens=TOKENS, atol=ATOL, top_k=3)


def assert_one_model(comparison: Comparison) -> None:
    """Every continuation is the same to its last token."""
    assert comparison.is_close, [report.render() for report in comparison.reports]
    assert comparison.same_tokens == len(comparison.reports)


async def test_sglang_is_the_local_model(sglang_url: str, engine: HuggingFaceTokenProvider, model_dir: Path):
    assert_one_model(await compared(f"sglang={sglang_url}", engine, model_dir))


async def test_vllm_is_the_local_model(vllm_url: str, engine: HuggingFaceTokenProvider, model_dir: Path):
    assert_one_model(await compared(f"vllm={vllm_url}", engine, model_dir))
