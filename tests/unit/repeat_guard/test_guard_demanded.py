"""Whoever wants a repeat guard gets one or does not start; what it says reaches everybody."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from harness.engines.connect import open_engine
from harness.engines.repeat_guard import object_key_ids, prove_guard
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.errors import EngineReplyInvalid, ScenarioError
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import open_store
from server_patch.repeat_terminate import RepeatTerminateConfig
from tests.builders import toy_template, toy_tokenizer, user
from tests.session_servers.served import Client

GUARD = RepeatTerminateConfig(enabled=True, min_new_tokens=4, max_consecutive_token_repeats=4, ngram_size=0)
LOOP = "No" + "o" * 20
SETTINGS = ServerSettings(repeat_guard=GUARD)


@asynccontextmanager
async def serving(engine: ScriptedEngine, settings: ServerSettings = SETTINGS) -> AsyncIterator[Client]:
    async with (
        serve(engine, toy_template(), open_store("memory"), settings) as running,
        httpx.AsyncClient(base_url=running.url, timeout=60) as http,
    ):
        yield Client(http, engine, running.server, running.url, running.restored)


def scripted(*texts: str, guard: RepeatTerminateConfig | None = GUARD) -> ScriptedEngine:
    return ScriptedEngine(toy_tokenizer(), Script(tuple(ScriptStep(text=text) for text in texts)), repeat_guard=guard)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"min_new_tokens": 0, "max_consecutive_token_repeats": 0, "ngram_size": 5, "ngram_repeats": 3},
        {"min_new_tokens": 0, "max_consecutive_token_repeats": 2},
        {"max_consecutive_token_repeats": 0, "ngram_size": 0, "max_object_keys": 3},
        {"max_consecutive_token_repeats": 0, "ngram_size": 0, "max_object_keys": 3, "min_new_tokens": 0},
    ],
    ids=["defaults", "n-grams alone", "runs", "object keys alone", "object keys at once"],
)
async def test_a_guard_is_proven_by_an_output_that_it_ends(limits: dict[str, int]) -> None:
    """Whatever its limits, some output trips it; an engine that lets that one continue is refused."""
    config = RepeatTerminateConfig.from_mapping({"enabled": True, **limits})
    key_ids = object_key_ids(toy_tokenizer())

    text = "a text that continues behind every joint " * 20
    await prove_guard(scripted(text, guard=config), config, key_ids)
    with pytest.raises(EngineReplyInvalid, match=r"enabled but not active: .* got 2 tokens and 'length'"):
        await prove_guard(scripted(text, guard=None), config, key_ids)


async def test_the_environment_demands_the_guard_and_gives_it_to_engines_in_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in GUARD.to_environ().items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ScenarioError, match="unset HARNESS_REPEAT_TERMINATE_ENABLE here"):
        async with serving(scripted("hi", guard=None), ServerSettings()):
            pass
    engine = open_engine("scripted", tokenizer=toy_tokenizer())
    assert engine.capabilities.repeat_guard == GUARD.digest()


async def test_the_signal_reaches_client_record_sample_and_metrics() -> None:
    async with serving(scripted("fine", LOOP)) as client:
        session = await client.create()
        fine = (await client.chat(session, [user("hi")])).json()
        first = [user("hi"), fine["choices"][0]["message"], user("more")]
        looped = (await client.chat(session, first)).json()
        record, (sample,) = await client.record(session), await client.samples(session)
        metrics = (await client.http.get("/metrics")).text

    assert [each["harness"] for each in (fine, looped)] == [
        {"repeat_terminate_triggered": 0},
        {"repeat_terminate_triggered": 1},
    ]
    assert looped["choices"][0] | {"message": None} == {
        "index": 0, "message": None, "finish_reason": "length", "logprobs": None,
    }  # fmt: skip
    assert looped["choices"][0]["message"]["content"] == "Noooo"
    assert [(turn["status"], turn["end"]) for turn in record["turns"]] == [
        ("completed", "model"),
        ("truncated", "repeat"),
    ]
    assert (sample["repeat_terminated"], sample["status"]) == (1, "truncated")
    assert record["ledger"]["generated"] == record["ledger"]["trained"] == sum(sample["loss_mask"])
    assert "harness_repeat_guard_active 1.0" in metrics
    assert "harness_repeat_terminated_turns_total 1.0" in metrics
    assert "harness_repeat_guard_disagreements_total 0.0" in metrics


async def test_a_branch_that_the_guard_ended_is_not_extended() -> None:
    async with serving(scripted(LOOP)) as client:
        session = await client.create()
        message = await client.say(session, [user("hi")])
        answer = await client.chat(session, [user("hi"), message, user("more")])

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "branch_ended")


async def test_a_guard_that_is_there_and_does_nothing_is_noticed() -> None:
    """An engine that claims the guard and lets a loop pass: the turn stands as the engine says, and is counted."""
    engine = scripted(LOOP, guard=None)
    engine.capabilities = replace(engine.capabilities, repeat_guard=GUARD.digest())
    async with serving(engine) as client:
        session = await client.create()
        answer = (await client.chat(session, [user("hi")])).json()
        metrics = (await client.http.get("/metrics")).text

    assert (answer["choices"][0]["finish_reason"], answer["harness"]) == ("stop", {"repeat_terminate_triggered": 0})
    assert "harness_repeat_guard_disagreements_total 1.0" in metrics


async def test_without_a_guard_clients_see_no_key_of_it() -> None:
    async with serving(scripted(LOOP, guard=None), ServerSettings()) as client:
        answer = (await client.chat(await client.create(), [user("hi")])).json()

    assert "harness" not in answer
