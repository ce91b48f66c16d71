"""An audit names why an engine's logprobs differ from those of the trainer's weights: faults alone and in pairs."""

import asyncio
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from torch import Tensor

from harness.engines.huggingface import HuggingFaceTokenProvider
from harness.engines.huggingface.engine import LocalEngine
from harness.expert_choice import Choose, Routers
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import SQLiteStore
from harness.suite.run.audited import audit_sessions, open_template
from harness.tokens.model_family import open_chat_tokenizer
from harness.training.audit.audit import AuditReport
from harness.training.audit.causes import GapCause
from harness.types import GenerationRequest, GenerationResult, Message
from tests.builders import user
from tests.plain_experts import write_mixture
from tests.session_servers.served import serving_with

KIND = "8 experts"
TURNS, SESSIONS, TOKENS = 3, 4, 200


@pytest.fixture(scope="module", name="folders")
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """Three sets of weights of one mixture."""
    folder = tmp_path_factory.mktemp("weights")
    return [write_mixture(folder / str(seed), KIND, seed) for seed in range(3)]


class FaultyEngine(HuggingFaceTokenProvider):
    """The local engine, which reports what a faulty one would."""

    def __init__(self, faults: frozenset[GapCause], folder: Path, other: Path) -> None:
        super().__init__(folder, dtype="bfloat16" if GapCause.DTYPE in faults else "float32")
        self.faults = faults
        self.other = HuggingFaceTokenProvider(other)
        self.of_session: dict[str | None, int] = {}

    async def generate(self, request: GenerationRequest | None = None, **how: Any) -> GenerationResult:
        assert request is not None
        number = self.of_session.setdefault(request.session_id, len(self.of_session))
        params = replace(request.params, stop_token_ids=tuple(range(3, 24)))  # this model never ends a turn
        if GapCause.SCALE in self.faults:
            params = replace(params, temperature=0.9, top_k=params.top_k or 259, sampling_mask=True)
        if GapCause.MASK in self.faults:
            params = replace(params, sampling_mask=True)
        asked = replace(request, params=params)
        if GapCause.WORKER in self.faults and number % 2:
            result = await self.other.generate(replace(asked, rows_from=None))
        else:
            result = await super().generate(asked)
        masks = result.masks if request.params.sampling_mask else None
        return structs.replace(result, masks=masks, worker=f"worker {number % 2}")


@contextmanager
def injected(faults: frozenset[GapCause]) -> Iterator[None]:
    """Break the engine inside: another expert, a cache that survives an update."""
    choosing = Routers.choosing

    @contextmanager
    def flip(self: Routers, choose: Choose) -> Iterator[None]:
        def other(layer: int, own: Tensor) -> Tensor:
            own = own.clone()
            own[:, -1] = (own.max(dim=-1).values + 1) % 8
            return choose(layer, own)

        with choosing(self, other):
            yield

    with pytest.MonkeyPatch.context() as patch:
        if GapCause.EXPERTS in faults:
            patch.setattr(Routers, "choosing", flip)
        if GapCause.CACHE in faults:
            patch.setattr(LocalEngine, "_forget_kv", lambda engine: None)
        yield


async def play(faults: frozenset[GapCause], folders: Sequence[Path], store: Path, **asked: float) -> list[str]:
    """Sessions of a faulty engine; its weights change after the second turn if a fault is about that."""
    updates = faults & {GapCause.CACHE, GapCause.VERSION}
    sampling = {"max_tokens": TOKENS, **({"top_p": 0.8} if GapCause.MASK in faults else {}), **asked}
    config = {"record": ["routed_experts"] if GapCause.EXPERTS in faults else []}
    engine = FaultyEngine(faults, folders[0], folders[2])
    chat = open_chat_tokenizer(folders[0])
    serving = serving_with(
        engine, chat_tokenizer=chat, store=SQLiteStore(store), settings=ServerSettings(score_inputs=False)
    )
    async with engine.other, serving as client:
        with injected(faults):
            sessions = [await client.create(**config, sampling={"seed": number}) for number in range(SESSIONS)]
            histories: list[list[Message]] = [[] for _ in sessions]
            for turn in range(TURNS):
                if turn == 2 and updates:
                    await engine.update_weights(folders[1], "1")
                for session_, history in zip(sessions, histories, strict=True):
                    history.append(user(f"question {turn}"))
                    history.append(await client.say(session_, history, **sampling))
    return [each.session_id for each in sessions]


