# /// script
# requires-python = ">=3.11"
# dependencies = ["llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"]
# ///
"""LlamaIndex' function agent with its client for servers that are like OpenAI's."""

import os

from conversation import MODEL, QUESTIONS, Way, play
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike
from typed_tools import TOOLS


async def converse(way: Way) -> list[str]:
    """Ask every question in one memory."""
    llm = OpenAILike(
        model=MODEL, is_chat_model=True, is_function_calling_model=True, api_base=os.environ["OPENAI_BASE_URL"]
    )
    agent = FunctionAgent(tools=TOOLS, llm=llm, streaming=way.streams)
    memory = ChatMemoryBuffer.from_defaults(llm=llm)
    return [str(await agent.run(question, memory=memory)) for question in QUESTIONS]


if __name__ == "__main__":
    play(converse)
