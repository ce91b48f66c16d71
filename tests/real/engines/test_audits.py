"""Faults of real engines, one at a time: an audit names each, and nothing else. All of them where time does not matter.

The others of `tests/learner/test_audit.py` are faults of no server.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from harness.engines.base import LogprobScale, TokenProvider
from harness.engines.connect import open_engine
from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.engines.remote.vllm import VLLMTokenProvider
from harness.lab.lanes import INSTALLED, LaneEngine, LaneSpec, open_lane
from harness.lab.lanes.spec import Dtype
from harness.lab.models.weight_files import perturb_checkpoint
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import SQLiteStore
from harness.suite.run.audited import audit_sessions, read_branches, score_again
from harness.tokens.model_family import open_chat_tokenizer
from harness.training.audit.audit import AuditReport
from harness.training.audit.causes import GapCause
from harness.types import GenerationRequest, GenerationResult, Message
from tests.builders import user
from tests.real_engines import on_real
from tests.session_servers.served import serving_with

TURNS, SESSIONS = 3, 6
SAID = {"max_tokens": 150, "stop": [".", ",", "\n"]}
"""Ends soon and by itself, so that the branch continues."""
LONG = "The river runs to the sea. " * 20
"""More than the 128 tokens of a block in vLLM's cache."""
NOISE = 0.03

# As servers report that know no better: after the temperature, and over the candidates.
_AFTER_TEMPERATURE: dict[LaneEngine, dict[str, Any]] = {
    LaneEngine.SGLANG: {"env": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}},
    LaneEngine.VLLM: {"arguments": ("--logprobs-mode", "processed_logprobs")},
}
_PROVIDERS = {LaneEngine.SGLANG: SGLangTokenProvider, LaneEngine.VLLM: VLLMTokenProvider}
_OWN_SERVER = {
    *((kind, fault) for kind in INSTALLED for fault in (GapCause.DTYPE, GapCause.SCALE)),
    (LaneEngine.VLLM, GapCause.MASK),
}
FAULTS = (*(GapCause.CACHE, GapCause.WORKER, GapCause.TEMPLATE), *(GapCause.DTYPE, GapCause.SCALE, GapCause.MASK))
SHOWN = [(LaneEngine.SGLANG, GapCause.CACHE), (LaneEngine.VLLM, GapCause.WORKER)]
CASES = [(kind, fault) for kind in INSTALLED for fault in FAULTS]


class Faulty(HuggingFaceTokenProvider):
    """A real engine, which reports what a faulty one would; every other session's worker is the local engine."""

    def __init__(self, real: TokenProvider, model_dir: Path, fault: GapCause) -> None:
        super().__init__(model_dir)
        self.real = real
        self.fault = fault
        self.of_session: dict[str | None, int] = {}

    async def generate(self, request: GenerationRequest | None = None, **how: Any) -> GenerationResult:
        assert request is not None
        number = self.of_session.setdefault(request.session_id, len(self.of_session))
        if self.fault is GapCause.WORKER and number % 2:
            return structs.replace(await super().generate(request), worker="healthy")
        params = request.params
        if self.fault is GapCause.SCALE:
            params = replace(params, temperature=0.9)
        if self.fault is GapCause.MASK and self.real.capabilities.max_mask_ids:  # vLLM reports over candidates unasked
            params = replace(params, sampling_mask=True)
        result = await self.real.generate(replace(request, params=params))
        return structs.replace(result, masks=None, worker="faulty")


async def update_in_place(kind: LaneEngine, url: str, folder: Path, version: str) -> None:
    """New weights beside the keys and values of the old ones."""
    calls: dict[LaneEngine, list[tuple[str, dict[str, Any]]]] = {
        LaneEngine.SGLANG: [
            ("/update_weights_from_disk", {"model_path": str(folder), "weight_version": version, "flush_cache": False})
        ],
        LaneEngine.VLLM: [
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}),
            ("/update_weight_version", {"new_version": version}),
        ],
    }
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        for path, body in calls[kind]:
            (await http.post(path, json=body)).raise_for_status()


