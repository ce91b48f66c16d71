"""The stream helper of the openai SDK on chat completions; the same source for both major versions.

The last line is the completion that it has put together for each question.
"""

import json
import os

from openai import LengthFinishReasonError, OpenAI

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, "strict": False}}
    for name in ("add", "patch")
]


def main() -> None:
    """Ask as often as the environment says."""
    client, answers = OpenAI(), []
    for number in range(int(os.environ["QUESTIONS"])):
        question = {"role": "user", "content": f"Question {number}"}
        with client.chat.completions.stream(model="m", messages=[question], tools=TOOLS) as stream:
            try:
                for event in stream:
                    del event
                completion = stream.get_final_completion().to_dict()
            except LengthFinishReasonError as error:  # so the helper tells of an answer that was cut
                completion = error.completion.to_dict()
        answers.append({"text": completion["choices"][0]["message"].get("content") or "", "message": completion})
    print(json.dumps(answers), flush=True)
