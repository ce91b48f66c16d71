"""The examples of docs/engines.md, on the local engine and on real SGLang."""

import re
from pathlib import Path
from typing import Any

import pytest

import harness
from tests.checkout import ROOT


def examples() -> dict[str, Any]:
    """The functions of the section, as a reader gets them."""
    section = (ROOT / "docs" / "engines.md").read_text().partition("## Ask one yourself")[2].partition("\n## ")[0]
    names: dict[str, Any] = {"harness": harness}
    for block in re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL):
        exec(block, names)  # our own page
    return names


async def test_the_examples_work_on_the_local_engine_and_on_sglang(sglang_url: str, model_dir: Path) -> None:
    """Ids in, ids and logprobs out; both engines are close."""
    shown = examples()
    vocab_size = harness.ChatTemplateTokenizer.load(model_dir).tokenizer.vocab_size
    result = await shown["count_to_five"](model_dir, harness.HuggingFaceTokenProvider(model_dir))

    assert 0 < len(result.output_ids) == len(result.logprobs) == len(result.top_logprobs.ids) <= 100
    assert await shown["are_close"](
        model_dir,
        harness.HuggingFaceTokenProvider(model_dir),
        harness.SGLangTokenProvider(sglang_url, vocab_size=vocab_size),
    )


async def test_what_is_neither_a_request_nor_ids_is_refused(model_dir: Path) -> None:
    provider = harness.HuggingFaceTokenProvider(model_dir)
    with pytest.raises(ValueError, match="expected a GenerationRequest, or input_ids and sampling_params"):
        await provider.generate(input_ids=[1, 2])
