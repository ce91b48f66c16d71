"""What the model says to each agent: five turns with the agent's own tool, the last of which ends the task.

The first command waits until it is let go, so whoever stages a scene decides when the second turn begins.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as with_fields

from harness.engines.scripted import ScriptedFault, ScriptStep
from harness.rollouts.agents.task import ProgramAgent
from tests.conformance.agents.staged_engine import Part

INSTRUCTION = "- Keep notes in the file notes.txt, please."
"""It begins as an option does."""
IN_TOOL, GO, ENVIRONMENT = "in_tool", "go", "environment"
COMMANDS = (
    f"env > {ENVIRONMENT}; touch {IN_TOOL}; while [ ! -e {GO} ]; do sleep 0.05; done; echo one > notes.txt",
    "cat notes.txt",
    "echo two >> notes.txt",
    "cat notes.txt",
)
ANSWER = "All is noted."
SAMPLED_BEFORE_HANGING = 3
"""Tokens of a second turn that is interrupted."""


@dataclass(frozen=True, slots=True)
class Tool:
    """The tool by which an agent runs commands, and how its turns look."""

    name: str
    argument: str = "command"
    further: Mapping[str, object] = field(default_factory=dict)
    """Further arguments that it demands."""
    forced: bool = False
    """The agent demands a tool call: the beginning of one stands in the prompt already."""
    last: ScriptStep | None = None
    """The turn that ends the task; an answer without a call when there is none."""

    def call(self, command: str) -> ScriptStep:
        """A turn that runs `command`."""
        return tool_call(self.name, {self.argument: command, **self.further}, forced=self.forced)


def tool_call(name: str, arguments: Mapping[str, object], *, forced: bool = False) -> ScriptStep:
    """A turn that calls a tool, spaced as models with Hermes templates space it."""
    text = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    return ScriptStep(text=text.removeprefix('<tool_call>\n{"name": "') if forced else text)


TOOLS = {
    "claude_code": Tool("Bash", further={"description": "Keeps notes"}),
    "codex": Tool("exec_command", "cmd"),
    "gemini_cli": Tool("run_shell_command", further={"description": "Keeps notes"}),
    "langgraph": Tool("run_shell"),
    "mini_swe_agent": Tool("bash", last=tool_call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})),
    "openai_agents": Tool("run_shell"),
    "opencode": Tool("bash", further={"description": "Keeps notes"}),
    "pi": Tool("bash"),
    "pydantic_ai": Tool("run_shell"),
    "qwen_code": Tool("run_shell_command", further={"is_background": False, "description": "Keeps notes"}),
    "smolagents": Tool("run_shell", forced=True, last=tool_call("final_answer", {"answer": ANSWER}, forced=True)),
}
"""By the names of the agents."""


EDITED = tuple(ScriptStep(text=f"notes.txt\n```\n{text}\n```\n") for text in ("one", "two", "three", "one\ntwo"))
TEST = f"env > {ENVIRONMENT}; touch {IN_TOOL}; while [ ! -e {GO} ]; do sleep 0.05; done; test $(wc -l < notes.txt) = 2"
TOOLLESS = {"aider": {"AIDER_AUTO_TEST": "true", "AIDER_TEST_CMD": TEST}}
"""Agents that edit by their answers, and what has them try again until the file is right: three times, at most."""
AGENTS = sorted([*TOOLS, *TOOLLESS])

CODEX, OPENCODE = ".codex/config.toml", ".config/opencode/opencode.json"


def made_impatient(agent: ProgramAgent) -> ProgramAgent:
    """`agent`, giving up after 5 s in which nothing comes, where it can be told so."""
    home = dict(agent.home or {})
    match agent.name:
        case "codex":  # the table of the provider is the last one
            return replace(agent, home={**home, CODEX: f"{home[CODEX]}stream_idle_timeout_ms = 5000\n"})
        case "opencode":
            told = home[OPENCODE].replace('"options": {', '"options": {"chunkTimeout": 5000, ')
            return replace(agent, home={**home, OPENCODE: told})
    return agent


def turns_of(name: str) -> int:
    """The turns of the conversation."""
    return len(EDITED) if name in TOOLLESS else len(COMMANDS) + 1


SYSTEM_AMONG_MESSAGES = ("claude_code",)
"""Agents that tell of files that changed in a system message behind the result of a tool."""


def long_part_of(name: str) -> Part:
    """20 turns in which files are read and changed, and an answer."""
    further = ["cat notes.txt" if number % 2 else f"echo {number} >> notes.txt" for number in range(1, 20)]
    return Part([*map(TOOLS[name].call, [COMMANDS[0], *further]), ScriptStep(text=ANSWER)])


def part_of(name: str, *, interrupted: bool = False, thinks: bool = False) -> Part:
    """The part of the agent; `interrupted`, its second turn comes to an end only when it is aborted and continued.

    A model that `thinks` does so before every call; where a call is forced it has no room to.
    """
    steps = [*EDITED]
    if name not in TOOLLESS:
        tool = TOOLS[name]
        steps = [*map(tool.call, COMMANDS), tool.last or ScriptStep(text=ANSWER)]
        if not tool.forced:
            steps[1] = with_fields(steps[1], text=f"Let me look.\n\n{steps[1].text}")
    if thinks and not (name in TOOLS and TOOLS[name].forced):
        steps = [
            with_fields(step, text=f"<think>\nTurn {turn}.\n</think>\n\n{step.text}") for turn, step in enumerate(steps)
        ]
    if interrupted:
        steps[1] = with_fields(steps[1], fault=ScriptedFault.HANG, fault_after=SAMPLED_BEFORE_HANGING)
    return Part(steps, has_tools=False) if name in TOOLLESS else Part(steps)
