"""Updates of real engines by address, good ones and one that fails at each of its steps: whose weights are whose label?

The judge is a forward pass of the checkpoint that a token's version stands for.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.engines.connect import open_engine
from harness.errors import EngineError
from harness.lab.lanes import INSTALLED
from harness.lab.models.weight_files import perturb_checkpoint
from harness.rollouts.control.weights import WeightUpdater
from harness.rollouts.control.weights_report import UpdateBudget, UpdateReport
from harness.server.settings import ServerSettings
from harness.tokens.model_family import open_chat_tokenizer
from tests.builders import user
from tests.fake_engines.fake_server import Fault
from tests.fake_engines.faulty_proxy import FaultyProxy, proxied
from tests.fake_engines.update_steps import STEPS
from tests.ground_truth import compare
from tests.real_engines import on_real
from tests.session_servers.served import Client, Served, serving_with

pytestmark = [pytest.mark.model]

TOLERANCE = 1e-3
NOISE = 0.03
TURN = {"max_tokens": 6, "temperature": 0.7}
FAULTS = {
    "announce": Fault.REFUSED,
    "load": Fault.LOST,
    "flush": Fault.REFUSED,
    "label": Fault.LOST,
    "continue": Fault.REFUSED,
}
"""One of each step; `tests/unit/engines/test_weight_change.py` has all of them."""
BUDGET = UpdateBudget(sweep_s=0, continue_s=20)


@dataclass
class Cluster:
    """A session server and an updater in front of one real engine server, and a proxy that spoils their calls."""

    kind: str
    proxy: FaultyProxy
    client: Client
    folders: list[Path]
    """Checkpoints, taken in turns."""
    checkpoints: dict[int, Path] = field(default_factory=dict)
    sessions: list[Served] = field(default_factory=list)

    async def update(self, version: int) -> UpdateReport:
        """One update by address; an error of the engine is in its report."""
        self.checkpoints[version] = self.folders[version % len(self.folders)]
        updater = WeightUpdater([f"{self.kind}={self.proxy.url}"], [self.client.url], budget=BUDGET)
        with suppress(EngineError):
            async with updater.update(version) as update:
                await update.apply(self.checkpoints[version])
        return update.report

    def strike(self, step: str, fault: Fault) -> None:
        """The next update meets `fault` in `step`."""
        path, nth = STEPS[self.kind, step]
        self.proxy.faults[path] = [*[None] * nth, fault]

    async def turn(self) -> int:
        """One turn of a new session; the status of its answer."""
        session = await self.client.create(sampling={"seed": len(self.sessions)})
        self.sessions.append(session)
        prompt = user(f"Tell story number {len(self.sessions)}, about a lighthouse.")
        return (await self.client.chat(session, [prompt], **TURN)).status_code

    async def labels(self) -> set[str]:
        """What has sampled so far."""
        samples = [sample for session in self.sessions for sample in await self.client.samples(session)]
        return {label for sample in samples for label in sample["weight_versions"]}


@asynccontextmanager
async def _running(kind: str, url: str, model_dir: Path, folders: list[Path]) -> AsyncIterator[Cluster]:
    chat_tokenizer = open_chat_tokenizer(model_dir)
    async with proxied(url) as proxy:
        engine = open_engine(f"{kind}={proxy.url}", tokenizer=chat_tokenizer.tokenizer)
        settings = ServerSettings(pause_timeout_s=5)
        async with serving_with(engine, settings=settings, chat_tokenizer=chat_tokenizer, patience_s=600) as client:
            await engine.update_weights(model_dir, "0")
            try:
                yield Cluster(kind, proxy, client, folders, {0: model_dir})
            finally:
                proxy.faults.clear()
                await engine.update_weights(model_dir, "0")


@pytest.fixture(name="cluster", params=[pytest.param(engine, marks=on_real(engine)) for engine in INSTALLED])
async def _cluster(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    url = request.getfixturevalue(f"{request.param}_url")
    folder = tmp_path_factory.mktemp("checkpoints")
    moved = [perturb_checkpoint(model_dir, folder / str(n), number=n, noise=NOISE) for n in (1, 2)]
    async with _running(str(request.param), url, model_dir, [model_dir, *moved]) as cluster:
        yield cluster


async def test_after_every_update_the_label_is_that_of_the_weights(cluster: Cluster):
    """A good one, then for each step one that breaks off there and one that does not."""
    assert await cluster.turn() == 200
    version, told = 1, []
    assert (await cluster.update(version)).problems == ()
    assert await cluster.turn() == 200
    for step, fault in FAULTS.items():
        if (cluster.kind, step) not in STEPS:
            continue
        version += 1
        cluster.strike(step, fault)
        report = await cluster.update(version)
        status = await cluster.turn()
        told.append(f"{cluster.kind} {step} {fault}: turn {status}, {report.problems or 'no problem'}")
        assert (status == 503) == bool(report.unsettled), told[-1]
        if report.unsettled:
            assert (await cluster.client.engine.health()).paused
            assert (await cluster.client.http.get("/health")).json()["status"] == "weights_unsettled"
        version += 1
        assert [worker.error for worker in (await cluster.update(version)).workers] == [None]
        assert await cluster.turn() == 200
    print("\n".join(told))

    samples = [sample for session in cluster.sessions for sample in await cluster.client.samples(session)]
    verdict = await asyncio.to_thread(compare, samples, cluster.checkpoints)
    print("\n".join(verdict.lines()))

    assert verdict.behavior_difference < TOLERANCE
    assert str(version) in await cluster.labels()
