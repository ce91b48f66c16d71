# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0"]
# ///
"""The conversation with openai-agents, in its chat completions mode."""

import asyncio
from typing import Any

from conversation import MODEL, QUESTIONS, STREAMS, add, report

from agents import (  # type: ignore[attr-defined]  # the package, not our folder of that name
    Agent,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)


async def main() -> None:
    """Ask every question."""
    set_tracing_disabled(True)
    set_default_openai_api("chat_completions")
    agent = Agent(name="adder", model=MODEL, tools=[function_tool(add)])
    history, answers = [], []
    for question in QUESTIONS:
        result = await run(agent, [*history, {"role": "user", "content": question}])
        history = result.to_input_list()
        answers.append(result.final_output)
    report(answers)


async def run(agent: Agent, items: list[Any]) -> Any:
    """The result of a run, streamed or not."""
    if not STREAMS:
        return await Runner.run(agent, items)
    result = Runner.run_streamed(agent, items)
    async for _ in result.stream_events():
        pass
    return result


if __name__ == "__main__":
    asyncio.run(main())
