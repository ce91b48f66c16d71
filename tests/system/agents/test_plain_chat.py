"""plain_chat plays an environment that speaks as the user."""

import json
from pathlib import Path

import pytest

from harness.engines.scripted import ScriptStep
from harness.samples.rollout import OutcomeKind
from harness.types import FinishReason

pytestmark = pytest.mark.agent

COUNTDOWN = """
class Game:
    def __init__(self, options):
        self.left = options.get("rounds", 2)
        self.answers = []

    def opening(self):
        return "Round one."

    def reply(self, answer):
        self.answers.append(answer)
        self.left -= 1
        return f"{self.left} left." if self.left else None

    def result(self):
        return {"answers": self.answers}
"""

GUESS_TOOL = {
    "type": "function",
    "function": {"name": "guess", "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}}},
}


@pytest.fixture(name="game_env")
def _game_env(tmp_path: Path) -> dict[str, str]:
    game = tmp_path / "game.py"
    game.write_text(COUNTDOWN)
    return {"HARNESS_GAME": str(game)}


async def test_a_game_is_played_to_its_end(run_agent, game_env, workdir: Path):
    """Options go in, the result comes out, the log reads as the dialogue."""
    rollout = await run_agent(
        "plain_chat",
        ScriptStep(text="Ready."),
        ScriptStep(text="Two\nlines."),
        env=game_env,
        metadata={"game": {"rounds": 3}},
    )

    assert rollout.outcome.kind is OutcomeKind.FINISHED, (workdir / "agent.log").read_text()
    result = {"turns": 3, "ended": "game_over", "game": {"answers": ["Ready.", "Two\nlines.", "Ready."]}}
    assert rollout.agent_result == result
    assert (workdir / "agent.log").read_text().splitlines() == [
        "user> Let us begin.",
        "    ",
        "    Round one.",
        "assistant> Ready.",
        "user> 2 left.",
        "assistant> Two",
        "    lines.",
        "user> 1 left.",
        "assistant> Ready.",
        f"end> {json.dumps(result)}",
    ]
    assert len(rollout.samples) == 1


async def test_a_tool_call_is_an_answer(run_agent, game_env, workdir: Path):
    """The game gets its arguments, and its reply is the tool's result; a second call of the turn is turned down."""
    call = '<tool_call>\n{"name": "guess", "arguments": {"number": 7}}\n</tool_call>'
    steps = (ScriptStep(text=f"{call}\n{call}"), ScriptStep(text="I give up."))
    rollout = await run_agent("plain_chat", *steps, env=game_env, request_kwargs={"tools": [GUESS_TOOL]})

    assert rollout.agent_result["game"] == {"answers": ['{"number": 7}', "I give up."]}
    roles = [message["role"] for message in rollout.session["turns"][1]["messages_delta"]]
    assert roles == ["tool", "tool"]
    assert "assistant> [guess" in (workdir / "agent.log").read_text()


async def test_fixed_messages_are_sent_one_by_one(run_agent):
    rollout = await run_agent("plain_chat", request_kwargs={"messages": ["And then?"], "max_tokens": 20})

    assert rollout.agent_result == {"turns": 2, "ended": "no_more_messages"}
    sampling = rollout.session["turns"][0]["sampling"]
    assert sampling["asked"]["max_new_tokens"] == 20


async def test_a_conversation_goes_on_with_the_game(run_agent, game_env):
    """Its messages stand first, as they are; the opening is in the last one. Metadata of any size reach the game."""
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}]
    metadata = {"game": {"rounds": 1, "table": "x" * 200_000}}
    rollout = await run_agent("plain_chat", prompt=prompt, env=game_env, metadata=metadata)

    assert rollout.outcome.kind is OutcomeKind.FINISHED, rollout.outcome.detail
    assert rollout.session["turns"][0]["messages_delta"] == [
        prompt[0],
        {"role": "user", "content": "Count.\n\nRound one."},
    ]


async def test_a_truncated_answer_ends_the_session(run_agent, game_env, workdir: Path):
    """The next message is refused, which the agent takes well."""
    rollout = await run_agent("plain_chat", ScriptStep(text="cut", finish=FinishReason.LENGTH), env=game_env)

    assert rollout.outcome.kind is OutcomeKind.LIMITED
    assert rollout.agent_result["ended"] == "branch_ended"
    assert "assistant> cut [cut off]" in (workdir / "agent.log").read_text()


async def test_a_game_that_raises_is_a_crash(run_agent, tmp_path: Path, workdir: Path):
    (tmp_path / "game.py").write_text(COUNTDOWN.replace("self.left -= 1", "raise ValueError('bad rules')"))
    rollout = await run_agent("plain_chat", env={"HARNESS_GAME": str(tmp_path / "game.py")})

    assert rollout.outcome.kind is OutcomeKind.CRASHED
    assert "ValueError: bad rules" in (workdir / "agent.log").read_text()
