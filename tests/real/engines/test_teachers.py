"""A real engine as a teacher: its scores of a conversation with tools are those of a plain forward pass."""

import numpy as np
import pytest

from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.engines.teachers import TeacherSpec
from harness.lab.lanes import INSTALLED, LaneEngine
from harness.samples.codec import sample_from_json
from harness.server.settings import ServerSettings
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Message
from tests.builders import tool, user
from tests.real_engines import on_real
from tests.session_servers.served import serving_with

CALL = 'Guess {0}.\n<tool_call>\n{{"name": "guess", "arguments": {{"number": {0}}}}}\n</tool_call>'
TOP_K = 4
SAYINGS = [*map(CALL.format, range(11, 15)), "The number is fifteen."]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=on_real(kind)) for kind in INSTALLED])
async def test_scores_are_those_of_a_forward_pass(
    kind: LaneEngine, request: pytest.FixtureRequest, engine: HuggingFaceTokenProvider
) -> None:
    """Five turns, in float32, with a branch from the third; the policy says known words, which no teacher sampled."""
    url = request.getfixturevalue(f"{kind}_url")
    chat_tokenizer = open_chat_tokenizer(request.getfixturevalue("model_dir"))
    policy = ScriptedEngine(chat_tokenizer.tokenizer, Script([*(ScriptStep(text=text) for text in SAYINGS)]))
    settings = ServerSettings(teachers=(TeacherSpec("big", f"{kind}={url}", top_k=TOP_K),))
    async with serving_with(policy, settings=settings, chat_tokenizer=chat_tokenizer) as client:
        session = await client.create()
        history: list[Message] = [user("Guess my number.")]
        for _ in SAYINGS:
            reply = await client.say(session, history, tools=[tool("guess")])
            history.append(reply)
            calls = reply.get("tool_calls") or ()
            history += [{"role": "tool", "tool_call_id": call["id"], "content": "No, more."} for call in calls]
        await client.say(session, [*history[:5], user("Stop.")], tools=[tool("guess")])
        teacher = client.server.teachers._teachers["big"]
        held = client.server.sessions.in_memory(session.session_id)
        assert held is not None
        await teacher.finish(held)
        samples = [sample_from_json(each) for each in await client.samples(session)]

    assert len(samples) == 2
    for sample in samples:
        start, is_sampled = sample.tokens.size - sample.response_length, sample.behavior_versions >= 0
        truth = await engine.score(sample.tokens, start=start, top=TOP_K)
        assert sample.metadata["teachers"]["big"]["missing"] == 0
        np.testing.assert_allclose(sample.teachers["big"][is_sampled], truth.logprobs[is_sampled], atol=1e-4)
        top = sample.teacher_tops["big"]
        assert truth.top is not None
        np.testing.assert_allclose(top.logprobs[is_sampled], truth.top.logprobs[is_sampled], atol=1e-4)
        is_clear = np.diff(truth.top.logprobs[:, :2]).ravel() < -1e-3  # equal ones come in any order
        assert np.array_equal(top.ids[is_sampled & is_clear, 0], truth.top.ids[is_sampled & is_clear, 0])
