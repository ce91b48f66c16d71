# /// script
# requires-python = ">=3.11"
# dependencies = ["google-genai==3.6.1"]
# ///
"""The conversation with the google-genai SDK 3, told to retry, which it does not do by itself."""

from typing import Any

from conversation import MODEL, QUESTIONS, STREAMS, add, report
from google import genai
from google.genai import types

NUMBERS = {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}, "b": {"type": "INTEGER"}}}
CONFIG = types.GenerateContentConfig(
    tools=[types.Tool(function_declarations=[types.FunctionDeclaration(name="add", parameters=NUMBERS)])]
)
RETRIES = types.HttpOptions(retry_options=types.HttpRetryOptions(attempts=5))


def main() -> None:
    """Ask every question, calling the tool as often as the model wants."""
    answers = []
    with genai.Client(http_options=RETRIES) as client:
        chat = client.chats.create(model=MODEL, config=CONFIG)
        for question in QUESTIONS:
            parts = send(chat, question)
            while calls := [part.function_call for part in parts if part.function_call]:
                parts = send(chat, [response(call) for call in calls])
            answers.append("".join(part.text or "" for part in parts))
    report(answers)


def response(call: Any) -> Any:
    """What the tool says to a call."""
    return types.Part.from_function_response(name=call.name, response={"result": str(add(**call.args))})


def send(chat: Any, message: Any) -> list[Any]:
    """The parts of the reply to a message."""
    replies = chat.send_message_stream(message) if STREAMS else [chat.send_message(message)]
    return [part for reply in replies for part in reply.candidates[0].content.parts]


if __name__ == "__main__":
    main()
