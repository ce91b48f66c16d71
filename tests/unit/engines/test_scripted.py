"""The scripted engine keeps every promise of a `TokenProvider`, on cue."""

import asyncio
import gc
import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines.scripted import Script, ScriptedEngine, ScriptedFault, ScriptRule, ScriptStep, scripted_logprobs
from harness.errors import EngineConnectionLost, EngineRejected, EngineUnavailable, ScenarioError
from harness.types import FinishReason, GenerationRequest, SamplingParams, VersionSpan, as_ids
from tests.builders import EOS, toy_tokenizer

PROMPT = as_ids([5, 6, 7])
A_LOT = SamplingParams(max_new_tokens=1_000)


def ids(text: str) -> list[int]:
    return toy_tokenizer().encode_plain(text)


def engine(*steps: ScriptStep, **options) -> ScriptedEngine:
    return ScriptedEngine(toy_tokenizer(), Script(steps=steps or (ScriptStep(text="hello"),)), **options)


async def say(of: ScriptedEngine, params: SamplingParams = A_LOT, *, number: int = 0, session: str = "s", **how):
    return await of.generate(GenerationRequest(PROMPT, params, request_id=f"{number:032x}", session_id=session, **how))


async def test_a_step_is_said_and_ended():
    """Ids of the text and the end-of-turn id, one logprob each, one version span over all."""
    result = await say(engine())

    output = [*ids("hello"), EOS]
    assert result.output_ids.tolist() == output
    assert result.logprobs.tolist() == scripted_logprobs(as_ids(output), 3, "0").tolist()
    assert result.version_spans == (VersionSpan("0", 0, 6),)
    assert (result.finish_reason, result.matched_stop) == (FinishReason.STOP, EOS)
    assert result.input_ids.tolist() == PROMPT.tolist()


async def test_each_session_plays_the_script_from_its_start():
    """Sessions do not take each other's steps, and the script starts over after its last one."""
    scripted = engine(ScriptStep(text="1"), ScriptStep(text="2"))

    said = [(await say(scripted, number=i, session=name)).output_ids[0] for i, name in enumerate("ababa")]

    assert said == [ids(text)[0] for text in "11221"]


@pytest.mark.parametrize(
    ("step", "params", "output", "reason", "matched"),
    [
        (ScriptStep(text="hello"), SamplingParams(3), "hel", FinishReason.LENGTH, None),
        (ScriptStep(text="hello"), SamplingParams(5), "hello", FinishReason.LENGTH, None),
        (ScriptStep(text="hello", finish=FinishReason.LENGTH), A_LOT, "hello", FinishReason.LENGTH, None),
        (ScriptStep(text="hello"), SamplingParams(99, stop=("ll",)), "hell", FinishReason.STOP, "ll"),
        (
            ScriptStep(text="hello"),
            SamplingParams(99, stop_token_ids=(ids("e")[0],)),
            "he",
            FinishReason.STOP,
            ids("e")[0],
        ),
        (ScriptStep(tokens=(9, 8)), A_LOT, [9, 8], FinishReason.STOP, 8),
        (ScriptStep(text="x", finish=FinishReason.ABORT), A_LOT, "x", FinishReason.ABORT, None),
    ],
)
async def test_a_request_ends_where_its_limits_say(step, params, output, reason, matched):
    """Length, stop strings, stop ids; the tokens of a match stay in the output."""
    result = await say(engine(step), params)

    expected = ids(output) if isinstance(output, str) else output
    assert (result.output_ids.tolist(), result.finish_reason, result.matched_stop) == (expected, reason, matched)


@given(st.lists(st.integers(0, 258), min_size=2, max_size=30), st.integers(1, 29), st.integers(0, 1_000))
def test_scores_are_the_logprobs_of_the_definition(tokens, start, version):
    """Scoring what was sampled gives what sampling gave, and they are logprobs: never above zero."""
    start = min(start, len(tokens) - 1)
    whole = scripted_logprobs(as_ids(tokens), 0, str(version))

    part = scripted_logprobs(as_ids(tokens[start:]), start, str(version))

    assert part.tolist() == whole[start:].tolist()
    assert (whole < 0).all()


async def test_an_input_is_scored_by_the_weights_that_read_it():
    """New weights that cut an output short come after its input was read, as on every engine."""
    scripted = engine(ScriptStep(text="hello", token_delay_s=60))
    saying = asyncio.create_task(say(scripted, prompt_logprobs_from=1))
    while not any(live.sampled for live in scripted.live):
        await asyncio.sleep(0)
    await scripted.abort(None)
    scripted.relabel("1")
    scored = (await saying).prompt_logprobs

    assert scored.version == "0"
    assert scored.logprobs.tolist() == scripted_logprobs(PROMPT[1:], 1, "0").tolist()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (ScriptedFault.DISCONNECT, EngineConnectionLost),
        (ScriptedFault.UNAVAILABLE, EngineUnavailable),
        (ScriptedFault.REJECT, EngineRejected),
    ],
)
async def test_faults_are_typed_and_leave_nothing_in_flight(fault, error):
    scripted = engine(ScriptStep(text="hello", fault=fault, fault_after=2), ScriptStep(text="again"))

    with pytest.raises(error):
        await say(scripted)

    assert (await scripted.health()).running == 0
    assert (await say(scripted)).finish_reason is FinishReason.STOP


