"""smolagents' ToolCallingAgent with a shell as its tool."""

import os

from shell_tool import MAX_TURNS, MODEL, leave_result, read_instruction, run_shell
from smolagents import OpenAIModel, ToolCallingAgent, tool


def main() -> None:
    """Run one tool loop and leave its answer."""
    model = OpenAIModel(model_id=MODEL, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = ToolCallingAgent(tools=[tool(run_shell)], model=model, max_steps=MAX_TURNS, stream_outputs=False)
    leave_result(agent.run(read_instruction()))


if __name__ == "__main__":
    main()
