"""LangGraph's agent loop, as langchain builds it, with a shell as its tool."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from shell_tool import MAX_TURNS, MODEL, leave_result, read_instruction, run_shell


def main() -> None:
    """Run one tool loop and leave its answer."""
    graph = create_agent(ChatOpenAI(model=MODEL), tools=[run_shell])
    task = {"messages": [{"role": "user", "content": read_instruction()}]}
    # A turn with tools is two steps of the graph.
    state = graph.invoke(task, config={"recursion_limit": 2 * MAX_TURNS + 1})
    leave_result(state["messages"][-1].text)


if __name__ == "__main__":
    main()
