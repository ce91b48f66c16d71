"""A teacher with another tokenizer scores the text of turns, in its own template."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from harness.engines.scripted import ScriptedEngine, ScriptStep, scripted_logprobs
from harness.engines.teachers import TeacherSpec
from harness.samples.merge import NOT_ALIGNED
from harness.server.settings import ServerSettings
from harness.server.teachers import TOO_LONG
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.tokens.incremental import Spelled, align
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Message, Sample, as_ids
from tests.builders import EOS, tool, toy_tokenizer, user
from tests.session_servers.served import says, session_on
from tests.unit.server.test_teachers import collect

TEXTS = (
    "Grüße 👍🏽, 日本語!",
    "def f(x):\n    return x",
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
)


@pytest.fixture(scope="module", name="family")
def _family(model_dir: Path) -> ChatTokenizer:
    return open_chat_tokenizer(model_dir)


def taught_by(family: ChatTokenizer, folder: Path, **settings: int) -> ServerSettings:
    teacher = TeacherSpec("big", lambda: ScriptedEngine(family.tokenizer, **settings), tokenizer=folder)
    return ServerSettings(teachers=(teacher,))


def must_sum_up(sample: Sample, turns: Sequence[Sequence[Message]], family: ChatTokenizer) -> None:
    """Per turn, given the messages before it: each chunk has the teacher's logprob of its text, the end of turn too."""
    toy, start = toy_tokenizer(), sample.tokens.size - sample.response_length
    for (begin, end), messages, text in zip(sample.metadata["spans"], turns, TEXTS, strict=True):
        own, column = sample.tokens[start + begin : start + end], sample.teachers["big"][begin:end].astype(np.float64)
        assert own.tolist() == [*toy.encode(text), EOS]
        prompt, output = family.render_ids(messages, [tool()]), family.tokenizer.encode(text)
        assert family.end_of_turn_id is not None
        theirs = scripted_logprobs(as_ids([*output, family.end_of_turn_id]), len(prompt), "0")
        assert column[-1] == theirs[-1]
        for own_part, other, _ in align(Spelled.of(toy, own[:-1].tolist()), Spelled.of(family.tokenizer, output)):
            assert abs(column[own_part].sum() - theirs[other].astype(np.float64).sum()) < 1e-4
        assert abs(column.sum() - theirs.astype(np.float64).sum()) < 1e-4
    assert sample.metadata["teachers"]["big"] == {"versions": ["0"], "missing": 0}


@pytest.mark.parametrize("more", ["", ", a long one" * 1000], ids=["short", "long"])
async def test_chunks_sum_to_the_teachers_logprob_of_the_text(
    more: str, family: ChatTokenizer, model_dir: Path
) -> None:
    """In each of several turns, with tools and characters of many bytes; what a teacher remembers changes nothing."""
    async with session_on(*says(*TEXTS), settings=taught_by(family, model_dir)) as (client, session):
        history: list[Message] = []
        turns: list[list[Message]] = []
        for number in range(len(TEXTS)):
            turns.append([*history, user(f"question {number}{more}")])
            history = [*turns[-1], await client.say(session, turns[-1], tools=[tool()])]
        [sample] = await collect(client, session)
    must_sum_up(sample, turns, family)


async def test_bytes_that_are_no_text_are_missing_by_name(family: ChatTokenizer, model_dir: Path) -> None:
    """The tokens around them are scored."""
    broken = ScriptStep(tokens=(*toy_tokenizer().encode("Before "), *toy_tokenizer().encode("👍")[:2], EOS))
    async with session_on(broken, settings=taught_by(family, model_dir)) as (client, session):
        await client.converse(session, 1)
        [sample] = await collect(client, session)
    is_missing = np.isnan(sample.teachers["big"])[sample.behavior_versions >= 0]
    assert is_missing.tolist() == [False] * 7 + [True] * 2 + [False]
    assert sample.metadata["teachers"]["big"] == {"versions": ["0"], "missing": 2, "reason": NOT_ALIGNED}


async def test_a_turn_beyond_the_teachers_context_is_missing(family: ChatTokenizer, model_dir: Path) -> None:
    """In its own tokens."""
    async with session_on(*says("one"), settings=taught_by(family, model_dir, context_length=8)) as (client, session):
        await client.converse(session, 1)
        [sample] = await collect(client, session)
    assert sample.metadata["teachers"]["big"]["reason"] == TOO_LONG


def test_the_folder_of_a_local_teacher_tells_its_tokenizer(model_dir: Path) -> None:
    """Another one than the sessions' is aligned, the same one is not."""
    family = open_chat_tokenizer(model_dir)
    for text in (f"big=local={model_dir}", f"big=vllm=http://127.0.0.1:1,tokenizer={model_dir}"):
        spec = TeacherSpec.parse(text)
        assert spec.open_family(family.tokenizer) is None
        other = spec.open_family(toy_tokenizer())
        assert other is not None
        assert other.tokenizer.digest == family.tokenizer.digest
    assert spec.engine == "vllm=http://127.0.0.1:1"
    assert TeacherSpec.parse("rule=scripted").open_family(toy_tokenizer()) is None


async def test_a_required_call_that_the_prompt_begins_is_not_aligned(family: ChatTokenizer, model_dir: Path) -> None:
    """The teacher would read the rest of the call behind nothing."""
    rest = ' "add", "arguments": {}}\n</tool_call>'
    async with session_on(ScriptStep(text=rest), settings=taught_by(family, model_dir)) as (client, session):
        answer = await client.chat(session, [user("question")], tools=[tool()], tool_choice="required")
        [sample] = await collect(client, session)

    assert answer.status_code == 200, answer.text
    told = sample.metadata["teachers"]["big"]
    assert (told["missing"], told["reason"]) == (int(sample.loss_mask.sum()), NOT_ALIGNED)