def spoil_template(folder: Path, target: Path) -> Path:
    """The same model, whose template has one character more."""
    shutil.copytree(folder, target)
    template = target / "chat_template.jinja"
    before, after = "message.role) + '\\n'", "message.role) + ' \\n'"
    text = template.read_text()
    assert before in text
    template.write_text(text.replace(before, after))
    return target


def audited(faults: frozenset[GapCause], folders: Sequence[Path], tmp_path: Path) -> AuditReport:
    tmp_path.mkdir(exist_ok=True)
    ids = asyncio.run(play(faults, folders, tmp_path / "store.db"))
    weights = {0: folders[0], 1: folders[1]} if faults & {GapCause.CACHE, GapCause.VERSION} else {0: folders[0]}
    if GapCause.TEMPLATE in faults:
        weights[0] = spoil_template(folders[0], tmp_path / "trainer")
    return audit_sessions(tmp_path / "store.db", ids, weights, open_template(weights))


FAULTS = (
    *(GapCause.DTYPE, GapCause.SCALE, GapCause.CACHE, GapCause.VERSION, GapCause.MASK),
    *(GapCause.EXPERTS, GapCause.WORKER, GapCause.TEMPLATE),
)
PAIRS = [*map(frozenset, combinations(FAULTS, 2))]
SHOWN = [{GapCause.DTYPE, GapCause.SCALE}, {GapCause.CACHE, GapCause.WORKER}, {GapCause.EXPERTS, GapCause.TEMPLATE}]


def named_in(faults: frozenset[GapCause], report: AuditReport) -> bool:
    """True if the report names all faults and no other cause; changed weights are one beside a cache that did not."""
    shares = report.attribution.shares
    assert sum(share.nats for share in shares) == pytest.approx(report.attribution.gap, rel=0.1)
    assert len(report.verdicts) == max(1, len(report.attribution.named))
    named = {share.cause for share in report.attribution.named}
    # Passes that the engine made and no record has, such as other experts at other weights, stay unexplained.
    named -= {GapCause.ENGINE} if len(faults) > 1 else set()
    return named == faults | ({GapCause.VERSION} if GapCause.CACHE in faults else set())


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_alone_is_named(fault: GapCause, folders: Sequence[Path], tmp_path: Path) -> None:
    report = audited(frozenset({fault}), folders, tmp_path)
    assert named_in(frozenset({fault}), report), report.verdicts


def test_no_fault_has_no_name(folders: Sequence[Path], tmp_path: Path) -> None:
    report = audited(frozenset(), folders, tmp_path)
    assert named_in(frozenset(), report), report.verdicts
    assert report.attribution.gap < 1e-5


def test_nine_of_ten_pairs_are_named(folders: Sequence[Path], tmp_path: Path) -> None:
    """Some in each run; all of them where time does not matter."""
    pairs = PAIRS if os.environ.get("HARNESS_SOAK_AUDITS") == "all" else map(frozenset, SHOWN)
    reports = {pair: audited(pair, folders, tmp_path / "-".join(sorted(pair))) for pair in pairs}
    missed = {tuple(sorted(pair)): report.verdicts for pair, report in reports.items() if not named_in(pair, report)}
    assert len(missed) <= len(reports) / 10, missed


def test_candidates_are_those_of_the_temperature_on_record(folders: Sequence[Path], tmp_path: Path) -> None:
    """An engine that reports logprobs over candidates, after a temperature that the turn asked for."""
    asyncio.run(play(frozenset({GapCause.MASK}), folders, tmp_path / "store.db", temperature=0.7))
    weights = {0: folders[0]}
    report = audit_sessions(tmp_path / "store.db", (), weights, open_template(weights))

    assert {share.cause for share in report.attribution.named} == {GapCause.MASK, GapCause.SCALE}, report.verdicts
    assert "temperature 0.7" in " ".join(report.verdicts)