@asynccontextmanager
async def address_of(
    kind: LaneEngine, fault: GapCause, model_dir: Path, request: pytest.FixtureRequest
) -> AsyncIterator[str]:
    """That of the shared server, or of one that has the fault."""
    if (kind, fault) not in _OWN_SERVER:
        yield request.getfixturevalue(f"{kind}_url")
        return
    how: dict[str, Any] = {"dtype": Dtype.BFLOAT16} if fault is GapCause.DTYPE else _AFTER_TEMPERATURE[kind]
    async with open_lane(LaneSpec(kind, model_dir, **how)) as lane:
        yield lane.url


async def audited(kind: LaneEngine, fault: GapCause, url: str, model_dir: Path, tmp_path: Path) -> AuditReport:
    chat, moved = open_chat_tokenizer(model_dir), tmp_path / "moved"
    perturb_checkpoint(model_dir, moved, number=1, noise=NOISE)
    opening = LONG if (kind, fault) == (LaneEngine.VLLM, GapCause.CACHE) else "The river runs to the sea."
    sampling = {**SAID, **({"top_p": 0.8} if fault is GapCause.MASK else {})}
    store = tmp_path / "store.db"
    real = open_engine(f"{kind}={url}", tokenizer=chat.tokenizer)
    if (kind, fault) in _OWN_SERVER and fault is not GapCause.DTYPE:  # refused unless its operator states the scale
        vocab_size = chat.tokenizer.vocab_size
        real = _PROVIDERS[kind](url, vocab_size=vocab_size, logprob_scale=LogprobScale.AFTER_TEMPERATURE)
    engine = Faulty(real, model_dir, fault)
    serving = serving_with(
        engine, chat_tokenizer=chat, store=SQLiteStore(store), settings=ServerSettings(score_inputs=False)
    )
    async with real, serving as client:
        if (kind, fault) not in _OWN_SERVER:
            await real.update_weights(moved if fault is GapCause.WORKER else model_dir, "0")
        try:
            sessions = [await client.create(sampling={"seed": number}) for number in range(SESSIONS)]
            histories: list[list[Message]] = [[user(f"{opening} Tell of river {n}.")] for n in range(SESSIONS)]
            for turn in range(TURNS):
                if turn == TURNS - 1 and fault is GapCause.CACHE:
                    await update_in_place(kind, url, moved, "1")
                told = [
                    client.say(each, history, **sampling) for each, history in zip(sessions, histories, strict=True)
                ]
                for history, reply in zip(histories, await asyncio.gather(*told), strict=True):
                    history += [reply, user("Go on.")]
            ids = [each.session_id for each in sessions]
            again = {
                each: [await score_again(branch, real) for branch in read_branches(store, each, chat)] for each in ids
            }
        finally:
            if (kind, fault) not in _OWN_SERVER:
                await real.update_weights(model_dir, "0")
    weights = {0: model_dir, 1: moved} if fault is GapCause.CACHE else {0: model_dir}
    template = spoil_template(model_dir, tmp_path) if fault is GapCause.TEMPLATE else None
    trainer = open_chat_tokenizer(model_dir, template_file=template)
    return audit_sessions(store, ids, weights, trainer, again=again)


def spoil_template(model_dir: Path, tmp_path: Path) -> Path:
    """The model's chat template, with one character more."""
    text = (model_dir / "chat_template.jinja").read_text()
    before, after = "message.role) + '\\n'", "message.role) + ' \\n'"
    assert before in text
    file = tmp_path / "spoiled.jinja"
    file.write_text(text.replace(before, after))
    return file


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param(kind, fault, marks=on_real(kind))
        for kind, fault in (CASES if os.environ.get("HARNESS_SOAK_AUDITS") == "all" else SHOWN)
    ],
)
async def test_each_fault_of_a_real_engine_is_named(
    kind: LaneEngine, fault: GapCause, request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path
) -> None:
    async with address_of(kind, fault, model_dir, request) as url:
        report = await audited(kind, fault, url, model_dir, tmp_path)
    print(report.to_json())

    shares = report.attribution.shares
    assert sum(share.nats for share in shares) == pytest.approx(report.attribution.gap, rel=0.1)
    expected = {fault} | ({GapCause.VERSION} if fault is GapCause.CACHE else set())
    assert {share.cause for share in report.attribution.named} == expected, report.verdicts
