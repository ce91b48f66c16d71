# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.52.0"]
# ///
"""Plays a text environment in messages: the environment speaks as the user, the model answers.

The environment is a game from the scenario (`HARNESS_GAME`) or a fixed list of user messages; `agents/README.md` has
both contracts. The printed lines read as the dialogue.
"""

import json
import os
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from openai import NotFoundError, OpenAI
from openai.types.chat import ChatCompletionMessage

SESSION_OVER = {"branch_ended", "limit_reached", "session_closed", "turn_aborted"}
MAX_RETRIES = 2


class Environment(Protocol):
    """The side that speaks as the user."""

    finished: str
    """The word for an ending that comes from this side."""

    reply_role: str
    """`tool`: a tool call is answered with its result; `user`: with a message, as any other answer."""

    def examples(self) -> list[dict[str, Any]]:
        """Messages that stand before the first one: how such a dialogue goes."""

    def opening(self) -> str:
        """The text behind the instruction in the first message."""

    def reply(self, answer: str) -> str | None:
        """The next user message; None when there is none."""


class GameEnvironment:
    """The `Game` of a scenario's file."""

    finished = "game_over"

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.game = runpy.run_path(path)["Game"](options)
        self.reply_role = getattr(self.game, "reply_role", "tool")

    def examples(self) -> list[dict[str, Any]]:
        return self.game.examples() if hasattr(self.game, "examples") else []

    def opening(self) -> str:
        return self.game.opening()

    def reply(self, answer: str) -> str | None:
        return self.game.reply(answer)


class FixedMessages:
    """User messages that do not depend on the answers."""

    finished = "no_more_messages"
    reply_role = "tool"

    def __init__(self, messages: list[str]) -> None:
        self.messages = iter(messages)

    def examples(self) -> list[dict[str, Any]]:
        return []

    def opening(self) -> str:
        return ""

    def reply(self, answer: str) -> str | None:  # fixed messages ignore the answer
        return next(self.messages, None)


class Dialogue:
    """The conversation so far, printed as it grows."""

    def __init__(self, request_kwargs: dict[str, Any]) -> None:
        self.client = OpenAI(max_retries=MAX_RETRIES)
        self.request_kwargs = request_kwargs
        self.messages: list[dict[str, Any]] = []
        self.turns = 0

    def ask(self, messages: list[dict[str, Any]]) -> ChatCompletionMessage:
        """The model's answer to `messages`."""
        for message in messages:
            say(message["role"], shown(message))
        self.messages += messages
        completion = self.client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=self.messages, **self.request_kwargs
        )
        choice = completion.choices[0]
        self.turns += 1
        self.messages.append(choice.message.to_dict())
        say("assistant", shown(self.messages[-1]) + (" [cut off]" if choice.finish_reason == "length" else ""))
        return choice.message


def converse(dialogue: Dialogue, environment: Environment, messages: list[dict[str, Any]], max_turns: int) -> str:
    """Talk until somebody has enough, from `messages` on; the result is the word for who that was."""
    while dialogue.turns < max_turns:
        try:
            answer = dialogue.ask(messages)
        except NotFoundError as error:
            if error.code not in SESSION_OVER:
                raise
            return error.code
        reply = environment.reply(answer_text(answer))
        if reply is None:
            return environment.finished
        messages = reply_messages(answer, reply, environment.reply_role)
    return "max_turns"


def first_messages(environment: Environment, instruction: str) -> list[dict[str, Any]]:
    """The instruction and the opening in one message; with examples, the instruction stands before them."""
    if examples := environment.examples():
        system = {"role": "system", "content": instruction}
        return [system, *examples, {"role": "user", "content": environment.opening()}]
    return with_opening([{"role": "user", "content": instruction}], environment.opening())


def conversation(environment: Environment, prompt: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of the prompt as they are, then the examples, then the opening."""
    return with_opening([*prompt, *environment.examples()], environment.opening())


def with_opening(messages: list[dict[str, Any]], opening: str) -> list[dict[str, Any]]:
    """`messages` with the opening at the end of the user's last text, or as a message of its own."""
    match messages:
        case [*before, {"role": "user", "content": str(text)} as last]:
            return [*before, {**last, "content": "\n\n".join(filter(None, (text, opening)))}]
    return [*messages, {"role": "user", "content": opening}] if opening else messages


def answer_text(answer: ChatCompletionMessage) -> str:
    """The text that the environment gets: the arguments of the first tool call, the content when there is none."""
    if answer.tool_calls:
        return answer.tool_calls[0].function.arguments
    return answer.content or ""


def reply_messages(answer: ChatCompletionMessage, reply: str, role: str) -> list[dict[str, Any]]:
    """`reply` as the result of the first tool call; as a user message when there is none, or `role` says so."""
    if not answer.tool_calls or role == "user":
        return [{"role": "user", "content": reply}]
    first, *others = answer.tool_calls
    return [tool_message(first.id, reply), *(tool_message(call.id, "error: one call per turn") for call in others)]


def tool_message(call_id: str, content: str) -> dict[str, Any]:
    """The result of one tool call."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def shown(message: Mapping[str, Any]) -> str:
    """A message as it is printed."""
    calls = (call["function"] for call in message.get("tool_calls") or [])
    shown_calls = (f"[{call['name']} {call['arguments']}]" for call in calls)
    content = message.get("content")
    text = content if isinstance(content, str | None) else json.dumps(content)
    return " ".join(filter(None, (text, *shown_calls)))


def choose_environment(metadata: Mapping[str, Any], messages: list[str]) -> Environment:
    """The game when the scenario has one, the fixed messages otherwise."""
    if game := os.environ.get("HARNESS_GAME"):
        return GameEnvironment(game, metadata.get("game", {}))
    return FixedMessages(messages)


def say(role: str, text: str) -> None:
    """One line of the dialogue; further lines of `text` are indented."""
    print(f"{role}> " + text.replace("\n", "\n    "), flush=True)


def read_file(variable: str) -> str | None:
    """What is in the file that `variable` names; None when it names none."""
    path = os.environ.get(variable)
    return None if path is None else Path(path).read_text(encoding="utf-8")


def main() -> None:
    """Play one dialogue and leave its result."""
    request_kwargs = json.loads(read_file("HARNESS_REQUEST_KWARGS_FILE") or "{}")
    messages = request_kwargs.pop("messages", [])
    environment = choose_environment(json.loads(read_file("HARNESS_METADATA_FILE") or "{}"), messages)
    instruction, prompt = read_file("HARNESS_INSTRUCTION_FILE"), read_file("HARNESS_MESSAGES_FILE")
    if instruction is None:
        first = conversation(environment, json.loads(prompt or "[]"))
    else:
        first = first_messages(environment, instruction.strip())
    dialogue = Dialogue(request_kwargs)

    ended = converse(dialogue, environment, first, int(os.environ.get("HARNESS_MAX_TURNS", "50")))

    result: dict[str, Any] = {"turns": dialogue.turns, "ended": ended}
    if isinstance(environment, GameEnvironment):
        result["game"] = environment.game.result()
    say("end", json.dumps(result))
    Path(os.environ["HARNESS_RESULT_FILE"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
