"""What AReaL awaits for each episode: a rollout on a session server, and a trajectory out of it."""

import inspect
from collections.abc import Mapping
from typing import Any

from harness.adapters.agents import stated_reward
from harness.adapters.areal.trajectory import sglang_params, trajectory_columns
from harness.adapters.episodes import EpisodeSettings, episodes_of
from harness.errors import AdapterError
from harness.machine.log import get_logger
from harness.rollouts.agents.task import AgentFunction
from harness.samples.rollout import ENDED_WELL, Rollout

VERSION = "1.0.4"
"""Of areal: the interface that everything here is written for."""

EPISODE_REJECTED = "areal_episode_rejected"

_PARAMETERS = ["self", "engine", "data"]
"""Of `RolloutWorkflow.arun_episode`."""

_log = get_logger(__name__)


class SessionWorkflow:
    """A workflow of AReaL's.

    Args:
        session_server: URL of the session server; its admin token, where it has one, is in `HARNESS_ADMIN_TOKEN`.
        agent: An async function `run(base_url, prompt, request_kwargs, metadata, **kwargs)`, its dotted path, the name
            of a program that ships, or the path of a script.
        gconfig: AReaL's `GenerationHyperparameters`; None leaves sampling to the agent.
        options: `agent_env`, `deadline_s`, `matching`, `workdir`, `trust_agent_result`, as in `EpisodeSettings.read`.

    Raises `AdapterError` for an agent that is not there, for generation settings that cannot be kept, and for a program
    whose result is not trusted where `score` is not overridden.
    """

    def __init__(self, session_server: str, agent: AgentFunction | str, gconfig: Any = None, **options: Any) -> None:
        self._settings = EpisodeSettings.read(session_server, agent, **options)
        if type(self).score is SessionWorkflow.score:
            self._settings.require_trusted("override `score`")
        self._sampling_params = {} if gconfig is None else sglang_params(gconfig)
        self._most_tokens: int | None = None if gconfig is None else gconfig.max_tokens

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """One trajectory, tensors of shape [1, tokens]; None, which rejects it, for a rollout that was cut short.

        Raises `AdapterError` for data without `messages` and what `score` raises, and what keeps every rollout from
        running (`SessionServerError`, `AgentError`); AReaL logs it and rejects the episode.
        """
        import torch
        from areal import workflow_context
        from areal.infra.utils.concurrent import register_loop_cleanup
        from areal.utils import stats_tracker

        if "messages" not in data:
            raise AdapterError(f"data: expected `messages`, got {', '.join(sorted(data)) or 'nothing'}")
        version = engine.get_version()
        episodes = episodes_of(self._settings, register_loop_cleanup)
        rollout = await episodes.run(data["messages"], data, self._sampling_params, self._most_tokens)
        is_whole = rollout.outcome.kind in ENDED_WELL and rollout.samples
        reward = await self.score(rollout, data) if is_whole else None
        if reward is None:
            _log.warning(EPISODE_REJECTED, outcome=str(rollout.outcome.kind), detail=rollout.outcome.detail)
            return None
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward)
        columns = trajectory_columns(rollout.samples[0], reward, version)
        return {name: torch.from_numpy(column).unsqueeze(0) for name, column in columns.items()}

    async def score(self, rollout: Rollout, data: Mapping[str, Any]) -> float | None:  # noqa: ARG002  # for overriders
        """The reward, which the agent states; None rejects. A workflow whose agents state none overrides this.

        Raises `AdapterError` where an agent that ended by itself has stated none.
        """
        return stated_reward(rollout)


def register_workflow() -> type[SessionWorkflow]:
    """`SessionWorkflow`, after AReaL was told that it is a workflow. Raises `AdapterError` for another interface."""
    import areal
    from areal.api import RolloutWorkflow

    parameters = list(inspect.signature(RolloutWorkflow.arun_episode).parameters)
    if parameters != _PARAMETERS:
        raise AdapterError(
            f"areal {areal.__version__}: RolloutWorkflow.arun_episode takes {', '.join(parameters)}; expected"
            f" {', '.join(_PARAMETERS)}, the interface of areal {VERSION}"
        )
    RolloutWorkflow.register(SessionWorkflow)
    return SessionWorkflow
