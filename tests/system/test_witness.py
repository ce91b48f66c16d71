"""The report of a run says what its engines have counted themselves, and keeps quiet where they cannot know."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import read_run
from harness.engines.scripted import ScriptStep
from harness.errors import RunError
from harness.suite.exits import ExitCode
from harness.suite.judge.verdicts import Verdict
from harness.suite.record.config import Overrides
from harness.suite.record.rollout_table import RolloutRecord
from harness.suite.run.interrupts import Interrupts
from harness.suite.run.open_run import begin_run
from harness.suite.run.report import RunReport, RunStatus
from harness.suite.run.runner import SuiteRun
from tests.fake_engines.fake_server import FakeServer, serving
from tests.fake_engines.fake_sglang import FakeSGLang
from tests.fake_engines.providers import make_fake, scripted_engine
from tests.harness_command import write_scenario
from tests.played_suites import Silence

pytestmark = pytest.mark.agent

KINDS = ("sglang", "vllm")
SAYS = ScriptStep(text="Two words.")


@asynccontextmanager
async def engine_server(kind: str) -> AsyncIterator[FakeServer]:
    """An engine server that says the same to everybody, and has said something before."""
    fake = make_fake(kind, scripted_engine(SAYS))
    fake.others = 12
    async with fake.engine, serving(fake, notices_disconnects=kind == "vllm"):
        yield fake


@dataclass
class Meanwhile(Silence):
    """Something that happens when the first rollout has ended."""

    happens: Callable[[], None]
    has_happened: bool = False

    def end_rollout(self, record: RolloutRecord) -> None:
        if not self.has_happened:
            self.has_happened = True
            self.happens()


async def run(
    fake: FakeServer, directory: Path, meanwhile: Callable[[], None] = lambda: None, **checks: object
) -> RunReport:
    """A run of four sessions on `fake`."""
    suite = write_scenario(directory / "s", concurrency=1, checks=checks)
    for name in ("config.json", "model.safetensors"):
        (directory / "toy" / name).write_text("{}")
    kind = "sglang" if isinstance(fake, FakeSGLang) else "vllm"
    opened = begin_run(str(suite), Overrides(engine=f"{kind}={fake.url}"), directory / "run")
    return await SuiteRun(opened.selection, opened.directory, Meanwhile(meanwhile), Interrupts()).execute()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_undisturbed_run_is_borne_out(kind: str, tmp_path: Path) -> None:
    """What the engine has sampled for others before does not count, nor what it was tested with."""
    async with engine_server(kind) as fake:
        report = await run(fake, tmp_path)

    witness, generated = report.witness, report.ledger.generated
    assert generated > 0
    assert (witness.counted, witness.difference, witness.agrees) == (generated, 0, True)
    assert witness.unwitnessed == []
    assert witness.words == f"engines counted {generated}, ledger {generated}; difference 0"
    assert read_run(tmp_path / "run").witness == witness
    assert Verdict("expect_witness_agrees", "no unexplained difference", witness.words, holds=True) in (
        report.scenarios[0].verdicts
    )


def starts_anew(fake: FakeServer) -> None:
    """Its counters begin at 0 again, and may have passed where they were."""
    fake.started_at += 1


def has_other_users(fake: FakeServer) -> None:
    """Somebody else's requests come through."""
    fake.others += 20


def counts_less(fake: FakeServer) -> None:
    """As SGLang does for a request that is aborted while it is retracted."""
    fake.uncounted.append(7)


def counts_more(fake: FakeServer) -> None:
    """There is nothing that would explain it."""
    fake.uncounted.append(-5)


@pytest.mark.parametrize(
    ("kind", "happens", "words"),
    [
        *((kind, starts_anew, "was restarted, or left its pool for a while") for kind in KINDS),
        *((kind, has_other_users, "requests that could sample, and this run sent") for kind in KINDS),
        ("sglang", counts_less, "the engines have not counted 1 of their requests"),
    ],
)
async def test_an_engine_that_cannot_know_says_nothing(
    kind: str, happens: Callable[[FakeServer], None], words: str, tmp_path: Path
) -> None:
    """There is no number, and the report says why; the run itself is none the worse for it."""
    async with engine_server(kind) as fake:
        report = await run(fake, tmp_path, lambda: happens(fake))

    [unwitnessed] = report.witness.unwitnessed
    assert words in unwitnessed.reason
    assert unwitnessed.tokens == report.ledger.generated > 0
    assert (report.witness.agrees, report.witness.difference, report.status) == (None, None, "passed")
    assert "expect_witness_agrees" not in [each.check for each in report.scenarios[0].verdicts]


async def test_tokens_that_nothing_explains_fail_the_run(tmp_path: Path) -> None:
    """The engine has counted five that no session got: a check does not hold, and a script that asks sees it."""
    async with engine_server("vllm") as fake:
        report = await run(fake, tmp_path, lambda: counts_more(fake))

    [failed] = [each for each in report.scenarios[0].verdicts if not each.holds]
    assert (report.witness.difference, report.witness.agrees) == (5, False)
    assert report.witness.words.endswith("; difference 5, unexplained")
    assert (failed.check, failed.seen) == ("expect_witness_agrees", report.witness.words)
    assert (report.status, report.exit_code) == (RunStatus.CHECKS_FAILED, ExitCode.CHECKS_FAILED)


async def test_a_scenario_may_allow_them(tmp_path: Path) -> None:
    async with engine_server("vllm") as fake:
        report = await run(fake, tmp_path, lambda: counts_more(fake), expect_witness_agrees=False)

    assert (report.witness.agrees, report.status) == (False, RunStatus.PASSED)


async def test_a_damaged_account_is_said(tmp_path: Path) -> None:
    """It is one of the files of a run directory."""
    async with engine_server("sglang") as fake:
        await run(fake, tmp_path)
    (tmp_path / "run" / "witness.json").write_text('{"engines": 3}')

    with pytest.raises(RunError, match="expected what engines have counted"):
        read_run(tmp_path / "run")
