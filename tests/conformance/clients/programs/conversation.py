"""What every client plays: two questions to a model that has one tool.

A tool waits for a line on standard input before it answers, so whoever started the program decides when the next turn
begins. Standard library only: it is imported in environments that differ.
"""

import json
import os
import sys

QUESTIONS = ("What is 2 + 3, and that plus 4?", "Are you sure?")
MODEL = os.environ["OPENAI_MODEL"]
STREAMS = os.environ.get("CLIENT_STREAMS") == "1"


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    print("in the tool", flush=True)
    sys.stdin.readline()
    return a + b


def report(answers: list[str]) -> None:
    """The last line of a conversation that went well."""
    print(json.dumps(answers), flush=True)
