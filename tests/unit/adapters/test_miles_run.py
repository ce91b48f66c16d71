"""A step of miles from its loop to its columns: weights change under it, and an abort ends it."""

import asyncio
from typing import Any

import pytest

from harness.adapters.miles import convert
from harness.engines.scripted import ScriptStep
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.gate import GateClient
from harness.rollouts.client.session_server import SessionServerClient
from harness.sessions.gate import GateState
from tests.session_servers.served import eventually
from tests.unit.adapters import miles_agents
from tests.unit.adapters.miles_agents import ENDLESS, LATE, Play
from tests.unit.adapters.miles_runs import MilesRun, miles_run

STORY = ScriptStep(text="and then " * 400, token_delay_s=0.1)  # six minutes: nobody hears its end
SHORT = (ScriptStep(text="One moment."), ScriptStep(text="Done."))


class DataSource:
    """Groups of samples of one prompt each, as miles' own."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.groups = 0

    def get_samples(self, count: int) -> list[list[Any]]:
        """The next `count` groups."""
        from miles.utils.types import Sample

        first, self.groups = self.groups, self.groups + count
        return [
            [
                Sample(
                    group_index=group,
                    index=group * self.group_size + member,
                    prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Task {group}."}],
                    label="42",
                    metadata={"group": group, "index": group * self.group_size + member},
                )
                for member in range(self.group_size)
            ]
            for group in range(first, first + count)
        ]


async def bring_weights(run: MilesRun, play: Play, agents: int) -> None:
    """Two updates: one when all agents wait or talk, one when those that waited for it have ended."""
    await eventually(lambda: play.first == agents)
    await eventually(lambda: any(live.sampled for live in run.engine.live))
    await run.update(1)
    play.updates[1].set()
    await eventually(lambda: play.early == LATE * 4)
    await eventually(lambda: any(live.sampled for live in run.engine.live))
    await run.update(2)
    play.updates[2].set()


def flatten(member: Any) -> list[Any]:
    """The samples of a member of a group: those that miles has ended before they began are no lists."""
    return member if isinstance(member, list) else [member]


@pytest.mark.usefixtures("trainers")
@pytest.mark.parametrize("admin_token", ["sekret"], indirect=True)
async def test_a_step_of_miles(monkeypatch: pytest.MonkeyPatch, admin_token: str) -> None:
    """8 groups of 4 out of 16, one of them filtered out, seven of them endless; then the abort."""
    from miles.rollout.inference_rollout.inference_rollout_common import GenerateState
    from miles.rollout.inference_rollout.inference_rollout_train import generate_rollout_async
    from miles.utils.types import Sample

    play = Play()
    monkeypatch.setattr(miles_agents, "play", play)
    async with miles_run(*SHORT, STORY, rollout_max_response_len=10_000, admin_token=admin_token) as run:
        state, source = GenerateState(run.args), DataSource(4)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bring_weights(run, play, 64))
            step = tasks.create_task(generate_rollout_async(state, 0, source.get_samples))
        groups, aborted = step.result()
        async with SessionServerClient(SessionServerAddress(run.server.url, admin_token)) as client:
            gate = await GateClient.report(client.gate(), deadline_s=10)
        assert (len(run.server.server.sessions), run.engine.live) == (0, ())

    from miles.ray.rollout.rollout_data_conversion import postprocess_rollout_data

    samples, _ = postprocess_rollout_data(run.args, groups, {"dp_size": 1})
    cut = [sample for group in aborted for member in group for sample in flatten(member)]
    assert [len(group) for group in groups] == [4] * 8
    assert {sample.group_index for sample in samples} == {*range(1, ENDLESS)}
    assert (gate.state, gate.holds, state.aborted) == (GateState.OPEN, (), False)
    for sample in samples + cut:
        sample.validate()
        ledger = sample.metadata["harness"]["ledger"]
        assert ledger["generated"] == ledger["trained"] + ledger["masked"] + sum(ledger["dropped"].values())
    assert {sample.status for sample in samples} == {Sample.Status.COMPLETED}
    assert {sample.status for sample in cut} == {Sample.Status.ABORTED}
    for index, statuses in play.statuses.items():
        answered = statuses.count(200)
        assert statuses == [200] * answered + [404] * (len(statuses) - answered), f"{index} was served after the abort"
    assert any(sample.metadata["harness"]["weight_updates"]["abort"] == 2 for sample in cut if sample.response_length)

    columns = convert(run.args, samples)
    early = [i for i, sample in enumerate(samples) if sample.group_index < LATE]
    for i, sample in enumerate(samples):
        assert len(columns["proximal_log_probs"][i]) == len(columns["loss_masks"][i]) == sample.response_length
    for i in early:
        pairs = set(zip(columns["behavior_versions"][i], columns["proximal_versions"][i], strict=True))
        assert pairs == {(-1, -1), (0, 1), (1, 1)}
        assert columns["proximal_log_probs"][i] != columns["rollout_log_probs"][i]
