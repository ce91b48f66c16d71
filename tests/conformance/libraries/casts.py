"""The libraries that play, and the words of the models: one thinks before every call, the other one does not."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.engines.scripted import ScriptStep
from harness.rollouts.agents.profile import PROFILE_FILE

PROGRAMS = Path(__file__).parent / "programs"
QWEN3, QWEN2_5 = "qwen3", "qwen2_5"
"""The family that thinks, and the one that does not."""
ANSWERS = ["Noted: **5.5** \u2013 and 101.", "Yes."]


class Library(NamedTuple):
    """A library and the program that plays with it."""

    name: str
    package: str
    dialects: tuple[str, ...]
    """The APIs that the program plays with it, the library's default first."""
    streams: tuple[bool, ...] = (False, True)
    """Whether answers are streamed; the library's default comes first."""
    is_rare: bool = False
    """Played by `make soak` alone: its installation is heavy, or `tests/conformance/agents` has one like it."""
    rewrites: str = ""
    """The change to its history that makes another conversation of it, in words."""
    rewrites_where: tuple[bool, ...] = (False, True)
    """Where it does so: with whole answers, with streams."""

    def keeps_history(self, *, streams: bool) -> bool:
        """Whether its conversation is expected to be one branch."""
        return not self.rewrites or streams not in self.rewrites_where

    @property
    def script(self) -> Path:
        """The program, or the profile of one that runs on Node."""
        script = PROGRAMS / f"with_{self.name}.py"
        return script if script.is_file() else PROGRAMS / f"with_{self.name}" / PROFILE_FILE

    @property
    def version(self) -> str:
        """The version that the program pins."""
        pins = self.script if self.script.suffix == ".py" else self.script.with_name("package-lock.json")
        found = re.search(
            rf'"(?:node_modules/)?{re.escape(self.package)}(?:\[[\w,-]+\])?(?:==|": \{{\s*"version": ")([\w.]+)"',
            pins.read_text(encoding="utf-8"),
        )
        assert found is not None, pins
        return found.group(1)


def call(name: str, arguments: str) -> str:
    """The text of a tool call, its arguments spelled as given."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def step(thought: str, *said: str, thinks: bool) -> ScriptStep:
    """A turn; its parts are lines."""
    return ScriptStep(text=(f"<think>\n{thought}\n</think>\n\n" if thinks else "") + "\n".join(said))


def script(*, thinks: bool) -> Sequence[ScriptStep]:
    """What the model says in the six turns of the conversation.

    Words beside a call, a tool without arguments, two calls at once, numbers and characters that are spelled in more
    than one way, a nested object, words with and without a line feed at their end.
    """
    text = '"5.5 \u2013 \\"101\\"\\n日本 caf\\u00e9 </b> &"'
    place = '{"name": "\\u00c6rø", "at": [1.0, -2.50, 1e3], "depth": 3}'
    turns = (
        ("First, what there is.", "Let me look.", call("look", "{}")),
        ("Two sums: 2 + 3.50, 100 + 1.", call("add", '{"a": 2, "b": 3.50}'), call("add", '{"b": 1.0, "a":1e2}')),
        ("Both are there.", call("note", f'{{"text": {text}, "place": {place}}}')),
        ("All is done.", f"{ANSWERS[0]}\n"),
        ("I look again.", "One moment.", "", call("look", "{}")),
        ("There it is.", ANSWERS[1]),
    )
    return tuple(step(*turn, thinks=thinks) for turn in turns)


CHAT, MESSAGES, RESPONSES, GEMINI = "openai_chat", "anthropic_messages", "openai_responses", "gemini"
LIBRARIES = (
    Library("agent_framework", "agent-framework-openai", (RESPONSES, CHAT), is_rare=True),
    Library("ag2", "ag2", (CHAT, RESPONSES), is_rare=True),
    Library("agno", "agno", (CHAT, RESPONSES)),
    Library("anthropic", "anthropic", (MESSAGES,)),
    Library("autogen", "autogen-agentchat", (CHAT,)),
    Library(
        "crewai", "crewai", (CHAT,), is_rare=True, rewrites="a task starts over, without the calls of the one before"
    ),
    Library("google_adk", "google-adk", (CHAT, GEMINI), is_rare=True),
    Library("google_genai", "google-genai", (GEMINI,)),
    Library("haystack", "haystack-ai", (CHAT,)),
    Library("inspect", "inspect-ai", (RESPONSES,), streams=(False,), is_rare=True),
    Library("langgraph", "langgraph", (CHAT, RESPONSES, MESSAGES), is_rare=True),
    Library("litellm", "litellm", (CHAT, MESSAGES)),
    Library("llama_index", "llama-index-core", (CHAT,), streams=(True, False)),
    Library("openai", "openai", (CHAT, RESPONSES)),
    Library("openai_agents", "openai-agents", (RESPONSES, CHAT), is_rare=True),
    Library("openhands", "openhands-sdk", (CHAT,), is_rare=True),
    Library("pydantic_ai", "pydantic-ai-slim", (RESPONSES, CHAT, MESSAGES), is_rare=True),
    Library(
        "semantic_kernel",
        "semantic-kernel",
        (CHAT,),
        is_rare=True,
        rewrites="the words next to calls come back before the answer",
        rewrites_where=(True,),
    ),
    Library("strands", "strands-agents", (CHAT,), streams=(True, False)),
    Library("vercel_ai", "ai", (CHAT, RESPONSES, MESSAGES)),
)