async def test_an_unasked_abort_leaves_the_partial():
    """What was said before the fault, and never a stop (I2)."""
    result = await say(engine(ScriptStep(text="hello", fault=ScriptedFault.ABORT, fault_after=2)))

    assert (result.output_ids.tolist(), result.finish_reason) == (ids("he"), FinishReason.ABORT)
    assert (result.matched_stop, result.version_spans) == (None, (VersionSpan("0", 0, 2),))


async def in_flight(scripted: ScriptedEngine, count: int) -> None:
    """Return once that many generations are in flight."""
    async with asyncio.timeout(30):
        while (await scripted.health()).running != count:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("input_ids", "params", "how"),
    [
        ([], A_LOT, {}),
        ([259], A_LOT, {}),
        ([-1], A_LOT, {}),
        ([5] * 50, A_LOT, {}),
        ([5], SamplingParams(0), {}),
        ([5], SamplingParams(5, top_logprobs=6), {}),
        ([5], A_LOT, {"prompt_logprobs_from": 0}),
        ([5], A_LOT, {"prompt_logprobs_from": 2}),
    ],
)
async def test_what_no_engine_could_serve_is_refused(input_ids, params, how):
    """By name, before anything starts, and without playing a step."""
    scripted = engine(ScriptStep(text="first"), ScriptStep(text="second"), context_length=50)

    with pytest.raises(EngineRejected):
        await scripted.generate(
            GenerationRequest(as_ids(input_ids), params, request_id="0" * 32, session_id="s", **how)
        )

    assert (await say(scripted, SamplingParams(1))).output_ids.tolist() == ids("f")


async def test_leaving_the_engine_ends_what_still_runs():
    """Whoever waits gets a partial, not an endless wait."""
    async with engine(ScriptStep(text="x", fault=ScriptedFault.HANG)) as scripted:
        task = asyncio.create_task(say(scripted))
        await in_flight(scripted, 1)

    assert (await task).finish_reason is FinishReason.ABORT


async def test_generating_leaves_no_open_generator_behind():
    """A generator that is left to the garbage collector becomes a task of its own at an unexpected moment."""
    scripted = engine()
    left: list = []
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(finalizer=left.append)
    try:
        await say(scripted)
        gc.collect()
    finally:
        sys.set_asyncgen_hooks(*hooks)

    assert left == []


def test_a_script_is_read_from_a_file(tmp_path):
    """Every field of a step has its place in TOML."""
    path = tmp_path / "script.toml"
    path.write_text('[[steps]]\ntext = "a"\n[[steps]]\ntokens = [1, 2]\nfault = "abort"\nfault_after = 1\n')

    assert Script.load(path).steps == (
        ScriptStep(text="a"),
        ScriptStep(tokens=(1, 2), fault=ScriptedFault.ABORT, fault_after=1),
    )


async def test_a_rule_is_a_distribution_over_next_tokens():
    """It expects its answer after each match, one id per token, whatever is sampled; before that, any id is as good."""
    rule = ScriptRule(after=r"say (\w+): ", say=("[", r"\1", "]"))
    scripted = ScriptedEngine(toy_tokenizer(), Script(rule=rule))
    read = as_ids(ids("So say ab: [xb]..say c: "))
    scored = await scripted.score(read, start=1, top=3)
    size, start = toy_tokenizer().vocab_size, len("So say ab: ")

    assert scored.top is not None
    expected = [*ids("[ab]"), *[EOS] * 9, *ids("[c]")][: read.size - start]
    assert scored.top.ids[start - 1 :, 0].tolist() == expected
    sure, other = math.log(0.999), math.log(0.001 / (size - 1))
    is_said = (read[start:] == expected).tolist()
    assert is_said[:4] == [True, False, True, True]
    assert scored.logprobs.tolist() == pytest.approx(
        [-math.log(size)] * (start - 1) + [sure if x else other for x in is_said]
    )
    assert np.exp(scored.top.logprobs[-1]).tolist() == pytest.approx([0.999, *[0.001 / (size - 1)] * 2])
    assert (await scripted.score(read, start=5)).top is None
    assert (await scripted.score(read, start=5)).logprobs.tolist() == scored.logprobs.tolist()[4:]


WRONG_RULES = [f"[rule]\nafter = '{after}'\nsay = ['{say}']" for after, say in (("(", "a"), ("a", r"\1"))]


@pytest.mark.parametrize(
    "content",
    ["steps = []", "steps = 3", '[[steps]]\ntxt = "a"', '[[steps]]\nfault = "fire"', "[[", "\xff", *WRONG_RULES],
)
def test_a_wrong_script_names_its_file(tmp_path, content):
    """An author's typo is a sentence, not a traceback."""
    path = tmp_path / "script.toml"
    path.write_text(content, encoding="latin-1")

    with pytest.raises(ScenarioError, match=r"script\.toml"):
        Script.load(path)


def test_a_script_that_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(ScenarioError, match=r"none\.toml"):
        Script.load(tmp_path / "none.toml")
