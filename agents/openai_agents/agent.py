"""The OpenAI Agents SDK with a shell as its tool, in its chat completions mode."""

import asyncio

from shell_tool import MAX_TURNS, MODEL, leave_result, read_instruction, run_shell

from agents import Agent, AsyncOpenAI, OpenAIChatCompletionsModel, Runner, function_tool  # type: ignore[attr-defined]  # the package, not our folder of that name


async def main() -> None:
    """Run one tool loop and leave its answer."""
    # By its name alone, a model with a slash would be taken for one of another provider.
    model = OpenAIChatCompletionsModel(MODEL, AsyncOpenAI())
    agent = Agent(name="shell", model=model, tools=[function_tool(run_shell)])
    result = await Runner.run(agent, read_instruction(), max_turns=MAX_TURNS)
    leave_result(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
