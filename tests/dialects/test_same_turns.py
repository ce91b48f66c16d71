"""One script through every dialect, whole and streamed, on several families: the same ids, samples and ledgers."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle

import httpx
import msgspec
import pytest

from harness.dialects.dialect import DIALECTS
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.server.serving import serve
from harness.server.store.base import MemoryStore
from harness.tokens.conversations import TOOLS
from harness.types import FinishReason, Json, Message
from tests.conformance.families.family import Family, load
from tests.dialects.speakers import SPEAKERS, Speaker, asks

FAMILIES = ("smollm2", "qwen3", "deepseek_v3-ours", "mistral_nemo-ours", "gpt_oss-ours", "phi4-ours")
REASON = {"qwen3", "gpt_oss-ours"}
LATE = {"role": "system", "content": "Be brief."}
CALLS = [
    {"id": f"call_0_{i}", "type": "function", "function": {"name": "find_city", "arguments": arguments}}
    for i, arguments in enumerate(('{"country": "France", "population": 2}', '{"country": "日本", "population": 3}'))
]
SHARED = ("turn", "parent", "status", "end", "context_ids", "output_ids", "logprobs", "messages_delta", "reply")


@pytest.fixture(name="family", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in FAMILIES])
def _family(request: pytest.FixtureRequest) -> Family:
    try:
        return load(request.param)
    except (OSError, subprocess.SubprocessError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{request.param} cannot be fetched: {error}")


def steps_of(family: Family) -> list[ScriptStep]:
    """Two calls in a turn, a malformed one, an answer, an answer that is cut; with reasoning where it has some."""
    tokenizer = family.chat.tokenizer
    ends = [tokenizer.token_text(end) for end in family.template.end_ids]

    def written(reply: Json) -> str:
        reasoning = {"reasoning_content": "Let me see."} if family.name in REASON else {}
        [formed] = family.template.form.apply([{"role": "assistant", "content": "", **reply, **reasoning}])
        text = family.written(dict(formed))
        return text[: max(text.rfind(end) + len(end) for end in ends if end in text)]

    calls, answer = written({"tool_calls": CALLS}), written({"content": "It is Paris, é."})
    cut = answer.removesuffix(next(end for end in ends if answer.endswith(end)))
    return [
        ScriptStep(tokens=tuple(tokenizer.encode(calls))),
        ScriptStep(text=calls[: calls.index("population")]),
        ScriptStep(tokens=tuple(tokenizer.encode(answer))),
        ScriptStep(text=cut[:-4], finish=FinishReason.LENGTH),
    ]


async def play(family: Family, speakers: Iterator[Speaker], *, stream: bool, live: bool = False) -> Json:
    """What a session has recorded when the dialects of `speakers` were spoken in turn.

    A live one has an engine that takes its time, so that text leaves before the turn has ended.
    """
    steps = [msgspec.structs.replace(step, token_delay_s=0.002 * live) for step in steps_of(family)]
    engine = ScriptedEngine(family.chat.tokenizer, Script(steps=tuple(steps)))
    mode = "live" if live else "recorded"
    messages: list[Message] = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Where?"}]
    async with (
        serve(engine, family.chat, MemoryStore()) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as http,
    ):
        session = (await http.post("/sessions", json={"selection": "leaves", "streaming": mode})).json()
        for _ in range(4):
            speaker = next(speakers)
            path, body = speaker.call(messages, TOOLS, stream=stream)
            answer = await http.post(f"/sessions/{session['session_id']}{path}", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            reply = speaker.read(answer.text, stream=stream)
            messages.append(reply)
            calls = reply.get("tool_calls") or ()
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "Paris"} for call in calls]
            messages += [LATE] if calls else [{"role": "user", "content": "And?"}]
        record = (await http.get(f"/sessions/{session['session_id']}")).json()
        samples = (await http.get(f"/sessions/{session['session_id']}/samples")).json()["samples"]
    return {
        "turns": [{name: turn[name] for name in SHARED} for turn in record["turns"]],
        "used": [turn["sampling"]["used"] for turn in record["turns"]],
        "ledger": record["ledger"],
        "samples": [
            {name: value for name, value in sample.items() if name != "metadata"}
            | {"turns": sample["metadata"]["turns"]}
            for sample in samples
        ],
        "dialects": [turn["notes"]["dialect"] for turn in record["turns"]],
        "malformed": [turn["notes"].get("malformed_tool_call", False) for turn in record["turns"]],
    }


@cache
def _expected() -> dict[str, Json]:
    return {}


async def expected(family: Family) -> Json:
    """The same in chat completions, whole; played once for each family."""
    if family.name not in _expected():
        _expected()[family.name] = await play(family, cycle(SPEAKERS[:1]), stream=False)
    return _expected()[family.name]


def without(record: Json, *names: str) -> Json:
    """A record without some of its fields."""
    return {name: value for name, value in record.items() if name not in names}


async def test_the_script_says_what_it_is_for(family):
    """Two calls, a malformed one, an answer, a cut: one branch, every token in the ledger."""
    record = await expected(family)

    turns = record["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, 1, 2]
    assert [turn["status"] for turn in turns] == ["completed"] * 3 + ["truncated"]
    assert len(turns[0]["reply"]["tool_calls"]) == 2
    assert record["malformed"] == [False, True, False, False]
    assert bool(turns[0]["reply"].get("reasoning_content")) == (family.name in REASON)
    sampled = sum(len(turn["output_ids"]) for turn in turns)
    assert record["ledger"]["generated"] == record["ledger"]["trained"] == sampled


@pytest.mark.parametrize("way", ["whole", "streamed", "live"])
@pytest.mark.parametrize("speaker", SPEAKERS, ids=str)
async def test_every_dialect_records_the_same(family, speaker, way):
    """Ids, logprobs, replies, samples and ledger."""
    record = await play(family, cycle([speaker]), stream=way != "whole", live=way == "live")

    assert record["dialects"] == [speaker.name] * 4
    assert without(record, "dialects") == without(await expected(family), "dialects")


async def test_a_session_whose_turns_change_dialect_is_one_branch(family):
    """The record is that of one dialect."""
    speakers = SPEAKERS[::-1]
    record = await play(family, cycle(speakers), stream=True)

    assert record["dialects"] == [speakers[i % len(speakers)].name for i in range(4)]
    assert without(record, "dialects") == without(await expected(family), "dialects")


@pytest.mark.parametrize("family", ["deepseek_v3"], indirect=True)
async def test_a_loop_with_late_system_messages_and_a_new_header_each_time_is_one_branch(family):
    """Twenty turns with tools on a template that moves system messages to the front, as a coding agent asks."""
    assert not family.chat.describe().shows_late_system
    speaker = next(speaker for speaker in SPEAKERS if speaker.name == "anthropic_messages")
    engine = ScriptedEngine(family.chat.tokenizer, Script(steps=steps_of(family)[:1]))
    messages: list[Message] = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Where?"}]
    async with (
        serve(engine, family.chat, MemoryStore()) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as http,
    ):
        session = (await http.post("/sessions", json={})).json()
        for turn in range(20):
            body = asks(speaker, messages, TOOLS, stream=True)
            header = {"type": "text", "text": f"x-anthropic-billing-header: cch={turn};"}
            body["system"] = [header, {"type": "text", "text": body["system"]}]
            answer = await http.post(f"/sessions/{session['session_id']}{speaker.path}?beta=true", json=body)
            assert answer.status_code == 200, answer.text
            reply = speaker.read(answer.text, stream=True)
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "Paris"} for call in reply["tool_calls"]]
            messages += [reply, *results, {"role": "system", "content": f"Reminder {turn}."}]
        record = (await http.get(f"/sessions/{session['session_id']}")).json()
        [sample] = (await http.get(f"/sessions/{session['session_id']}/samples")).json()["samples"]

    assert [turn["parent"] for turn in record["turns"]] == [None, *range(19)]
    assert record["ledger"]["generated"] == record["ledger"]["trained"]
    text = family.chat.tokenizer.decode(sample["tokens"])
    assert [text.count(f"Reminder {turn}.") for turn in range(19)] == [1] * 19
    assert "billing" not in text


def test_every_dialect_has_a_speaker():
    """A further one is tested as soon as it is there."""
    spoken: Sequence[str] = [speaker.name for speaker in SPEAKERS]

    assert sorted(spoken) == sorted(dialect.name for dialect in DIALECTS)
