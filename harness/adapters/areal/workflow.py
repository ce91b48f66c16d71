"""AReaL's workflow over a session server."""

import inspect
from collections.abc import Mapping
from typing import Any

from harness.adapters.agents import stated_reward
from harness.adapters.areal.trajectory import sglang_params, trajectory_columns
from harness.adapters.episodes import EpisodeSettings, episodes_of
from harness.adapters.step_reports import ReportedSample, step_figures
from harness.errors import AdapterError
from harness.machine.log import get_logger
from harness.rollouts.agents.task import AgentFunction
from harness.samples.rollout import ENDED_WELL, Rollout

VERSION = "1.0.4"
"""Version of areal whose interface this module uses."""

EPISODE_REJECTED = "areal_episode_rejected"

_PARAMETERS = ["self", "engine", "data"]

_log = get_logger(__name__)


class SessionWorkflow:
    """A workflow for AReaL.

    Args:
        session_server: URL of the session server; `HARNESS_ADMIN_TOKEN` holds its token.
        agent: An async function `run(base_url, prompt, request_kwargs, metadata, **kwargs)`, its dotted path, a
            bundled program's name, or a script's path.
        gconfig: AReaL's `GenerationHyperparameters`; None lets the agent choose.
        options: See `EpisodeSettings.read`.

    Raises `AdapterError` for a missing agent, unsupported settings, and an untrusted program unless `score` is
    overridden.
    """

    def __init__(self, session_server: str, agent: AgentFunction | str, gconfig: Any = None, **options: Any) -> None:
        self._settings = EpisodeSettings.read(session_server, agent, **options)
        if type(self).score is SessionWorkflow.score:
            self._settings.require_trusted("override `score`")
        self._sampling_params = {} if gconfig is None else sglang_params(gconfig)
        self._most_tokens: int | None = None if gconfig is None else gconfig.max_tokens

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run an episode. Return tensors of shape [1, tokens], or None, a rejection, if it was cut short.

        AReaL also rejects if this raises `AdapterError`, `SessionServerError` or `AgentError`.
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
        stamps = {"ledger": rollout.session["ledger"], "score": rollout.samples[0].metadata.get("score", {})}
        figures = step_figures([ReportedSample(None, stamps)])
        means = {key: value for key, value in figures.items() if key.startswith(("score/", "ledger/"))}
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward, **means)
        columns = trajectory_columns(rollout.samples[0], reward, version)
        return {name: torch.from_numpy(column).unsqueeze(0) for name, column in columns.items()}

    async def score(self, rollout: Rollout, data: Mapping[str, Any]) -> float | None:  # for overriders
        """Return the stated reward, None to reject. Override for agents that state none."""
        return stated_reward(rollout)


def register_workflow() -> type[SessionWorkflow]:
    """Register `SessionWorkflow` with AReaL. Raises `AdapterError` for another interface."""
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
