"""Requests that are made anyway score what waits for the live policy version, and nothing else (I7)."""

import asyncio
from pathlib import Path

import numpy as np

from harness.engines.base import PauseMode
from harness.engines.scripted import ScriptStep, scripted_logprobs
from harness.server.settings import ServerSettings
from harness.types import as_ids
from tests.builders import user
from tests.session_servers.served import Client, Served, eventually, says, serving, session_on

HI = [user("hi")]
SLOW = ScriptStep(text="a long and slow answer", token_delay_s=0.03)


async def update(client: Client, version: str) -> None:
    await client.engine.update_weights(Path("unused"), version)


async def check(client: Client, session: Served, *, met: dict[int, int]) -> None:
    """Proximal columns are the definition: `met` says which version the tokens of a behavior version met."""
    [sample] = await client.samples(session)
    tokens = as_ids(sample["tokens"])
    start = tokens.size - sample["response_length"]
    behavior, versions = np.array(sample["behavior_versions"]), np.array(sample["proximal_versions"])
    expected = np.array([met.get(version, version) for version in behavior.tolist()])
    assert versions.tolist() == expected.tolist()
    for version in set(behavior.tolist()) - {-1}:
        of_version = behavior == version
        under = scripted_logprobs(tokens, 0, str(met.get(version, version)))[start:]
        assert np.array_equal(np.array(sample["proximal_logprobs"], dtype=np.float32)[of_version], under[of_version])


async def test_a_continued_turn_scores_itself_and_the_turns_before_it(tmp_path):
    """Two updates in one turn: what was sampled first keeps the value of the version after its own (I7).

    The values are in the file: another server finds them.
    """
    store = tmp_path / "s.db"
    async with session_on(*says("one"), SLOW, store=store) as (client, session):
        messages = [*HI, await client.say(session, HI), user("continue")]
        request = asyncio.create_task(client.chat(session, messages))
        for version in ("1", "2"):
            await client.sampling()
            await client.engine.pause(PauseMode.KEEP)  # it samples no further until the gate is shut
            await client.http.post("/sessions/pause")
            await client.engine.pause(PauseMode.ABORT)
            await client.held(1)
            await update(client, version)
            await client.engine.resume()
            await client.http.post("/sessions/resume")
        assert (await request).status_code == 200
        await check(client, session, met={0: 1, 1: 2})
    async with serving(store=store) as client:
        await check(client, session, met={0: 1, 1: 2})


async def test_a_continued_turn_on_another_scale_leaves_its_own_tokens_alone():
    """A least length masks the second turn's logprobs: its resume scores the turn before it, not what it sampled."""
    async with session_on(*says("one"), SLOW) as (client, session):
        messages = [*HI, await client.say(session, HI), user("continue")]
        request = asyncio.create_task(client.chat(session, messages, min_tokens=1))
        await client.sampling()
        await client.engine.pause(PauseMode.KEEP)  # it samples no further until the gate is shut
        await client.http.post("/sessions/pause")
        await client.engine.pause(PauseMode.ABORT)
        await client.held(1)
        await update(client, "1")
        await client.engine.resume()
        await client.http.post("/sessions/resume")
        assert (await request).status_code == 200

        first, second = client.server.sessions.in_memory(session.session_id).turns
        assert set(first.proximal_versions.tolist()) == {1}
        assert [span.version for span in second.version_spans] == ["0", "1"]
        assert second.proximal_versions is None


async def test_a_server_may_leave_scoring_to_sweeps():
    """The option: no request asks for logprobs of its input."""
    async with session_on(*says("one", "two"), settings=ServerSettings(score_inputs=False)) as (client, session):
        messages = [*HI, await client.say(session, HI), user("continue")]
        await update(client, "1")
        await client.say(session, messages)

        await check(client, session, met={})


async def test_a_turn_whose_client_left_keeps_the_scores_of_its_partial():
    """Scored when it continued, whoever asked."""
    async with session_on(SLOW) as (client, session):
        gone = asyncio.create_task(client.chat(session, HI))
        await client.sampling()
        gone.cancel()
        await eventually(lambda: not client.server.sessions.in_memory(session.session_id).turns_in_flight)
        await update(client, "1")
        assert (await client.chat(session, HI)).status_code == 200

        await check(client, session, met={0: 1})
