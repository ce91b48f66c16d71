"""What reaches a trainer, in its own types, of random agents: every token of the policy once, no other one (I13).

`HARNESS_MILES_SRC` has the samples of miles flattened, scored and scheduled by miles itself.
"""

import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import pytest

from harness.adapters import areal, verl
from harness.adapters.areal.workflow import register_workflow
from harness.adapters.miles import convert
from harness.adapters.verl.output import TOO_LONG
from harness.samples.delivery import TRAINED_ROLES
from harness.types import Json, as_ids
from tests.session_servers.served import Served
from tests.system.roles.random_agents import Call, plan, play, roles_of, steps_of
from tests.thoroughness import examples
from tests.unit.adapters.miles_runs import MilesRun, miles_run
from tests.unit.adapters.test_miles_generate import generate_all, state_of
from tests.unit.adapters.verl_runs import verl_config

pytestmark = pytest.mark.usefixtures("trainers")

SEEDS = range(int(os.environ.get("HARNESS_SOAK_AGENTS", max(4, examples(8)))))
ROOM = {"prompt_length": 30_000, "response_length": 30_000}
ROOMS = [ROOM, {"prompt_length": 300, "response_length": 30_000}, {"prompt_length": 30_000, "response_length": 200}]


ENGINE: ContextVar[Any] = ContextVar("ENGINE")
"""Of the run: an agent waits for its tokens before it drains its session."""


class Delivered(NamedTuple):
    """A sample of a trainer's, as far as the adapters differ."""

    ids: Sequence[int]
    """Of the response, or of the whole sequence."""
    mask: Sequence[int]


async def play_seed(base_url: str, metadata: Json, api_key: str, **_given: Any) -> Json:
    """The agent of a seed of `random_agents`, by the contract of agent functions."""
    address = httpx.URL(base_url)
    session_id = address.path.split("/")[2]
    async with httpx.AsyncClient(base_url=f"{address.scheme}://{address.netloc.decode()}", timeout=60) as http:
        client: Any = SimpleNamespace(http=http, engine=ENGINE.get())
        seed = metadata["seed"]
        await play(client, Served(session_id, base_url, api_key), seed, plan(seed))
    return {"reward": 1.0}


async def play_for_miles(base_url: str, prompt: Any, request_kwargs: Json, metadata: Json) -> Json:
    """The same by the contract of miles."""
    return await play_seed(base_url, metadata, metadata["session_api_key"])


@asynccontextmanager
async def run_of(calls: Sequence[Call], **changes: Any) -> AsyncIterator[MilesRun]:
    """A server whose engine answers `calls`."""
    changes = {"custom_agent_function_path": f"{__name__}.play_for_miles", **changes}
    async with miles_run(*steps_of(calls), rollout_max_response_len=2000, **changes) as run:
        ENGINE.set(run.engine)
        yield run


def is_cut(calls: Sequence[Call]) -> bool:
    """Its last call is drained."""
    return calls[-1].drained_after is not None


def check(run: MilesRun, calls: Sequence[Call], samples: Sequence[Delivered], ledger: Json, lost: str = "") -> None:
    """Each answer of the policy is trained once, whole; without `lost` none is missing. The ledger says the same."""
    decode = run.args.tokenizer.decode
    said: Counter[str] = Counter()
    for sample in samples:
        runs: list[list[int]] = [[]]
        for each, is_trained in zip(sample.ids, sample.mask, strict=True):
            if is_trained:
                runs[-1].append(each)
            elif runs[-1]:
                runs.append([])
        said.update(decode(as_ids(trained)) for trained in runs if trained)
    roles = zip(calls, roles_of(calls), strict=True)
    policy = {said_by(run, call) for call, role in roles if role in TRAINED_ROLES} - {""}
    assert set(said.values()) <= {1}
    if lost:
        assert all(any(whole.startswith(text) for whole in policy) for text in said)
    else:
        assert said.keys() == policy
    assert ledger["generated"] == ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
    assert ledger["trained"] == sum(sum(sample.mask) for sample in samples)
    is_missing = sum(map(len, said)) < sum(map(len, policy))
    assert (ledger["dropped"].get(lost, 0) > 0) == (bool(lost) and is_missing)


def said_by(run: MilesRun, call: Call) -> str:
    """What the engine said in answer to `call`, as far as the drain let it."""
    ids = run.args.tokenizer.encode(call.text)
    return (
        f"{call.text}<|im_end|>" if call.drained_after is None else run.args.tokenizer.decode(ids[: call.drained_after])
    )


@pytest.mark.parametrize("seed", SEEDS)
async def test_samples_of_miles(seed: int) -> None:
    """Of all branches, flattened and weighed by miles: the weight of a rollout is 1, and so is its part of a group."""
    from miles.ray.rollout.rollout_data_conversion import postprocess_rollout_data

    calls = plan(seed)
    async with run_of(calls, rewards_normalization=True, disable_rollout_trim_samples=True) as run:
        samples = await generate_all(state_of(run), metadata={"seed": seed})
        columns = [Delivered(each.tokens[-each.response_length :], each.loss_mask) for each in samples]
        check(run, calls, columns, samples[0].metadata["harness"]["ledger"])
        if is_cut(calls):
            assert {each.status.value for each in samples} == {"aborted"}
            return
        other = deepcopy(samples[:1])
        for sample in other:
            sample.index, sample.reward = 8, 0.0
            sample.rollout_id = sample.rollout_id and 8
        flat, _ = postprocess_rollout_data(run.args, [[samples, other]], {"dp_size": 1})
        made = convert(run.args, flat)

    assert sum(each.metadata["harness"]["weight"] for each in samples) == pytest.approx(1.0)
    rewards, weights = Counter[int](), Counter[int]()
    for rollout, mask, size, reward in zip(
        *(made[name] for name in ("rollout_ids", "loss_masks", "rollout_mask_sums", "rewards")), strict=True
    ):
        weights[rollout] += sum(mask) / size
        rewards[rollout] += reward * sum(mask) / size
    assert dict(weights) == pytest.approx({7: 1.0, 8: 1.0})
    assert rewards[7] == pytest.approx(-rewards[8])  # however many samples each has
    assert rewards[7] > 0


