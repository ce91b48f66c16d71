# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic==2.14.0"]
# ///
"""A loop over the anthropic SDK, which sends back the blocks as they came."""

from typing import Any

from anthropic import Anthropic
from conversation import DESCRIPTIONS, MODEL, QUESTIONS, SCHEMAS, Way, call, play

TOOLS = [{"name": name, "description": DESCRIPTIONS[name], "input_schema": schema} for name, schema in SCHEMAS.items()]


def converse(way: Way) -> list[str]:
    """Ask every question, calling tools as often as the model wants."""
    client, messages, answers = Anthropic(), [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while (message := ask(client, messages, way.streams)).stop_reason == "tool_use":
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": call(block.name, block.input)}
                for block in message.content
                if block.type == "tool_use"
            ]
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        messages.append({"role": "assistant", "content": message.content})
        answers.append("".join(block.text for block in message.content if block.type == "text"))
    return answers


def ask(client: Anthropic, messages: list[Any], streams: bool) -> Any:
    """The assistant's message."""
    if not streams:
        return client.messages.create(model=MODEL, max_tokens=1_000, messages=messages, tools=TOOLS)
    with client.messages.stream(model=MODEL, max_tokens=1_000, messages=messages, tools=TOOLS) as stream:
        return stream.get_final_message()


if __name__ == "__main__":
    play(converse)
