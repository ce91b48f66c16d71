"""SmolLM2 scores what a model of another family says: chunks sum to its own logprob of the text.

A teacher of any family reads a conversation again with each turn.
"""

import random
from copy import copy
from pathlib import Path

import numpy as np
import pytest

from harness.engines.scripted import Script, ScriptedEngine
from harness.engines.teachers import TeacherSpec
from harness.server.settings import ServerSettings
from harness.tokens.incremental import Spelled, align
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Message, as_ids
from tests.builders import user
from tests.conformance.families.family import Family
from tests.local_model import PlainModel
from tests.session_servers.served import says, serving_with
from tests.unit.server.test_teachers import collect

TEXTS = ("The number is 1234567, I think 👍🏽.", "Grüße aus 日本:\n\n    return x ** 2")


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gemma3"], indirect=True)
async def test_chunks_sum_to_its_own_logprob(family: Family, model_dir: Path, plain: PlainModel) -> None:
    """Within 1e-4, in each turn, at the model's own forward pass of its own ids."""
    policy = ScriptedEngine(family.chat.tokenizer, Script(says(*TEXTS)))
    settings = ServerSettings(teachers=(TeacherSpec.parse(f"big=local={model_dir}"),))
    teacher = open_chat_tokenizer(model_dir)
    async with serving_with(policy, settings=settings, chat_tokenizer=family.chat) as client:
        session = await client.create()
        turns = [[user("Guess my number.")]]
        for text in TEXTS:
            reply = await client.say(session, turns[-1])
            assert reply["content"] == text
            turns.append([*turns[-1], reply, user("Go on.")])
        held = client.server.sessions.in_memory(session.session_id)
        assert held is not None
        await client.server.teachers._teachers["big"].finish(held)
        [sample] = await collect(client, session)

    start = sample.tokens.size - sample.response_length
    assert sample.metadata["teachers"]["big"]["missing"] == 0
    for (begin, end), messages, text in zip(sample.metadata["spans"], turns, TEXTS, strict=False):
        own = sample.tokens[start + begin : start + end].tolist()
        column = sample.teachers["big"][begin:end].astype(np.float64)
        prompt, output = teacher.render_ids(messages, []), teacher.tokenizer.encode(text)
        truth = plain.logprobs(as_ids([*prompt, *output, teacher.end_of_turn_id]))[len(prompt) - 1 :]
        chunks = align(Spelled.of(family.chat.tokenizer, own[:-1]), Spelled.of(teacher.tokenizer, output))
        assert len(chunks) > 10
        for mine, its, _ in chunks:
            assert abs(column[mine].sum() - truth[its].astype(np.float64).sum()) < 1e-4
        assert abs(column.sum() - truth.astype(np.float64).sum()) < 1e-3


PIECES = (
    "word",
    " ",
    "\n\n",
    "  two",
    "日本語",
    "e\N{COMBINING ACUTE ACCENT}",
    "👍🏽",
    "\t",
    "1234567",
    "</s>",
    "<|im_end|>",
    "[INST]",
    ".",
)


def test_a_conversation_that_grows_is_encoded_as_a_whole(family: Family) -> None:
    """A teacher reads it again with each turn, of several branches in turn, and encodes only what is new."""
    rng, whole = random.Random(0), family.template.tokenizer
    kept = copy(whole)
    kept.remember(2)
    conversations: list[list[Message]] = [[user("Guess.")], [user("Guess again.")]]
    for number in range(8):
        history = conversations[number % 2]
        for role in ("assistant", "user"):
            history.append({"role": role, "content": "".join(rng.choices(PIECES, k=800))})
        text = family.template.template.render(family.template.form.apply(history))
        assert kept.encode(text) == whole.encode(text)
        assert kept.encode(text[:-500]) == whole.encode(text[:-500])
    assert kept._heads is not None
    assert family.name != "qwen3" or max(len(head.text) for head in kept._heads) > 0.8 * len(text)


@pytest.mark.parametrize("ends", [("Distance 1", "Distance 12"), ("go", "golf"), ("a", "a b"), ("\n", "\n\n")])
def test_branches_that_part_within_a_word_are_encoded_apart(family: Family, ends: tuple[str, str]) -> None:
    """As the rollouts of one prompt are: what one of them remembers is no prefix of the other."""
    whole = family.template.tokenizer
    kept = copy(whole)
    kept.remember(2)
    begin: list[Message] = [user("Play the game. " * 900), {"role": "assistant", "content": "I guess 40."}]
    for end in (*ends, ends[0]):
        for more in ([user(end)], [user("No."), {"role": "assistant", "content": end}, user("Go on.")]):
            text = family.template.template.render(family.template.form.apply([*begin, *more]))
            assert kept.encode(text) == whole.encode(text)
