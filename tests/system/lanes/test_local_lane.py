"""The local engine as a lane: a server of this environment, found by every client that speaks to SGLang."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from harness.engines.base import PauseMode
from harness.engines.examine.doctor import diagnose
from harness.engines.remote.sglang import SGLangTokenProvider
from harness.errors import LaneError
from harness.lab.lanes import LaneEngine, LaneSpec, down, find_lanes, open_lane, start_lane
from harness.machine.findings import Level
from harness.machine.process_group import members
from harness.rollouts.control.weight_workers import reach
from harness.tokens.tokenizer import Tokenizer
from harness.types import FinishReason, GenerationRequest, SamplingParams, VersionSpan, as_ids
from server_patch.repeat_terminate import RepeatTerminateConfig
from tests.harness_command import harness
from tests.processes.family import is_running
from tests.toy_model import write_toy_model, write_toy_weights

PROMPT = as_ids(range(3, 40))
GREEDY = SamplingParams(8, temperature=0.0, ignore_eos=True)
ANY_ID = "a" * 32
GUARD = RepeatTerminateConfig(enabled=True, max_consecutive_token_repeats=8, min_new_tokens=8)


@pytest.fixture(name="weights", scope="module")
def _weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_weights(tmp_path_factory.mktemp("models") / "tiny-random", seed=0)


@pytest.fixture(name="spec")
def _spec(cache: Path, weights: Path) -> LaneSpec:
    return LaneSpec(LaneEngine.LOCAL, weights)


async def test_a_lane_is_all_that_sessions_need(spec: LaneSpec, tmp_path: Path) -> None:
    """Generated from, aborted and paused through the provider of SGLang, updated by its address; then gone.

    What follows an update is sampled by the new weights and says so.
    """
    other = await asyncio.to_thread(write_toy_weights, tmp_path / "other", 1)
    async with (
        open_lane(spec) as lane,
        SGLangTokenProvider(lane.url, vocab_size=259) as provider,
        AsyncExitStack() as stack,
    ):
        assert (lane.engine, lane.provider) == ("local", f"sglang={lane.url}")
        assert (provider.capabilities.engine, provider.capabilities.model) == ("local", "tiny-random")
        first = await provider.generate(GenerationRequest(PROMPT, GREEDY, request_id=uuid4().hex))
        assert (first.output_ids.size, first.finish_reason) == (8, FinishReason.LENGTH)

        cut = asyncio.ensure_future(
            provider.generate(GenerationRequest(PROMPT, replace(GREEDY, max_new_tokens=2000), request_id=ANY_ID))
        )
        async with asyncio.timeout(60):
            while not (await provider.health()).running:
                await asyncio.sleep(0.01)
        assert await provider.abort(ANY_ID) == 1
        assert (await cut).finish_reason is FinishReason.ABORT

        await provider.pause(PauseMode.KEEP)
        held = asyncio.ensure_future(provider.generate(GenerationRequest(PROMPT, GREEDY, request_id=uuid4().hex)))
        await provider.resume()
        assert (await held).output_ids.tolist() == first.output_ids.tolist()

        [worker] = (await reach([lane.provider], stack, 60.0)).reached.values()
        await worker.update_weights(other, "7")
        after = await worker.generate(GenerationRequest(PROMPT, GREEDY, request_id=uuid4().hex))
        assert after.version_spans == (VersionSpan("7", 0, 8),)
        assert after.logprobs.tolist() != first.logprobs.tolist()
    assert (members(lane.group), find_lanes()) == ([], [])
    assert "serving tiny-random at" in lane.log.read_text()


def test_up_doctor_down(cache: Path, weights: Path) -> None:
    """As a user types it: the doctor names the engine, and what to call it; `down` ends it."""
    up = harness("engine", "up", "local", "--model", str(weights))
    try:
        [lane] = find_lanes()
        assert (up.code, up.stdout.strip()) == (0, lane.url), up.stderr
        assert f"--engine sglang={lane.url}" in up.stderr
        examined = harness("engine", "doctor", lane.url, "--model", str(weights))
        title, *findings = examined.stdout.splitlines()
        assert (examined.code, examined.stderr) == (0, "10 ok, 0 unknown, 1 warn, 0 fail\n")
        assert (title.startswith("local "), title.endswith(f"use it as sglang={lane.url}")) == (True, True)
        assert [line[9:21] for line in findings if not line.startswith("ok ")] == ["repeat guard"]
        assert lane.name in harness("engine", "list").stdout
    finally:
        ended = harness("engine", "down", "local")
    assert (ended.stdout, is_running(lane.pid)) == (f"ended {lane.name}\n", False)


async def test_a_server_that_is_killed_leaves_its_address_free(spec: LaneSpec, weights: Path) -> None:
    """With its one process the lane is gone and forgotten, and the next one can have its port at once.

    That one has a guard by the variables of its environment: the doctor finds it, with the limits that were set.
    """
    lane = await start_lane(spec)
    os.kill(lane.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while members(lane.group):
            await asyncio.sleep(0.02)
    assert (find_lanes(), down(lane)) == ([], False)

    port = int(lane.url.rpartition(":")[2])
    async with open_lane(replace(spec, port=port, env=GUARD.to_environ())) as again, httpx.AsyncClient() as http:
        assert (again.url, (await http.get(f"{again.url}/health")).status_code) == (lane.url, 200)
        findings = (await diagnose(again.url, tokenizer=Tokenizer.load(weights))).findings

    assert [finding.check for finding in findings if finding.level is not Level.OK] == []
    [guard] = [finding for finding in findings if finding.check == "repeat guard"]
    assert GUARD.digest()[:12] in guard.found


async def test_weights_that_cannot_be_served_are_said(spec: LaneSpec, tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path / "no-weights")
    with pytest.raises(LaneError, match=r"local-\d+ ended while it started") as caught:
        await start_lane(replace(spec, model_dir=folder))

    assert "error: " in caught.value.message
    assert find_lanes() == []


async def test_an_argument_that_the_server_does_not_know_is_said(spec: LaneSpec) -> None:
    with pytest.raises(LaneError, match="correct or remove it"):
        await start_lane(replace(spec, arguments=("--tensor-parallel-size", "2")))


def test_without_torch_the_extra_is_named(cache: Path, weights: Path) -> None:
    program = (
        "import sys; from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *rest: None if name.partition('.')[0] == 'torch' else find(name, *rest)\n"
        f"sys.argv = ['harness', 'engine', 'up', 'local', '--model', {str(weights)!r}]\n"
        "from harness.cli.main import main; main()"
    )
    refused = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)

    assert refused.returncode == 6
    assert "the local engine needs torch" in refused.stderr
    assert "pip install 'session-harness[local]'" in refused.stderr
    assert find_lanes() == []
