"""The conversation as a loop over the SDK itself; the same source for both major versions."""

import json
from typing import Any

from conversation import MODEL, QUESTIONS, STREAMS, add, report
from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def main() -> None:
    """Ask every question, calling the tool as often as the model wants."""
    client, messages, answers = OpenAI(), [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while calls := (message := ask(client, messages)).tool_calls:
            messages += [message.to_dict(), *(tool_result(call) for call in calls)]
        messages.append(message.to_dict())
        answers.append(message.content)
    report(answers)


def ask(client: OpenAI, messages: list[Any]) -> Any:
    """The assistant's message, streamed or not."""
    if not STREAMS:
        completion = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
        return completion.choices[0].message
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=[TOOL]) as stream:
        return stream.get_final_completion().choices[0].message


def tool_result(call: Any) -> dict[str, Any]:
    """What the tool says to a call."""
    result = add(**json.loads(call.function.arguments))
    return {"role": "tool", "tool_call_id": call.id, "content": str(result)}
