"""pydantic-ai with a shell as its tool."""

from pydantic_ai import Agent
from pydantic_ai.usage import UsageLimits
from shell_tool import MAX_TURNS, MODEL, leave_result, read_instruction, run_shell


def main() -> None:
    """Run one tool loop and leave its answer."""
    agent = Agent(f"openai-chat:{MODEL}", tools=[run_shell])
    result = agent.run_sync(read_instruction(), usage_limits=UsageLimits(request_limit=MAX_TURNS))
    leave_result(result.output)


if __name__ == "__main__":
    main()
