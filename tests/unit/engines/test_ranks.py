"""Sessions on the data-parallel ranks of one server: each keeps its own, and the samples of a group share one."""

from uuid import uuid4

import pytest
from aiohttp import web

from harness.types import GenerationRequest, SamplingParams, TokenIds, as_ids
from tests.fake_engines.fake_server import serving
from tests.fake_engines.providers import fake_provider, make_fake, scripted_engine

RANKS = 4
ENGINES = ["sglang", "vllm", "vllm-completions"]


def prompt_of(group: int, turn: int) -> TokenIds:
    """A prompt of one group, longer with each turn."""
    return as_ids([7 + group] * 128 + [1] * turn)


async def _refuse(_: web.Request) -> web.Response:
    return web.Response(status=404)


async def play(engine: str, ranks: int, *, has_metrics: bool = True) -> list[int | None]:
    """The ranks that are asked for by eight groups of two sessions, of two turns each, and by the scores of one."""
    fake = make_fake(engine, scripted_engine())
    if not has_metrics:
        fake._metrics = _refuse
    fake.ranks = ranks
    async with serving(fake, notices_disconnects=engine.startswith("vllm")), fake_provider(fake) as provider:
        fake.asked_ranks.clear()  # those of the tests at entry
        for turn in range(2):
            for session in range(16):
                prompt = prompt_of(session // 2, turn)
                params = SamplingParams(max_new_tokens=1)
                await provider.generate(GenerationRequest(prompt, params, uuid4().hex, f"session {session}"))
        await provider.score(prompt_of(0, 1), start=100, session_id="session 0")
    return fake.asked_ranks


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_session_keeps_its_rank_and_a_group_shares_one(engine):
    """All ranks have as many; a score goes where the prefix of its session is."""
    *asked, scored = await play(engine, RANKS)

    first, second = asked[:16], asked[16:]
    assert first == second
    assert first[::2] == first[1::2]
    assert sorted(first) == sorted([*range(RANKS)] * 4)
    assert scored == first[0]


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_server_of_one_rank_is_asked_for_none(engine):
    """Nothing is sent that an older server could refuse."""
    assert {*await play(engine, 1)} == {None}


async def test_a_server_without_metrics_chooses_its_ranks_itself():
    """It is entered and serves; nothing says how many ranks it has."""
    assert {*await play("vllm", RANKS, has_metrics=False)} == {None}
