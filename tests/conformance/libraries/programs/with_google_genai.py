# /// script
# requires-python = ">=3.11"
# dependencies = ["google-genai==3.6.1"]
# ///
"""A chat of the google-genai SDK, which keeps the history chunk by chunk; thoughts are asked for with streams."""

from typing import Any

from conversation import DESCRIPTIONS, MODEL, QUESTIONS, SCHEMAS, Way, call, play
from google import genai
from google.genai import types

FUNCTIONS = [
    types.FunctionDeclaration(name=name, description=DESCRIPTIONS[name], parameters=schema)
    if name == "add"
    else types.FunctionDeclaration(name=name, description=DESCRIPTIONS[name], parameters_json_schema=schema)
    for name, schema in SCHEMAS.items()
]


def converse(way: Way) -> list[str]:
    """Ask every question, calling functions as often as the model wants."""
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=FUNCTIONS)],
        thinking_config=types.ThinkingConfig(include_thoughts=way.streams),
        top_k=40,
    )
    answers = []
    with genai.Client() as client:
        chat = client.chats.create(model=MODEL, config=config)
        for question in QUESTIONS:
            parts = send(chat, question, way.streams)
            while calls := [part.function_call for part in parts if part.function_call]:
                parts = send(chat, [answer(each) for each in calls], way.streams)
            answers.append("".join(part.text or "" for part in parts if not part.thought))
    return answers


def answer(asked: Any) -> Any:
    """The response to a call, by its name alone."""
    return types.Part.from_function_response(name=asked.name, response={"output": call(asked.name, asked.args)})


def send(chat: Any, message: Any, streams: bool) -> list[Any]:
    """The parts of the reply to a message."""
    replies = chat.send_message_stream(message) if streams else [chat.send_message(message)]
    return [part for reply in replies for part in reply.candidates[0].content.parts]


if __name__ == "__main__":
    play(converse)
