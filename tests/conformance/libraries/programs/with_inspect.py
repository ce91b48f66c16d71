# /// script
# requires-python = ">=3.11"
# dependencies = ["inspect-ai==0.3.285", "openai==3.57.0"]
# ///
"""Inspect's generate loop with its provider for OpenAI."""

from collections.abc import Callable
from functools import wraps

from conversation import MODEL, QUESTIONS, Way, play
from inspect_ai.model import ChatMessageUser, get_model
from inspect_ai.tool import Tool, ToolDef
from typed_tools import TOOLS

PARAMETERS = {
    "add": {"a": "The one.", "b": "The other."},
    "look": {},
    "note": {"text": "What it says.", "place": "Where it is."},
}


async def converse(way: Way) -> list[str]:
    """Ask every question in one history."""
    model = get_model(f"openai/{MODEL}", memoize=False)
    messages, answers = [], []
    for question in QUESTIONS:
        added, output = await model.generate_loop(
            [*messages, ChatMessageUser(content=question)], tools=list(map(as_tool, TOOLS))
        )
        messages = [*messages, ChatMessageUser(content=question), *added]
        answers.append(output.completion)
    return answers


def as_tool(function: Callable[..., object]) -> Tool:
    """The tool that calls `function`; Inspect's are coroutines."""

    @wraps(function)
    async def execute(*args: object, **kwargs: object) -> str:
        return str(function(*args, **kwargs))

    return ToolDef(execute, name=function.__name__, parameters=PARAMETERS[function.__name__]).as_tool()


if __name__ == "__main__":
    play(converse)
