"""What rows cost: turns a second, p99 and memory of a session server without, with 1,000 bytes a token, with masks.

    python -m bench.routed_experts [--shape 32x50] [--tokens 64]

A shape is SESSIONS x TURNS over a SQLite store. The engine returns rows of zeros, shared by all turns, and masks of 8
ids a token, in this process: so the figures are those of the server and its store. `decode` is what a reply of SGLang's
costs besides, in milliseconds of CPU per MiB of rows as it sends them (int32), or per 1,000 tokens with masks.
"""

import argparse
import asyncio
import resource
import tempfile
import time
from base64 import b64encode
from pathlib import Path

import msgspec
import numpy as np

from harness.engines.recorded_rows import MAX_MASK_IDS, check_masks
from harness.engines.remote.reply import Asked, verify_reply
from harness.engines.remote.sglang_wire import SGLangReply, read_reply
from harness.engines.scripted import Script, ScriptedEngine, ScriptStep
from harness.token_rows import RaggedRows, RoutedExperts, TokenRows
from harness.types import GenerationRequest, SamplingParams, TokenIds, VersionSpan, as_ids
from tests.builders import toy_tokenizer, user
from tests.session_servers.served import Client, serving_with

ROUTER = RoutedExperts(layers=125, top_k=8, experts=256)
"""1,000 bytes a token."""
MIB = 1 << 20


class ZeroRows(ScriptedEngine):
    """Returns rows and masks without computing them."""

    def __init__(self, tokens: int) -> None:
        super().__init__(toy_tokenizer(), Script((ScriptStep(text="x" * tokens),)), routed_experts=ROUTER)
        self._zeros = np.zeros((1 << 16, ROUTER.layers, ROUTER.top_k), np.uint8)

    def _route(self, request: GenerationRequest, output: TokenIds, spans: list[VersionSpan]) -> TokenRows | None:
        start = request.rows_from
        if start is None or not spans:
            return None
        return TokenRows(start, self._zeros[: request.input_ids.size + output.size - 1 - start])

    def _filter(self, request: GenerationRequest, output: TokenIds, spans: list[VersionSpan]) -> RaggedRows | None:
        if not request.params.sampling_mask:
            return None
        return RaggedRows.of(int(request.input_ids.size), [masked(token_id) for token_id in output.tolist()])


async def converse(client: Client[ZeroRows], turns: int, seconds: list[float], **config: object) -> None:
    session, history = await client.create(**config), []
    for number in range(turns):
        history.append(user(f"question {number}"))
        began = time.perf_counter()
        history.append(await client.say(session, history))
        seconds.append(time.perf_counter() - began)


async def measure(sessions: int, turns: int, tokens: int, folder: Path, **config: object) -> str:
    seconds: list[float] = []
    async with serving_with(ZeroRows(tokens), store=folder / f"{len(config)}.db") as client:
        await converse(client, 2, [], **config)
        before, cpu, began = resident(), time.process_time(), time.perf_counter()
        await asyncio.gather(*(converse(client, turns, seconds, **config) for _ in range(sessions)))
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    p99 = float(np.quantile(seconds, 0.99))
    return (
        f"{len(seconds) / wall:7.1f} turns/s  p99 {1000 * p99:6.0f} ms  {1000 * cpu / len(seconds):6.2f} ms CPU a turn"
        f"  peak {resident():6.0f} MiB (before {before:.0f})"
    )


def resident() -> float:
    """Peak resident memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def masked(token_id: int) -> list[int]:
    """Return 8 candidates, the token among them."""
    return [*range(token_id, token_id + 8)]


def decode(asked: Asked, output: int, **sent: object) -> float:
    """CPU milliseconds from the bytes of a reply with `sent` to verified rows."""
    meta = {
        "id": "a",
        "completion_tokens": output,
        "prompt_tokens": asked.request.input_ids.size,
        "weight_version": "0",
    }
    spans = {"weight_versions": [{"version": "0", "start": 0, "end": output}]}
    ended = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.1, 1, None]] * output}
    body = msgspec.json.encode({"meta_info": meta | spans | ended | sent, "output_ids": [1] * output})
    times = []
    for _ in range(5):
        began = time.process_time()
        result = verify_reply(asked, read_reply(asked, msgspec.json.decode(body, type=SGLangReply)))
        result = check_masks("sglang", 100, MAX_MASK_IDS, asked.request, result)
        times.append(time.process_time() - began)
        assert (result.rows is not None, result.masks is not None) == (
            "routed_experts" in sent,
            "routed_experts" not in sent,
        )
    return 1000 * min(times)


def decode_rows() -> float:
    """Milliseconds per MiB."""
    prompt = as_ids(np.zeros(2048, np.int32))
    rows = np.arange(prompt.size * 1000, dtype="<i4").reshape(-1, ROUTER.layers, ROUTER.top_k) % ROUTER.experts
    asked = Asked("sglang", GenerationRequest(prompt, SamplingParams(1), "a", rows_from=0), 10, router=ROUTER)
    return decode(asked, 1, routed_experts=b64encode(rows.tobytes()).decode()) / (rows.nbytes / MIB)


def decode_masks(tokens: int = 1000) -> float:
    request = GenerationRequest(as_ids([1]), SamplingParams(tokens, top_p=0.9, sampling_mask=True), "a")
    sent = {"output_token_sampling_mask": [masked(1)] * tokens, "output_token_sampling_logprobs": [-0.1] * tokens}
    return decode(Asked("sglang", request, 100), tokens, **sent)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="32x50")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    sessions, turns = map(int, options.shape.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        masks = {"record": ["sampling_mask"], "sampling": {"top_p": 0.9}}
        for name, config in (("without", {}), ("experts", {"record": ["routed_experts"]}), ("masks", masks)):
            figures = await measure(sessions, turns, options.tokens, Path(folder), **config)
            print(f"{name:8} {figures}", flush=True)
    print(f"decode   {decode_rows():.2f} ms CPU per MiB of rows, {decode_masks():.2f} ms per 1,000 tokens with masks")


if __name__ == "__main__":
    asyncio.run(main())
