"""The guard inside the local engine, on the real model: it ends the row that loops, and nothing else changes."""

import asyncio
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.engines.repeat_guard import require_guard
from harness.errors import EngineRejected, ScenarioError
from harness.tokens.tokenizer import Tokenizer
from harness.types import FinishReason, GenerationRequest, GenerationResult, SamplingParams, TokenIds, as_ids
from server_patch.repeat_terminate import RepeatTerminateConfig
from server_patch.repeat_terminate.config import CONFIG_JSON, ENABLE
from tests.local_model import LocalEngines
from tests.looping_prompt import CONFIG, LOOP_START, MAX_NEW_TOKENS, OTHER_PROMPTS, PROMPT, PROMPT_IDS, STOP_INDEX

pytestmark = [pytest.mark.model, pytest.mark.timeout(600), pytest.mark.xdist_group("guarded_local_engine")]

GREEDY = SamplingParams(MAX_NEW_TOKENS, temperature=0.0)
NO_GUARD = RepeatTerminateConfig()


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(name="guarded")
async def _guarded(local_engines: LocalEngines) -> HuggingFaceTokenProvider:
    return await local_engines.open(repeat_guard=CONFIG)


async def ask(
    engine: HuggingFaceTokenProvider, ids: TokenIds, params: SamplingParams, *, continues: int = 0
) -> GenerationResult:
    return await engine.generate(GenerationRequest(ids, params, uuid.uuid4().hex, continues=continues))


async def ask_all(
    engine: HuggingFaceTokenProvider, tokenizer: Tokenizer
) -> tuple[GenerationResult, list[GenerationResult]]:
    """The prompt that loops, and beside it some that do not, sampled with fixed seeds."""
    others = [
        ask(
            engine,
            as_ids(tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")),
            SamplingParams(32, seed=seed, ignore_eos=True),
        )
        for seed, text in enumerate(OTHER_PROMPTS)
    ]
    offender, *rest = await asyncio.gather(ask(engine, as_ids(PROMPT_IDS), GREEDY), *others)
    return offender, rest


def test_the_prompt_is_the_one_that_is_described(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(PROMPT) == PROMPT_IDS


async def test_only_the_offending_sequence_is_ended(local_engines: LocalEngines, tokenizer: Tokenizer) -> None:
    """Same seeds, with and without the guard: the loop ends where it must, the others are equal token by token."""
    stopped, others = await ask_all(await local_engines.open(repeat_guard=CONFIG), tokenizer)
    looping, others_without = await ask_all(await local_engines.open(repeat_guard=NO_GUARD), tokenizer)

    assert (stopped.finish_reason, stopped.output_ids.size) == (FinishReason.REPEAT, STOP_INDEX + 1)
    assert (looping.finish_reason, looping.output_ids.size) == (FinishReason.LENGTH, MAX_NEW_TOKENS)
    assert stopped.output_ids.tolist() == looping.output_ids[: STOP_INDEX + 1].tolist()
    assert (stopped.forced_tokens, stopped.matched_stop) == (0, None)
    assert [each.output_ids.tolist() for each in others] == [each.output_ids.tolist() for each in others_without]
    assert {each.finish_reason for each in others} == {FinishReason.LENGTH}


async def test_a_continuation_is_ended_at_the_same_token(guarded: HuggingFaceTokenProvider) -> None:
    """What was generated before the joint counts, for the repetition and for the minimum; without it, it would not."""
    for joint in (LOOP_START + 3, STOP_INDEX):
        head = await ask(guarded, as_ids(PROMPT_IDS), replace(GREEDY, max_new_tokens=joint))
        ids = as_ids([*PROMPT_IDS, *head.output_ids.tolist()])
        tail = await ask(guarded, ids, GREEDY, continues=joint)
        afresh = await ask(guarded, ids, GREEDY)

        assert head.finish_reason is FinishReason.LENGTH
        assert (tail.finish_reason, joint + tail.output_ids.size) == (FinishReason.REPEAT, STOP_INDEX + 1)
        assert afresh.output_ids.size > tail.output_ids.size


async def test_an_end_of_its_own_at_the_same_token_stands(guarded: HuggingFaceTokenProvider) -> None:
    """The guard speaks where the sequence would continue: not at the last token of its budget, nor at a stop id."""
    looped = await ask(guarded, as_ids(PROMPT_IDS), GREEDY)
    last = int(looped.output_ids[-1])
    first = looped.output_ids.tolist().index(last)
    stop_id = replace(GREEDY, stop_token_ids=(last,))

    budget = await ask(guarded, as_ids(PROMPT_IDS), replace(GREEDY, max_new_tokens=STOP_INDEX + 1))
    stopped = await ask(guarded, as_ids([*PROMPT_IDS, *looped.output_ids[:-1].tolist()]), stop_id, continues=STOP_INDEX)

    assert first < STOP_INDEX
    assert budget.finish_reason is FinishReason.LENGTH
    assert (stopped.finish_reason, stopped.matched_stop) == (FinishReason.STOP, last)


async def test_the_guard_is_named_by_its_digest(small_dir: Path) -> None:
    async with HuggingFaceTokenProvider(small_dir, repeat_guard=CONFIG) as engine:
        guarded = engine.capabilities
    async with HuggingFaceTokenProvider(small_dir, repeat_guard=NO_GUARD) as engine:
        unguarded = engine.capabilities

    assert guarded.repeat_guard == CONFIG.digest()
    assert unguarded.repeat_guard is None
    require_guard(guarded, CONFIG)
    with pytest.raises(ScenarioError, match="the local engine has none that is active; start its server with"):
        require_guard(unguarded, CONFIG)
    with pytest.raises(ScenarioError, match="runs one with other limits"):
        require_guard(guarded, replace(CONFIG, ngram_repeats=3))


async def test_the_environment_configures_the_guard(small_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the engines that are servers; what is passed to the constructor has the last word."""
    for name, value in CONFIG.to_environ().items():
        monkeypatch.setenv(name, value)

    async with HuggingFaceTokenProvider(small_dir) as engine:
        assert engine.capabilities.repeat_guard == CONFIG.digest()
    async with HuggingFaceTokenProvider(small_dir, repeat_guard=NO_GUARD) as engine:
        assert engine.capabilities.repeat_guard is None


def test_a_wrong_environment_stops_the_start(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLE, "1")
    monkeypatch.setenv(CONFIG_JSON, '{"ngram": 4}')

    with pytest.raises(ScenarioError, match="repeat guard: ngram: no such key"):
        HuggingFaceTokenProvider(model_dir)


async def test_a_guard_that_cannot_trip_stops_the_start(small_dir: Path) -> None:
    """One whose limits lie beyond the context is enabled and would never be active."""
    never = RepeatTerminateConfig(enabled=True, min_new_tokens=10_000)

    with pytest.raises(ScenarioError, match="trip after 10000 tokens of output at the earliest, the context holds"):
        await HuggingFaceTokenProvider(small_dir, repeat_guard=never).__aenter__()


async def test_more_tokens_cannot_be_continued_than_there_are(guarded: HuggingFaceTokenProvider) -> None:
    with pytest.raises(EngineRejected, match=r"continues must be 0\.\.17"):
        await ask(guarded, as_ids(PROMPT_IDS), GREEDY, continues=18)
