# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.52.0"]
# ///
"""Plays a text environment in plain messages: the environment speaks as the user, the model answers.

The environment is a game from the scenario (`HARNESS_GAME`) or a fixed list of user messages; `agents/README.md` has
both contracts. What is printed reads as the dialogue.
"""

import json
import os
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from openai import NotFoundError, OpenAI

SESSION_OVER = {"branch_ended", "limit_reached", "session_closed"}
MAX_RETRIES = 2


class Environment(Protocol):
    """Whoever speaks as the user."""

    finished: str
    """The word for an ending that comes from this side."""

    def opening(self) -> str:
        """What follows the instruction in the first message."""

    def reply(self, answer: str) -> str | None:
        """The next user message; None when there is none."""


class GameEnvironment:
    """The `Game` of a scenario's file."""

    finished = "game_over"

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        self.game = runpy.run_path(path)["Game"](options)

    def opening(self) -> str:
        return self.game.opening()

    def reply(self, answer: str) -> str | None:
        return self.game.reply(answer)


class FixedMessages:
    """User messages that do not depend on the answers."""

    finished = "no_more_messages"

    def __init__(self, messages: list[str]) -> None:
        self.messages = iter(messages)

    def opening(self) -> str:
        return ""

    def reply(self, answer: str) -> str | None:  # noqa: ARG002
        return next(self.messages, None)


class Dialogue:
    """The conversation so far, printed as it grows."""

    def __init__(self, request_kwargs: dict[str, Any]) -> None:
        self.client = OpenAI(max_retries=MAX_RETRIES)
        self.request_kwargs = request_kwargs
        self.messages: list[dict[str, Any]] = []
        self.turns = 0

    def ask(self, text: str) -> str:
        """The model's answer to `text`."""
        say("user", text)
        self.messages.append({"role": "user", "content": text})
        completion = self.client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=self.messages, **self.request_kwargs
        )
        choice = completion.choices[0]
        self.turns += 1
        self.messages.append(choice.message.to_dict())
        answer = choice.message.content or ""
        say("assistant", answer if choice.finish_reason != "length" else f"{answer} [cut off]")
        return answer


def converse(dialogue: Dialogue, environment: Environment, instruction: str, max_turns: int) -> str:
    """Talk until somebody has enough; the result is the word for who that was."""
    message: str | None = "\n\n".join(filter(None, (instruction, environment.opening())))
    while message is not None:
        if dialogue.turns == max_turns:
            return "max_turns"
        try:
            answer = dialogue.ask(message)
        except NotFoundError as error:
            if error.code not in SESSION_OVER:
                raise
            return error.code
        message = environment.reply(answer)
    return environment.finished


def choose_environment(metadata: Mapping[str, Any], messages: list[str]) -> Environment:
    """The game when the scenario has one, the fixed messages otherwise."""
    if game := os.environ.get("HARNESS_GAME"):
        return GameEnvironment(game, metadata.get("game", {}))
    return FixedMessages(messages)


def say(role: str, text: str) -> None:
    """One line of the dialogue; further lines of `text` are indented."""
    print(f"{role}> " + text.replace("\n", "\n    "), flush=True)


def main() -> None:
    """Play one dialogue and leave its result."""
    request_kwargs = json.loads(os.environ.get("HARNESS_REQUEST_KWARGS", "{}"))
    messages = request_kwargs.pop("messages", [])
    environment = choose_environment(json.loads(os.environ.get("HARNESS_METADATA", "{}")), messages)
    instruction = Path(os.environ["HARNESS_INSTRUCTION_FILE"]).read_text(encoding="utf-8").strip()
    dialogue = Dialogue(request_kwargs)

    ended = converse(dialogue, environment, instruction, int(os.environ.get("HARNESS_MAX_TURNS", "50")))

    result: dict[str, Any] = {"turns": dialogue.turns, "ended": ended}
    if isinstance(environment, GameEnvironment):
        result["game"] = environment.game.result()
    say("end", json.dumps(result))
    Path(os.environ["HARNESS_RESULT_FILE"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
