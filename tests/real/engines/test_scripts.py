"""Known words through sessions on real engines: their scheduler, their cache, their aborts and their logprobs."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from harness.engines.connect import open_engine
from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.engines.teachers import TeacherSpec
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.memory import MemoryStore
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Json, as_ids
from tests.builders import tool, user

PATIENCE_S = 300
CALLS = [
    f'Guess {n}.\n<tool_call>\n{{"name": "guess", "arguments": {{"number": {n}}}}}\n</tool_call>' for n in range(11, 16)
]
CUT_IN = 2
"""The turn that a pause cuts short: long enough to be met on the way by any engine."""
CALLS[CUT_IN] = "Let me think about it once more. " * 16 + CALLS[CUT_IN]
SAYINGS = [*CALLS, "The number is fifteen."]
SCRIPT = {"steps": [{"text": text} for text in SAYINGS]}


async def play(http: httpx.AsyncClient, session: Json, cut: Any) -> None:
    """An agent that guesses, over six turns; one of them is cut short by `cut`."""
    messages: list[Any] = [user("Guess my number.")]
    for turn in range(len(SAYINGS)):
        body = {"model": "m", "messages": messages, "tools": [tool("guess")], "max_tokens": 200}
        path = f"/sessions/{session['session_id']}/v1/chat/completions"
        asked = asyncio.create_task(
            http.post(path, json=body, headers={"authorization": f"Bearer {session['api_key']}"})
        )
        if turn == CUT_IN:
            await cut()
        answer = await asked
        assert answer.status_code == 200, answer.text
        reply = answer.json()["choices"][0]["message"]
        messages.append(reply)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "No, more."}
            for call in reply.get("tool_calls") or ()
        ]
    assert messages[-1]["content"] == SAYINGS[-1]


async def says_the_script(name: str, local: HuggingFaceTokenProvider, model_dir: Path) -> None:
    """Six turns with five calls of a tool say exactly the script, with the logprobs of the model's own forward pass.

    So does a teacher, which scores each turn after it.
    """
    chat_tokenizer = open_chat_tokenizer(model_dir)
    engine = open_engine(name, tokenizer=chat_tokenizer.tokenizer)
    settings = ServerSettings(allow_forced_tokens=True, teachers=(TeacherSpec("same", name),))
    async with (
        serve(engine, chat_tokenizer, MemoryStore(), settings) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        session = (await http.post("/sessions", json={"script": SCRIPT})).raise_for_status().json()

        async def pause_in_the_middle() -> None:
            """Engines are told to abort what they do; the gate holds the rest of the turn until it opens."""
            async with asyncio.timeout(PATIENCE_S):
                while not (await engine.health()).running:
                    await asyncio.sleep(0.01)
            (await http.post("/sessions/pause")).raise_for_status()
            await engine.abort(None)
            async with asyncio.timeout(PATIENCE_S):
                while not (await http.get("/sessions/gate")).json()["turns_held"]:
                    await asyncio.sleep(0.01)
            (await http.post("/sessions/resume")).raise_for_status()

        await play(http, session, pause_in_the_middle)
        record = (await http.get(f"/sessions/{session['session_id']}?ids=prompts")).json()
        [sample] = (await http.get(f"/sessions/{session['session_id']}/samples")).json()["samples"]

    tokenizer, end = chat_tokenizer.tokenizer, chat_tokenizer.end_of_turn_id
    assert [turn["output_ids"] for turn in record["turns"]] == [[*tokenizer.encode(text), end] for text in SAYINGS]
    assert [turn["end"] for turn in record["turns"]] == ["tool_calls"] * 5 + ["model"]
    assert [each["finish_reason"] for each in record["turns"][CUT_IN]["segments"]] == ["abort", "stop"]
    assert record["ledger"]["masked"] == record["ledger"]["generated"]
    assert not any(sample["loss_mask"])
    taught = [score for score in sample["teachers"]["same"] if score is not None]
    truths = []
    for turn in record["turns"]:
        truth = await local.score(as_ids([*turn["prompt_ids"], *turn["output_ids"]]), start=len(turn["prompt_ids"]))
        np.testing.assert_allclose(turn["logprobs"], truth.logprobs, atol=1e-3)
        truths.append(truth.logprobs)
    np.testing.assert_allclose(taught, np.concatenate(truths), atol=1e-4)  # the policy's own server, as its teacher


async def test_sglang_says_the_script_of_a_session(
    sglang_url: str, engine: HuggingFaceTokenProvider, model_dir: Path
) -> None:
    await says_the_script(f"sglang={sglang_url}", engine, model_dir)


async def test_vllm_says_the_script_of_a_session(
    vllm_url: str, engine: HuggingFaceTokenProvider, model_dir: Path
) -> None:
    await says_the_script(f"vllm={vllm_url}", engine, model_dir)
