"""The stream helper of the SDK on Responses; the same source for both major versions.

The last line is, for each question, the items that the helper has put together, and those that it was told are done.
"""

import json
import os

from openai import OpenAI

TOOLS = [
    {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch"},
]


def main() -> None:
    """Ask as often as the environment says."""
    client, answers = OpenAI(), []
    for number in range(int(os.environ["QUESTIONS"])):
        with client.responses.stream(model="m", input=f"Question {number}", tools=TOOLS) as stream:
            events = list(stream)
        last = events[-1]
        answers.append(
            {
                "end": last.type,
                "helper": [item.to_dict() for item in last.response.output],
                "text": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
                "snapshots": [event.snapshot for event in events if event.type == "response.output_text.delta"][-1:],
                "done": [event.item.to_dict() for event in events if event.type == "response.output_item.done"],
            }
        )
    print(json.dumps(answers), flush=True)
