# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.57.0"]
# ///
"""Loops over the openai SDK, which send back the messages or items as they came."""

from typing import Any

from conversation import DESCRIPTIONS, MODEL, QUESTIONS, SCHEMAS, Way, call, play
from openai import OpenAI

FUNCTIONS = [
    {"name": name, "description": DESCRIPTIONS[name], "parameters": schema} for name, schema in SCHEMAS.items()
]


def converse(way: Way) -> list[str]:
    """Ask every question, calling tools as often as the model wants."""
    client, history = OpenAI(), []
    ask = ask_for_response if way.dialect == "openai_responses" else ask_for_message
    answers = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        while (answer := ask(client, history, way.streams)) is None:
            pass
        answers.append(answer)
    return answers


def ask_for_message(client: OpenAI, messages: list[Any], streams: bool) -> str | None:
    """The answer by chat completions; None for calls, whose results are among `messages` then."""
    asked = {
        "model": MODEL,
        "messages": messages,
        "tools": [{"type": "function", "function": each} for each in FUNCTIONS],
    }
    if streams:
        with client.chat.completions.stream(**asked) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**asked).choices[0].message
    messages.append(message)
    messages += [
        {"role": "tool", "tool_call_id": each.id, "content": call(each.function.name, each.function.arguments)}
        for each in message.tool_calls or ()
    ]
    return None if message.tool_calls else message.content


def ask_for_response(client: OpenAI, items: list[Any], streams: bool) -> str | None:
    """The same by responses."""
    asked = {
        "model": MODEL,
        "input": items,
        "tools": [{"type": "function", "strict": False, **each} for each in FUNCTIONS],
    }
    if streams:
        with client.responses.stream(**asked) as stream:
            response = stream.get_final_response()
    else:
        response = client.responses.create(**asked)
    items += response.output
    calls = [item for item in response.output if item.type == "function_call"]
    items += [
        {"type": "function_call_output", "call_id": each.call_id, "output": call(each.name, each.arguments)}
        for each in calls
    ]
    return None if calls else response.output_text


if __name__ == "__main__":
    play(converse)
