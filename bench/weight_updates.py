"""What each way to change weights under running sessions costs, on the local engine.

    python bench/weight_updates.py [--model smollm2-135m-instruct] [--sessions 6] [--turns 3] [--json]

The same sessions (seeded, a pause between turns as if a tool ran) run once per mode while two updates come: how long
agents waited per update, how long the sweeps took, how many tokens were computed besides those sampled, and which share
of the tokens that an update made old has the logprob of its next version, after the sweep of the update that would come
next. One table row per mode.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from harness.engines.base import PauseMode, TokenProvider
from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.engines.huggingface.scheduler import StepPiece
from harness.lab.models import resolve_model
from harness.lab.models.perturb import perturb_checkpoint
from harness.rollouts.control.weights import WeightUpdater
from harness.rollouts.control.weights_report import UpdateBudget, UpdateReport, UpdateStep
from harness.server.serving import serve
from harness.server.settings import ServerSettings
from harness.server.store.memory import MemoryStore
from harness.server.telemetry.logging import configure_logging
from harness.tokens.model_family import open_chat_tokenizer
from harness.types import Json

UPDATES = 2
TOOL_S = 1.0


@dataclass(frozen=True)
class Mode:
    """A way to update."""

    name: str
    pause: PauseMode | None
    """None: no update at all."""
    score_inputs: bool = True
    sweeps: bool = True


MODES = (
    Mode("no update", None),
    Mode("abort, requests score, sweep", PauseMode.ABORT),
    Mode("abort, requests score, no sweep", PauseMode.ABORT, sweeps=False),
    Mode("abort, sweep only", PauseMode.ABORT, score_inputs=False),
    Mode("keep, sweep only", PauseMode.KEEP, score_inputs=False),
    Mode("keep, nothing scored", PauseMode.KEEP, score_inputs=False, sweeps=False),
)


@dataclass(frozen=True)
class Row:
    """What a mode cost."""

    mode: str
    run_s: float
    pause_s: float
    """Mean over the updates."""
    sweep_s: float
    """Mean, that of the next update included."""
    sampled_tokens: int
    prefill_tokens: int
    """Computed besides the sampled ones."""
    proximal_share: float
    """Of the tokens sampled before the last update."""


class CountingModel:
    """The model of an engine, with a count of the tokens that it computes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.computed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, pieces: Sequence[StepPiece]) -> Any:
        """See `RaggedModel.forward`."""
        self.computed += sum(piece.stop - piece.start for piece in pieces)
        return self._model.forward(pieces)


async def measure(mode: Mode, model: Path, checkpoints: list[Path], sessions: int, turns: int) -> Row:
    """One run."""
    engine = HuggingFaceTokenProvider(model, max_batch=16)
    settings = ServerSettings(score_inputs=mode.score_inputs)
    async with (
        serve(engine, open_chat_tokenizer(model), MemoryStore(), settings) as server,
        httpx.AsyncClient(base_url=server.url, timeout=600, trust_env=False) as http,
    ):
        # Computed tokens are no figure of the engine's own: they are counted where they enter the model.
        counting = CountingModel(engine._thread.engine._model)  # noqa: SLF001
        engine._thread.engine._model = counting  # noqa: SLF001
        began = time.monotonic()
        ids = [await create(http, seed) for seed in range(sessions)]
        agents = [asyncio.create_task(play(http, session_id, turns)) for session_id in ids]
        reports = await update(mode, engine, server.url, checkpoints, agents) if mode.pause else []
        await asyncio.gather(*agents)
        run_s = time.monotonic() - began
        last_sweep_s = await sweep(http) if mode.sweeps and reports else 0.0
        samples = [sample for session_id in ids for sample in await samples_of(http, session_id)]
        computed = counting.computed
    sampled = sum(sum(sample["loss_mask"]) for sample in samples)
    return Row(
        mode.name,
        run_s,
        sum(report.pause_s for report in reports) / max(1, len(reports)),
        sum([*(report.seconds[UpdateStep.SWEEP] for report in reports), last_sweep_s]) / (UPDATES + 1),
        sampled,
        computed - sampled,
        share(samples),
    )


