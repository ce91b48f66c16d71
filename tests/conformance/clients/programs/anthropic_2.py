# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic==2.12.0"]
# ///
"""The conversation with the anthropic SDK 2."""

from typing import Any

from anthropic import Anthropic
from conversation import MODEL, QUESTIONS, STREAMS, add, report

TOOL = {
    "name": "add",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


def main() -> None:
    """Ask every question, calling the tool as often as the model wants."""
    client, messages, answers = Anthropic(), [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while (message := ask(client, messages)).stop_reason == "tool_use":
            results = [tool_result(block) for block in message.content if block.type == "tool_use"]
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        messages.append({"role": "assistant", "content": message.content})
        answers.append("".join(block.text for block in message.content if block.type == "text"))
    report(answers)


def ask(client: Anthropic, messages: list[Any]) -> Any:
    """The assistant's message, streamed or not."""
    if not STREAMS:
        return client.messages.create(model=MODEL, max_tokens=1_000, messages=messages, tools=[TOOL])
    with client.messages.stream(model=MODEL, max_tokens=1_000, messages=messages, tools=[TOOL]) as stream:
        return stream.get_final_message()


def tool_result(block: Any) -> dict[str, Any]:
    """What the tool says to a call."""
    return {"type": "tool_result", "tool_use_id": block.id, "content": str(add(**block.input))}


if __name__ == "__main__":
    main()