@pytest.mark.parametrize("seed", SEEDS[::2])
async def test_samples_of_slime(seed: int) -> None:
    from slime.rollout.sglang_rollout import generate_and_rm
    from slime.utils.types import Sample

    calls = plan(seed)
    async with run_of(calls) as run:
        run.args.custom_generate_function_path = "harness.adapters.slime.generate"
        given = Sample(index=7, group_index=1, prompt="Do it.", metadata={"seed": seed})
        samples = await generate_and_rm(run.args, given, {"max_new_tokens": 2000})
        columns = [Delivered(each.tokens[-each.response_length :], each.loss_mask) for each in samples]
        check(run, calls, columns, samples[0].metadata["harness"]["ledger"])

    assert len({each.rollout_id for each in samples}) == 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("room", ROOMS, ids=["whole", "short_prompt", "short_response"])
async def test_outputs_of_verls_queue(seed: int, room: Json) -> None:
    """A list where there are several; what verl has no room for is not counted as trained."""
    calls = plan(seed)
    made = await output_of(calls, seed, room, session_id=0)
    outputs = made.outputs if isinstance(made.outputs, list) else [made.outputs]
    stamps = [each.extra_fields["harness"] for each in outputs]
    assert sum(each["weight"] for each in stamps) == pytest.approx(1.0)
    if is_cut(calls):
        assert not any(any(each.response_mask) for each in outputs)
        assert stamps[0]["ledger"]["trained"] == 0
        return
    columns = [Delivered(each.response_ids, each.response_mask) for each in outputs]
    check(made.run, calls, columns, stamps[0]["ledger"], lost="" if room is ROOM else TOO_LONG)
    assert any(outputs[-1].response_mask) or not any(any(each.response_mask) for each in outputs)
    assert {each.reward_score for each in outputs} == {1.0}


@pytest.mark.parametrize("seed", SEEDS[::4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"session_id": 0, "adv_estimator": "rloo"},
        {"session_id": 0, "loss_agg_mode": "seq-mean-token-mean"},
        {"session_id": 0, "distillation": True},
    ],
    ids=str,
)
async def test_the_one_output_of_verl(seed: int, changes: Json) -> None:
    """Without the queue, and where verl would count a rollout with several outputs several times."""
    calls = plan(seed)
    made = await output_of(calls, seed, ROOM, **changes)
    sample = Delivered(made.outputs.response_ids, made.outputs.response_mask)
    ledger = made.outputs.extra_fields["harness"]["ledger"]
    if is_cut(calls):
        assert (ledger["trained"], sum(sample.mask)) == (0, 0)
    else:
        check(made.run, calls, [sample], ledger, lost="other_sample")


class Outputs(NamedTuple):
    """What verl got, and the run that it got it from."""

    run: MilesRun
    outputs: Any


async def output_of(calls: Sequence[Call], seed: int, room: Json, **changes: Any) -> Outputs:
    """Of one row; a `session_id` is what verl's queue adds."""
    from verl.experimental.agent_loop.agent_loop import run_agent_loop

    config = verl_config(**room)
    config.algorithm.adv_estimator = changes.get("adv_estimator", "grpo")
    config.actor_rollout_ref.actor = SimpleNamespace(loss_agg_mode=changes.get("loss_agg_mode", "token-mean"))
    config.distillation = SimpleNamespace(enabled=changes.get("distillation", False))
    fields = {"session_id": changes["session_id"]} if "session_id" in changes else {}
    async with run_of(calls) as run:
        loop = {
            "name": "session_agent",
            "_target_": "harness.adapters.verl.SessionAgentLoop",
            "session_server": run.server.url,
            "agent": play_seed,
        }
        prompt = [{"role": "user", "content": "Do it."}]
        try:
            made = await run_agent_loop(
                loop, config, SimpleNamespace(eos_token_id=2), {}, raw_prompt=prompt, seed=seed, **fields
            )
        finally:
            await verl.close()
    return Outputs(run, made)


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize("seed", SEEDS[::2])
async def test_a_trajectory_of_areal(seed: int) -> None:
    """One sample: AReaL takes fixed numbers of rows for groups. It is the one with the most tokens to train."""
    from areal.infra.engines import CountingEngine
    from areal.infra.episodes import run_episode

    calls = plan(seed)
    rollouts: list[Any] = []

    class Watched(register_workflow()):  # type: ignore[misc]  # a class that AReaL has to know
        """Keeps the rollout."""

        async def score(self, rollout: Any, data: Any) -> float:
            rollouts.append(rollout)
            return 1.0

    async with run_of(calls) as run:
        row = {"messages": [{"role": "user", "content": "Do it."}], "seed": seed}
        made = await run_episode(Watched(run.server.url, play_seed), CountingEngine(), row)
        await areal.close()

    if is_cut(calls):
        assert made is None
        return
    sample = Delivered(made["input_ids"][0].tolist(), made["loss_mask"][0].tolist())
    check(run, calls, [sample], rollouts[0].session["ledger"], lost="other_sample")