async def update(
    mode: Mode, engine: TokenProvider, url: str, checkpoints: list[Path], agents: list[asyncio.Task[None]]
) -> list[UpdateReport]:
    """The updates, one after every third of the run as the agents' progress goes."""
    assert mode.pause is not None
    budget = UpdateBudget(sweep_s=120 if mode.sweeps else 0)
    updater = WeightUpdater([engine], [url], mode=mode.pause, budget=budget)
    reports: list[UpdateReport] = []
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        for version, checkpoint in enumerate(checkpoints, start=1):
            await has_come(http, turns=version * len(agents) * 0.8, agents=agents)
            async with updater.update(version) as running:
                await running.apply(checkpoint)
            reports.append(running.report)
    return reports


async def sweep(http: httpx.AsyncClient) -> float:
    """What the update after the last one would begin with; returns its seconds."""
    answer = await http.post("/sessions/sweep", json={"version": UPDATES, "budget_s": 120})
    seconds: float = answer.raise_for_status().json()["seconds"]
    return seconds


async def create(http: httpx.AsyncClient, seed: int) -> str:
    """A session."""
    answer = await http.post("/sessions", json={"sampling": {"seed": seed, "temperature": 0.7}})
    return answer.raise_for_status().json()["session_id"]


async def play(http: httpx.AsyncClient, session_id: str, turns: int) -> None:
    """An agent with a tool that takes a second."""
    history = [{"role": "user", "content": "Tell me about lighthouses, one sentence at a time."}]
    for _ in range(turns):
        body = {"model": "m", "messages": history, "max_tokens": 200, "stop": ["."]}
        answer = await http.post(f"/sessions/{session_id}/v1/chat/completions", json=body)
        if answer.status_code == 404:  # a sentence without an end
            return
        message = answer.raise_for_status().json()["choices"][0]["message"]
        history += [message, {"role": "user", "content": "And what else?"}]
        await asyncio.sleep(TOOL_S)


async def has_come(http: httpx.AsyncClient, *, turns: float, agents: list[asyncio.Task[None]]) -> None:
    """Return when all sessions together have made so many turns, or no agent is left to make them."""
    while True:
        sessions = (await http.get("/sessions")).json()["sessions"]
        if sum(session["turns"] for session in sessions) >= turns or all(agent.done() for agent in agents):
            return
        await asyncio.sleep(0.05)


async def samples_of(http: httpx.AsyncClient, session_id: str) -> list[Json]:
    """The samples of a session."""
    return (await http.get(f"/sessions/{session_id}/samples")).raise_for_status().json()["samples"]


def share(samples: list[Json]) -> float:
    """Of the tokens that an update made old, those that met their next version."""
    pairs = [
        pair for each in samples for pair in zip(each["behavior_versions"], each["proximal_versions"], strict=True)
    ]
    old = [(behavior, proximal) for behavior, proximal in pairs if 0 <= behavior < UPDATES]
    return sum(proximal == behavior + 1 for behavior, proximal in old) / len(old) if old else float("nan")


async def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    configure_logging("warning")
    model = resolve_model(args.model)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = [
            perturb_checkpoint(model, Path(folder) / str(number), number=number, noise=0.02)
            for number in range(1, UPDATES + 1)
        ]
        rows = [await measure(mode, model, checkpoints, args.sessions, args.turns) for mode in MODES]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print("| mode | run s | pause s | sweep s | sampled | computed besides | true proximal |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row.mode} | {row.run_s:.1f} | {row.pause_s:.2f} | {row.sweep_s:.2f} | {row.sampled_tokens}"
            f" | {row.prefill_tokens} | {row.proximal_share:.0%} |"
        )


if __name__ == "__main__":
    asyncio.run(main())
