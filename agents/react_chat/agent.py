# /// script
# requires-python = ">=3.11"
# dependencies = ["openai==3.52.0"]
# ///
"""A tool loop: the model calls a calculator and a small key-value store until it answers without calling a tool.

Every call of a turn is carried out and answered, in order; a call that fails is answered with its error, so that the
model can correct itself. The printed lines read as the dialogue.
"""

import ast
import json
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import NotFoundError, OpenAI

SESSION_OVER = {"branch_ended", "limit_reached", "session_closed", "turn_aborted"}
MAX_RETRIES = 2
LARGEST_BASE = 10**9
LARGEST_EXPONENT = 64
LONGEST_EXPRESSION = 200

BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class ToolError(Exception):
    """A tool cannot do what it was asked; the text goes to the model."""


def calculate(expression: str) -> str:
    """The value of an arithmetic expression."""
    if len(expression) > LONGEST_EXPRESSION:
        raise ToolError(f"expression longer than {LONGEST_EXPRESSION} characters")
    try:
        return str(value_of(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ArithmeticError, TypeError, ValueError) as error:
        raise ToolError(f"cannot calculate {expression!r}: {error}") from error


def value_of(node: ast.expr) -> int | float:
    """The number that `node` stands for; numbers and arithmetic only."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in UNARY:
            return UNARY[type(sign)](value_of(operand))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in BINARY:
            return apply(sign, value_of(left), value_of(right))
        case _:
            raise ToolError(f"only numbers and + - * / // % ** are allowed, not {ast.unparse(node)!r}")


def apply(sign: ast.operator, left: float, right: float) -> int | float:
    """`left` and `right` combined; large powers are refused."""
    if isinstance(sign, ast.Pow) and (abs(left) > LARGEST_BASE or abs(right) > LARGEST_EXPONENT):
        raise ToolError(f"powers go up to {LARGEST_BASE} ** {LARGEST_EXPONENT}")
    return BINARY[type(sign)](left, right)


class Store:
    """The texts that the model asked to keep."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def remember(self, key: str, value: str) -> str:
        """Keep `value` under `key`."""
        self.values[key] = value
        return f"remembered {key}"

    def recall(self, key: str) -> str:
        """The value kept under `key`."""
        if key not in self.values:
            raise ToolError(f"nothing remembered under {key!r}")
        return self.values[key]


def text_tool(name: str, description: str, *parameters: str) -> dict[str, Any]:
    """The definition of a tool whose parameters are all required strings."""
    schema = {
        "type": "object",
        "properties": {parameter: {"type": "string"} for parameter in parameters},
        "required": list(parameters),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    text_tool("calculate", "Work out an arithmetic expression such as (3 + 4) * 12.", "expression"),
    text_tool("remember", "Keep a value under a key.", "key", "value"),
    text_tool("recall", "Get the value that was kept under a key.", "key"),
]


@dataclass
class Agent:
    """One tool loop and what it has done so far."""

    request_kwargs: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    store: Store = field(default_factory=Store)
    client: OpenAI = field(default_factory=lambda: OpenAI(max_retries=MAX_RETRIES))
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    answer: str | None = None

    def run(self, prompt: list[dict[str, Any]], max_turns: int) -> str:
        """Loop from the messages of `prompt` until an answer; the result is the word for why it ended."""
        for message in prompt:
            self.add(message)
        while self.turns < max_turns:
            try:
                calls = self.ask()
            except NotFoundError as error:
                if error.code not in SESSION_OVER:
                    raise
                return error.code
            if not calls:
                return "answered"
            for call in calls:
                self.carry_out(call)
        return "max_turns"

    def ask(self) -> list[Any]:
        """The tool calls of the model's next turn; none means that it has answered."""
        completion = self.client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=self.messages, tools=TOOLS, **self.request_kwargs
        )
        message = completion.choices[0].message
        self.turns += 1
        self.add(message.to_dict())
        if not message.tool_calls:
            self.answer = message.content
        return message.tool_calls or []

    def carry_out(self, call: Any) -> None:
        """Answer one tool call, with its error when it fails."""
        self.tool_calls += 1
        try:
            content = self.call_tool(call.function.name, call.function.arguments)
        except ToolError as error:
            self.tool_errors += 1
            content = f"error: {error}"
        self.add({"role": "tool", "tool_call_id": call.id, "content": content})

    def call_tool(self, name: str, arguments: str) -> str:
        """The answer of the tool; everything that is wrong with the call is a `ToolError`."""
        tools = {"calculate": calculate, "remember": self.store.remember, "recall": self.store.recall}
        if name not in tools:
            raise ToolError(f"no tool {name!r}; there are {', '.join(tools)}")
        try:
            values = {key: str(value) for key, value in json.loads(arguments).items()}
            return tools[name](**values)
        except (TypeError, ValueError, AttributeError) as error:
            raise ToolError(f"wrong arguments {arguments}: {error}") from error

    def add(self, message: dict[str, Any]) -> None:
        """Put `message` into the conversation and into the log."""
        self.messages.append(message)
        if content := message.get("content"):
            say(message["role"], content if isinstance(content, str) else json.dumps(content))
        for call in message.get("tool_calls") or []:
            say("call", f"{call['function']['name']} {call['function']['arguments']}")

    def result(self, ended: str) -> dict[str, Any]:
        """The result that is left for the harness."""
        return {
            "turns": self.turns,
            "tool_calls": self.tool_calls,
            "tool_errors": self.tool_errors,
            "ended": ended,
            "answer": self.answer,
            "store": self.store.values,
        }


def say(role: str, text: str) -> None:
    """One line of the dialogue; further lines of `text` are indented."""
    print(f"{role}> " + text.replace("\n", "\n    "), flush=True)


def read_prompt() -> list[dict[str, Any]]:
    """The messages that the conversation begins with; an instruction is one of the user's."""
    if messages := os.environ.get("HARNESS_MESSAGES_FILE"):
        return json.loads(Path(messages).read_text(encoding="utf-8"))
    instruction = Path(os.environ["HARNESS_INSTRUCTION_FILE"]).read_text(encoding="utf-8").strip()
    return [{"role": "user", "content": instruction}]


def main() -> None:
    """Run one tool loop and leave its result."""
    arguments = os.environ.get("HARNESS_REQUEST_KWARGS_FILE")
    agent = Agent(json.loads(Path(arguments).read_text(encoding="utf-8")) if arguments else {})

    ended = agent.run(read_prompt(), int(os.environ.get("HARNESS_MAX_TURNS", "50")))

    result = json.dumps(agent.result(ended))
    say("end", result)
    Path(os.environ["HARNESS_RESULT_FILE"]).write_text(result, encoding="utf-8")


if __name__ == "__main__":
    main()
