# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0"]
# ///
"""The OpenAI Agents SDK, in both of its modes."""

from typing import Any

from conversation import MODEL, QUESTIONS, Way, play
from openai import AsyncOpenAI
from typed_tools import TOOLS

from agents import Agent, Runner, function_tool, set_default_openai_api, set_default_openai_client, set_tracing_disabled  # type: ignore[attr-defined]  # the package, not our folder of that name


async def converse(way: Way) -> list[str]:
    """Ask every question in one list of items."""
    set_tracing_disabled(True)
    set_default_openai_api("responses" if way.dialect == "openai_responses" else "chat_completions")
    set_default_openai_client(AsyncOpenAI(), use_for_tracing=False)
    agent = Agent(name="assistant", model=MODEL, tools=list(map(function_tool, TOOLS)))
    items, answers = [], []
    for question in QUESTIONS:
        result = await run(agent, [*items, {"role": "user", "content": question}], way.streams)
        items = result.to_input_list()
        answers.append(result.final_output)
    return answers


async def run(agent: Agent, items: list[Any], streams: bool) -> Any:
    """The result of a run."""
    if not streams:
        return await Runner.run(agent, items)
    result = Runner.run_streamed(agent, items)
    async for _ in result.stream_events():
        pass
    return result


if __name__ == "__main__":
    play(converse)
