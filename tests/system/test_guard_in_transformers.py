"""The guard inside `model.generate` of transformers, on a small random model whose first row is told what to say."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from server_patch.repeat_terminate import ConfigError, RepeatDetector, RepeatTerminateConfig, Rule
from server_patch.repeat_terminate.huggingface import RepeatTerminateProcessor

EOS, PAD, VOCAB = 0, 1, 64
PROMPTS = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]])
CONFIG = RepeatTerminateConfig(enabled=True, min_new_tokens=8, max_consecutive_token_repeats=0, ngram_size=4)
LOOP = [9, 8, 7, *[2, 3, 4, 5] * 8]
TOKENS = 30


class Script(LogitsProcessor):  # type: ignore[misc]  # transformers is untyped
    """Makes the first row say `tokens`, whatever the model thinks."""

    def __init__(self, tokens: list[int], *, start: int = PROMPTS.shape[1]) -> None:
        self._tokens, self._start = tokens, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, EOS] = float("-inf")
        scores[0] = float("-inf")
        scores[0, self._tokens[input_ids.shape[1] - self._start]] = 0.0
        return scores


@pytest.fixture(scope="module", name="model")
def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        eos_token_id=EOS, pad_token_id=PAD, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def generate(
    model: LlamaForCausalLM, script: list[int], guard: RepeatTerminateProcessor | None = None
) -> list[list[int]]:
    """Sampled output ids per row, with the same seed every time."""
    torch.manual_seed(7)
    processors = LogitsProcessorList([Script(script)] if guard is None else [Script(script), guard])
    output = model.generate(
        PROMPTS, attention_mask=torch.ones_like(PROMPTS), max_new_tokens=TOKENS, do_sample=True,
        logits_processor=processors,
    )  # fmt: skip
    rows: list[list[int]] = output[:, PROMPTS.shape[1] :].tolist()
    return rows


def test_only_the_offending_row_is_ended(model: LlamaForCausalLM) -> None:
    """Same seeds with and without the guard: the row that loops ends where the detector says, the others are equal."""
    guard = RepeatTerminateProcessor(CONFIG, eos_token_id=EOS)
    without, guarded = generate(model, LOOP), generate(model, LOOP, guard)

    index = RepeatDetector(CONFIG).push_all(LOOP)
    assert index == 10
    assert guarded[0] == [*LOOP[: index + 1], EOS, *[PAD] * (TOKENS - index - 2)]
    assert without[0] == LOOP[:TOKENS]
    assert guarded[1:] == without[1:]
    assert (guard.triggered, guard.rules) == ([1, 0, 0], [Rule.NGRAM, None, None])
    assert guard.forced_columns == [PROMPTS.shape[1] + index + 1, None, None]


def test_padding_after_an_end_of_its_own_is_no_repetition(model: LlamaForCausalLM) -> None:
    config = RepeatTerminateConfig(enabled=True, min_new_tokens=0, max_consecutive_token_repeats=3, ngram_size=0)
    guard = RepeatTerminateProcessor(config, eos_token_id=EOS)
    script = [9, 8, EOS, *[PAD] * TOKENS]

    assert generate(model, script, guard)[0][:5] == [9, 8, EOS, PAD, PAD]
    assert guard.triggered[0] == 0


def test_what_was_generated_before_counts() -> None:
    """Ids at the end of the prompt that belong to the output are seen by the detector."""
    config = RepeatTerminateConfig(enabled=True, min_new_tokens=5, max_consecutive_token_repeats=5, ngram_size=0)
    guard = RepeatTerminateProcessor(config, eos_token_id=EOS, continues=3)
    first_step = torch.tensor([[1, 6, 6, 6], [1, 6, 6, 6]])
    scores = torch.zeros(2, VOCAB)

    guard(first_step, scores)
    guard(torch.cat([first_step, torch.tensor([[6], [6]])], dim=1), scores)
    assert guard.triggered == [0, 0]
    guard(torch.cat([first_step, torch.tensor([[6, 6], [6, 5]])], dim=1), scores)

    assert guard.triggered == [1, 0]


def test_a_configuration_that_is_not_enabled_does_nothing(model: LlamaForCausalLM) -> None:
    guard = RepeatTerminateProcessor(RepeatTerminateConfig(ngram_size=4, min_new_tokens=8), eos_token_id=EOS)

    assert generate(model, LOOP, guard) == generate(model, LOOP)
    assert (guard.triggered, guard.forced_columns) == ([], [])


def test_a_second_generate_is_refused(model: LlamaForCausalLM) -> None:
    guard = RepeatTerminateProcessor(CONFIG, eos_token_id=EOS)
    generate(model, LOOP, guard)

    with pytest.raises(ValueError, match="serves one call of generate"):
        generate(model, LOOP, guard)


def test_a_row_needs_a_token_to_end_with() -> None:
    with pytest.raises(ConfigError, match="eos_token_id: expected at least one id"):
        RepeatTerminateProcessor(CONFIG, eos_token_id=[])
