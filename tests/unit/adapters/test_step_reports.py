"""Figures of a trainer's step, read back from the stores that the environment names."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.adapters import miles, slime, verl
from harness.adapters.step_reports import ReportedSample, close_reports, step_figures
from harness.errors import AdapterError
from harness.types import Json
from tests.checkout import ROOT
from tests.unit.adapters.miles_runs import AGENTS, miles_run
from tests.unit.adapters.test_areal import STEPS, two_turns
from tests.unit.adapters.test_miles_generate import generate_all, state_of
from tests.unit.adapters.test_verl import output
from tests.wandb_file import wandb_values

pytestmark = [pytest.mark.usefixtures("trainers"), pytest.mark.xdist_group("torch")]  # which TensorBoard imports


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where TensorBoard's and W&B's files of this test go."""
    monkeypatch.setenv("HARNESS_REPORT", "tensorboard wandb")
    monkeypatch.setenv("HARNESS_REPORT_DIR", str(tmp_path / "reports"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield tmp_path / "reports"
    close_reports()


def read(folder: Path) -> dict[int, dict[str, float]]:
    """What TensorBoard reads, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    close_reports()
    found: dict[int, dict[str, float]] = {}
    files = EventAccumulator(str(folder / "tensorboard"))
    files.Reload()
    for key in files.Tags()["scalars"]:
        for event in files.Scalars(key):
            found.setdefault(event.step, {})[key] = event.value
    return found


async def test_a_step_of_miles_is_in_the_stores_beside_a_run_of_its_own(folder: Path, tmp_path: Path) -> None:
    """A rollout of two branches counts once, as does its ledger; miles continues with its own run of W&B."""
    import wandb

    own = wandb.init(project="of miles", dir=str(tmp_path))
    assert own is not None
    async with miles_run(*STEPS, custom_agent_function_path=f"{AGENTS}.run_branches") as run:
        samples = [
            sample
            for index in (7, 8)
            for sample in await generate_all(state_of(run), index=index, metadata={"index": index, "group": 1})
        ]
        assert len(samples) == 4
        assert miles.log_rollout(0, run.args, samples, None, 1.5) is False
        assert slime.log_rollout(1, run.args, samples[:2], {}, 1.5) is False
    assert wandb.run is own
    own.log({"of miles": 1.0})
    own.finish()

    steps = read(folder)
    ledgers = [samples[place].metadata["harness"]["ledger"] for place in (0, 2)]
    trained = sum(ledger["trained"] for ledger in ledgers)
    assert steps[1] == pytest.approx(
        steps[1]
        | {
            "train/samples_total": 4.0,
            "stage2/raw_rollouts": 2.0,
            "rollout/finished": 2.0,
            "rollout/reward_mean": 0.5,
            "ledger/trained": trained,
        }
    )
    assert steps[2]["rollout/reward_mean"] == 1.0
    [file] = (folder / "wandb").glob("offline-run-*/*.wandb")
    lines: list[dict[str, float]] = []
    async with asyncio.timeout(60):  # W&B's own process writes the file, also behind the end of its run
        while not lines:
            lines = [line for line in wandb_values(file.read_bytes()) if "train/samples_total" in line]
            await asyncio.sleep(0.05)
    assert lines[0] == pytest.approx(lines[0] | {"ledger/trained": trained, "rollout/reward_mean": 0.5})


async def test_a_batch_of_verl_is_in_the_stores(folder: Path) -> None:
    """With the figures that its agent gave."""
    import torch

    async with miles_run(*STEPS) as run:
        made: Any = await output(run, two_turns)
    stamps = np.array([made.extra_fields["harness"]], dtype=object)
    scores = torch.tensor([[0.0, made.reward_score]])
    verl.report_batch(5, SimpleNamespace(batch={"rm_scores": scores}, non_tensor_batch={"harness": stamps}))
    verl.report_batch(6, SimpleNamespace(batch={}, non_tensor_batch={"harness": stamps}))

    steps = read(folder)
    assert (steps[5]["rollout/reward_mean"], steps[5]["score/tests"]) == (0.5, 3.0)
    assert "rollout/reward_mean" not in steps[6]


def test_every_key_is_on_the_page_of_training() -> None:
    """Also those of a rollout that has no ledger, and of tokens that are dropped."""
    ledger: Json = {"generated": 9, "trained": 4, "masked": 2, "dropped": {"stray": 3}}
    whole = {"outcome": "finished", "weight": 1.0, "ledger": ledger, "score": {"figures": {"tests": 1}}}
    figures = step_figures([ReportedSample(1.0, whole), ReportedSample(None, {"outcome_detail": "no server"})])
    listed = (ROOT / "docs/training.md").read_text("utf-8").partition("### Figures of a step")[2].partition("\n### ")[0]
    named = re.findall("`([^`]+)`", "\n".join(re.findall(r"^- (`[^:]+`): ", listed, re.MULTILINE)))
    patterns = [re.sub("[A-Z]+", "[a-z0-9_]+", each) for each in named]
    assert [key for key in figures if not any(re.fullmatch(each, key) for each in patterns)] == []
    assert (figures["rollout/finished"], figures["rollout/not_started"], figures["dropped/stray"]) == (1, 1, 3)
    json.dumps(figures)


@pytest.mark.parametrize(("variable", "value"), [("HARNESS_REPORT", "mlflow"), ("HARNESS_REPORT_DIR", "")])
def test_a_wrong_variable_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    """In the first step, before any figure is lost."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(AdapterError, match=f"^{variable}: expected"):
        miles.log_rollout(0, SimpleNamespace(), [], None, 0.0)
    assert not folder.exists()
