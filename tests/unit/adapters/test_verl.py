"""One sample of verl: an output that its padding takes, whatever became of the rollout."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from harness.adapters.verl import SessionAgentLoop, close
from harness.adapters.verl.agent_loop import VERL_REWARD_MISSING
from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.errors import AdapterError, SessionServerError
from harness.types import Json
from tests.logged import capture_logs
from tests.unit.adapters.miles_runs import MilesRun, miles_run
from tests.unit.adapters.test_areal import STEPS, crash, two_turns, unscored
from tests.unit.adapters.verl_runs import verl_config

pytestmark = pytest.mark.usefixtures("trainers")

PROMPT = [{"role": "user", "content": "Do it."}]
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
PROGRAM = """
# /// script
# requires-python = ">=3.11"
# dependencies = []
# ///
import json, os, urllib.request

body = json.dumps({{"messages": [{{"role": "user", "content": os.environ["HARNESS_INSTRUCTION"]}}]}}).encode()
headers = {{"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
with open(os.environ["HARNESS_RESULT_FILE"], "w") as file:
    file.write('{result}')
"""
END = 2
"""Of a sequence."""


async def output(
    run: MilesRun,
    agent: Any,
    *,
    room: Json | None = None,
    params: Json = PARAMS,
    session_id: int | None = None,
    **loop: Any,
) -> Any:
    """What verl gets for one sample; a `session_id` is what its queue adds."""
    from verl.experimental.agent_loop.agent_loop import run_agent_loop

    config = {
        "name": "session_agent",
        "_target_": "harness.adapters.verl.SessionAgentLoop",
        "session_server": run.server.url,
        "agent": agent,
        **loop,
    }
    try:
        return await run_agent_loop(
            config,
            verl_config(**(room or {})),
            SimpleNamespace(eos_token_id=END),
            params,
            raw_prompt=PROMPT,
            global_steps=5,
            extra_info={"level": 3},
            **({} if session_id is None else {"session_id": session_id}),
        )
    finally:
        await close()


async def test_an_output_has_tokens_reward_versions_and_proximal_values() -> None:
    async with miles_run(*STEPS) as run:
        run.engine.relabel("3")
        made = await output(run, two_turns)

    assert (made.reward_score, made.num_turns) == (0.5, 4)
    assert set(made.response_mask) == {0, 1}
    assert made.extra_fields["min_global_steps"] == made.extra_fields["max_global_steps"] == 3
    assert made.extra_fields["proximal_log_probs"] == made.response_logprobs
    assert len(made.extra_fields["proximal_versions"]) == len(made.response_ids)
    assert made.extra_fields["harness"]["outcome"] == "finished"
    assert made.extra_fields["harness"]["score"] == {"figures": {"tests": 3.0}, "reason": "3 of 7 pass"}
    assert made.metrics.generate_sequences > 0


async def test_the_steps_own_version_stands_where_the_engines_name_none() -> None:
    """Step 5 samples with version 4."""
    async with miles_run(*STEPS) as run:
        run.engine.relabel("default")
        made = await output(run, two_turns)

    assert (made.extra_fields["min_global_steps"], made.extra_fields["max_global_steps"]) == (4, 4)
    assert set(made.extra_fields["proximal_versions"]) == {-1, 4}  # no token has met the next policy


@pytest.mark.parametrize("has_tokens", [True, False])
async def test_a_rollout_that_is_cut_short_trains_nothing(has_tokens: bool) -> None:
    """It comes back with its tokens masked, or as one token of nobody."""
    hangs = ScriptStep(text="An answer.", fault=ScriptedFault.HANG, fault_after=3)
    steps = (STEPS[0], hangs) if has_tokens else (hangs,)
    async with miles_run(*steps) as run:
        for deadline_s in (0.5, 4, 32):  # on a busy machine its first turn takes longer
            made = await output(run, two_turns, deadline_s=deadline_s) if has_tokens else await output(run, crash)
            if made.response_ids != [END]:
                break

    assert (set(made.response_mask), made.reward_score) == ({0}, 0.0)
    assert (made.response_ids == [END]) is not has_tokens


async def test_verl_scores_what_agents_do_not() -> None:
    """Where its configuration says so; otherwise a reward that is no number is an error."""
    async with miles_run(*STEPS) as run:
        with pytest.raises(AdapterError, match=r", got True$"):
            await output(run, unscored)
        made = [await output(run, agent, is_scored_by_agent=False) for agent in (unscored, crash)]

    assert [each.reward_score for each in made] == [None, None]


@pytest.mark.agent
@pytest.mark.parametrize("result", ["{}", '{"reward": "1"}'])
async def test_a_program_without_a_reward_costs_its_own_sample(tmp_path: Path, result: str) -> None:
    """The model may have written that file: the sample is masked and worth 0, and the step continues."""
    script = tmp_path / "agent.py"
    script.write_text(PROGRAM.format(result=result))
    async with miles_run(*STEPS) as run:
        with capture_logs() as logs:
            made = await output(run, str(script), trust_agent_result=True)

    assert (made.extra_fields["harness"]["outcome"], made.reward_score) == ("finished", 0.0)
    assert (set(made.response_mask), len(made.response_ids) > 1) == ({0}, True)
    assert [log["event"] for log in logs if log["log_level"] == "warning"] == [VERL_REWARD_MISSING]


async def test_a_sample_fits_into_verls_room() -> None:
    """A response is cut at its end. What follows a prompt that is too long is not trained."""
    async with miles_run(*STEPS) as run:
        whole = await output(run, two_turns)
        cut = await output(run, two_turns, room={"response_length": 4})
        late = await output(run, two_turns, room={"prompt_length": len(whole.prompt_ids) - 1})

    assert (cut.response_ids, cut.response_mask) == (whole.response_ids[:4], whole.response_mask[:4])
    assert (late.prompt_ids, set(late.response_mask)) == (whole.prompt_ids[1:], {0})


async def forks(base_url: str, prompt: Any, api_key: str, **_more: Any) -> Json:
    """One question, and two ways to continue."""
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(base_url=base_url, headers=headers, trust_env=False, timeout=60) as client:

        async def ask(*messages: Json) -> Json:
            answer = await client.post("/chat/completions", json={"messages": messages})
            reply: Json = answer.json()["choices"][0]["message"]
            return reply

        first = [*prompt, await ask(*prompt)]
        for way in ("Left.", "Right."):
            await ask(*first, {"role": "user", "content": way})
    return {"reward": 1.0}


async def test_the_last_output_of_a_list_has_a_trained_token() -> None:
    """GRPO reads the advantage of all outputs there; here the one that came last was cut where it is alone."""
    async with miles_run(*STEPS) as run:
        whole = await output(run, forks, session_id=0)
        first = whole[0].response_mask.index(0)
        cut = await output(run, forks, room={"response_length": first + 3}, session_id=0)

    assert [any(each.response_mask) for each in whole] == [True, True]
    assert [sum(each.response_mask) for each in cut] == [0, first]
    ledger = cut[-1].extra_fields["harness"]["ledger"]
    assert (ledger["trained"], ledger["dropped"]) == (first, {"too_long": ledger["generated"] - first})


async def test_what_cannot_be_kept_is_refused_by_name() -> None:
    """Sampling, an agent and a server that are not there."""
    async with miles_run(*STEPS) as run:
        with pytest.raises(AdapterError, match="'repetition_penalty' is not supported"):
            await output(run, two_turns, params=PARAMS | {"repetition_penalty": 1.1})
        for option, value in [("top_p", 0.9), ("top_k", 20)]:
            with pytest.raises(
                AdapterError, match=rf"^rollout.{option}={value} is not supported: the loss takes ratios"
            ):
                await output(run, two_turns, room={option: value, "correction": {"rollout_is": "token"}})
            assert (await output(run, two_turns, room={option: value})).reward_score == 0.5  # verl's own logprobs
        with pytest.raises(AdapterError, match=r"^agent: no bundled agent 'plain_caht'"):
            await output(run, "plain_caht")
        with pytest.raises(SessionServerError, match=r"127\.0\.0\.1:9"):
            await output(run, two_turns, session_server="http://127.0.0.1:9")


async def test_another_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import verl
    from pydantic import BaseModel
    from verl.experimental.agent_loop import agent_loop

    class Renamed(BaseModel):
        prompt_ids: list[int]
        response_ids: list[int]

    monkeypatch.setattr(agent_loop, "AgentLoopOutput", Renamed)
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    loop = SessionAgentLoop(
        trainer_config=SimpleNamespace(config=verl_config()),
        tokenizer=None,
        session_server="http://127.0.0.1:9",
        agent=two_turns,
    )
    with pytest.raises(AdapterError, match=r"^verl 0.10.0: AgentLoopOutput has no extra_fields, .*of verl 0.9.1$"):
        await loop.run(PARAMS, raw_prompt=PROMPT)
