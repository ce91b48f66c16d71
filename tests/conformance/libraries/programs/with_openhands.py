# /// script
# requires-python = ">=3.12"
# dependencies = ["openhands-sdk==1.58.2"]
# ///
"""The SDK of OpenHands: its agent, in a local conversation."""

import os
import tempfile
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from conversation import MODEL, QUESTIONS, Way, call, play
from openhands.sdk import LLM, Action, Agent, Conversation, Observation, Tool, ToolDefinition
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.sdk.tool import ToolExecutor, register_tool
from typed_tools import Place


class LookAction(Action):
    """Read all notes."""


class AddAction(Action):
    """Add two numbers."""

    a: float
    b: float


class NoteAction(Action):
    """Write a note at a place."""

    text: str
    place: Place


class Said(Observation):
    """What a tool says."""


class Execute(ToolExecutor):
    """Calls the tool that an action is named for."""

    def __call__(self, action: Action, conversation: Any = None) -> Said:
        """See `ToolExecutor`."""
        del conversation
        name = type(action).__name__.removesuffix("Action").lower()
        return Said.from_text(text=call(name, action.model_dump(exclude={"kind"})))


class _Tool(ToolDefinition[Action, Said]):
    """A tool with one kind of action."""

    takes: ClassVar[type[Action]]

    @classmethod
    def create(cls, conv_state: Any = None) -> Sequence[Self]:
        """See `ToolDefinition`."""
        del conv_state
        said = {"description": cls.takes.__doc__, "action_type": cls.takes, "observation_type": Said}
        return [cls(**said, executor=Execute())]


class LookTool(_Tool):
    """Reads notes."""

    takes = LookAction


class AddTool(_Tool):
    """Adds numbers."""

    takes = AddAction


class NoteTool(_Tool):
    """Writes notes."""

    takes = NoteAction


TOOLS = (LookTool, AddTool, NoteTool)


def converse(way: Way) -> list[str]:
    """Ask every question in one conversation."""
    llm = LLM(
        model=f"openai/{MODEL}",
        api_key=os.environ["OPENAI_API_KEY"],
        base_url=os.environ["OPENAI_BASE_URL"],
        stream=way.streams,
    )
    agent = Agent(llm=llm, tools=[Tool(name=tool.name) for tool in TOOLS])
    with tempfile.TemporaryDirectory() as folder:
        conversation = Conversation(
            agent=agent, workspace=folder, visualizer=None, token_callbacks=[take] if way.streams else None
        )
        answers = []
        for question in QUESTIONS:
            conversation.send_message(question)
            conversation.run()
            answers.append(get_agent_final_response(conversation.state.events))
        conversation.close()
    return answers


def take(chunk: object) -> None:
    """Listen, which streams need."""


if __name__ == "__main__":
    for each in TOOLS:
        register_tool(each.name, each)
    play(converse)
