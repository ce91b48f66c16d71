# /// script
# requires-python = ">=3.11"
# dependencies = ["litellm==1.110.2"]
# ///
"""A loop over litellm, by two of its providers, which sends back the messages as they came."""

from typing import Any

import litellm
from conversation import DESCRIPTIONS, MODEL, QUESTIONS, SCHEMAS, Way, call, play

TOOLS = [
    {"type": "function", "function": {"name": name, "description": DESCRIPTIONS[name], "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


def converse(way: Way) -> list[str]:
    """Ask every question, calling tools as often as the model wants."""
    messages: list[Any] = []
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while calls := (message := ask(messages, way)).tool_calls:
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": each.id, "content": call(each.function.name, each.function.arguments)}
                for each in calls
            ]
        messages.append(message)
        answers.append(message.content)
    return answers


def ask(messages: list[Any], way: Way) -> Any:
    """The assistant's message."""
    provider = "anthropic" if way.dialect == "anthropic_messages" else "openai"
    answer = litellm.completion(model=f"{provider}/{MODEL}", messages=messages, tools=TOOLS, stream=way.streams)
    whole = litellm.stream_chunk_builder(list(answer)) if way.streams else answer
    return whole.choices[0].message


if __name__ == "__main__":
    play(converse)
