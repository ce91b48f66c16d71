"""react_chat goes through a whole tool loop, with the real client library, against the real session server."""

import json
from pathlib import Path

import pytest

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.samples.rollout import OutcomeKind, Rollout
from harness.types import FinishReason

pytestmark = pytest.mark.agent


def tool_calls(*calls: tuple[str, dict[str, str]]) -> ScriptStep:
    """A turn that calls tools, in the form models with Hermes templates say it."""
    blocks = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return ScriptStep(text="\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks))


def is_token_exact(rollout: Rollout) -> bool:
    """Whether prompt and output of each turn begin the prompt of the next one (I1)."""
    turns = rollout.session["turns"]
    lengths = [turn["prompt_length"] + turn["output_length"] for turn in turns]
    [sample] = rollout.samples
    is_one_branch = sample.metadata["turns"] == [turn["turn"] for turn in turns]
    return is_one_branch and sample.tokens.size == lengths[-1] and lengths == sorted(lengths)


async def test_a_conversation_goes_on(run_agent, workdir: Path):
    """The messages of the prompt stand first, as they are."""
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 x 7?"}]
    rollout = await run_agent("react_chat", ScriptStep(text="42"), prompt=prompt)

    assert rollout.outcome.kind is OutcomeKind.FINISHED, (workdir / "agent.log").read_text()
    assert rollout.session["turns"][0]["messages_delta"] == prompt
    assert rollout.agent_result["answer"] == "42"


async def test_a_tool_loop_runs_to_its_answer(run_agent, workdir: Path):
    """Two calls at once, one that fails, one that corrects it, then the answer; the log reads as the dialogue."""
    rollout = await run_agent(
        "react_chat",
        tool_calls(("calculate", {"expression": "(3 + 4) * 12"}), ("remember", {"key": "x", "value": "84"})),
        tool_calls(("recall", {"key": "y"}), ("calculate", {"expression": "import os"})),
        tool_calls(("recall", {"key": "x"})),
        ScriptStep(text="It is 84."),
    )

    assert rollout.outcome.kind is OutcomeKind.FINISHED, (workdir / "agent.log").read_text()
    assert rollout.agent_result == {
        "turns": 4,
        "tool_calls": 5,
        "tool_errors": 2,
        "ended": "answered",
        "answer": "It is 84.",
        "store": {"x": "84"},
    }
    assert is_token_exact(rollout)
    assert len(rollout.samples) == 1
    assert (workdir / "agent.log").read_text().splitlines()[:-1] == [
        "user> Let us begin.",
        'call> calculate {"expression": "(3 + 4) * 12"}',
        'call> remember {"key": "x", "value": "84"}',
        "tool> 84",
        "tool> remembered x",
        'call> recall {"key": "y"}',
        'call> calculate {"expression": "import os"}',
        "tool> error: nothing remembered under 'y'",
        "tool> error: cannot calculate 'import os': invalid syntax (<unknown>, line 1)",
        'call> recall {"key": "x"}',
        "tool> 84",
        "assistant> It is 84.",
    ]


@pytest.mark.parametrize(
    "call",
    [
        ("fly", {"to": "the moon"}),
        ("calculate", {}),
        ("calculate", {"expression": "9 ** 9 ** 9"}),
        ("calculate", {"expression": "1 / 0"}),
        ("calculate", {"expression": "__import__('os').system('true')"}),
        ("calculate", {"expression": "(-8) ** 0.5 // 1"}),
        ("calculate", {"expression": "(" * 300}),
        ("recall", {"key": "x", "surplus": "y"}),
    ],
)
async def test_a_failing_tool_is_answered_with_its_error(run_agent, call, workdir: Path):
    rollout = await run_agent("react_chat", tool_calls(call), ScriptStep(text="Never mind."))

    assert rollout.outcome.kind is OutcomeKind.FINISHED
    assert rollout.agent_result["tool_errors"] == 1
    assert "tool> error: " in (workdir / "agent.log").read_text()


async def test_a_loop_that_never_answers_ends_at_its_most_turns(run_agent):
    step = tool_calls(("calculate", {"expression": "1 + 1"}))
    rollout = await run_agent("react_chat", step, env={"HARNESS_MAX_TURNS": "3"})

    assert rollout.outcome.kind is OutcomeKind.FINISHED
    assert (rollout.agent_result["turns"], rollout.agent_result["ended"]) == (3, "max_turns")


async def test_a_limit_of_the_session_ends_the_loop_well(run_agent):
    """The agent leaves its result and exits with 0."""
    step = tool_calls(("remember", {"key": "x", "value": "1"}))
    rollout = await run_agent("react_chat", step, session={"limits": {"turns": 2}})

    assert rollout.outcome.kind is OutcomeKind.LIMITED
    assert rollout.agent_result["ended"] == "limit_reached"
    assert rollout.agent_result["store"] == {"x": "1"}


async def test_a_turn_that_was_cut_off_ends_the_session(run_agent):
    """A truncated tool call is content; the answer without a call ends the loop."""
    rollout = await run_agent("react_chat", ScriptStep(text='<tool_call>\n{"name": "calc', finish=FinishReason.LENGTH))

    assert rollout.outcome.kind is OutcomeKind.FINISHED
    assert rollout.agent_result["ended"] == "answered"


async def test_a_failing_engine_is_not_the_agents_fault(run_agent):
    """The client library gives up after a few attempts."""
    rollout = await run_agent("react_chat", ScriptStep(fault=ScriptedFault.UNAVAILABLE))

    assert rollout.outcome.kind is OutcomeKind.ENGINE_FAILED
