"""AReaL's workflow over a session server, with its trajectory columns and generation settings."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.adapters.agents import stated_reward
from harness.adapters.episodes import EpisodeSettings, episodes_of
from harness.adapters.sampling import require_no_masks, require_no_teachers, require_unfiltered
from harness.adapters.step_reports import ReportedSample, step_figures
from harness.errors import AdapterError
from harness.machine.log import get_logger
from harness.rollouts.agents.task import AgentFunction
from harness.samples.columns import TRAINER_COLUMNS
from harness.samples.rollout import ENDED_WELL, Rollout
from harness.samples.versions import NOT_SAMPLED, count_versions
from harness.types import Json, Sample

Columns = Mapping[str, npt.NDArray[Any]]

_EXTRA = tuple(column for column in TRAINER_COLUMNS if column.name != "behavior_versions")  # those are `versions` there

_ALL_TOKENS = 10**8
"""AReaL's `top_k` that keeps every token."""


def trajectory_columns(sample: Sample, reward: float, version: int) -> Columns:
    """Return columns of shape [tokens]; [] for reward and guard signal. AReaL's `version` replaces odd labels."""
    require_no_masks(sample, "AReaL")
    require_no_teachers(sample, "AReaL")
    prompt = len(sample.tokens) - sample.response_length

    def whole(column: npt.NDArray[Any], value: float, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.concatenate([np.full(prompt, value, dtype), column.astype(dtype)])

    # Each column has a value at its own token: AReaL shifts them. A token that no policy sampled has mask 0, logprob 0
    # and version -1.
    versions = count_versions(sample, version)
    return {
        "input_ids": np.array(sample.tokens, dtype=np.int32),
        "attention_mask": np.ones(len(sample.tokens), dtype=np.bool_),
        "loss_mask": whole(sample.loss_mask, 0, np.int32),
        "logprobs": whole(sample.rollout_log_probs, 0, np.float32),
        "versions": whole(versions.behavior, NOT_SAMPLED, np.int32),
        **{each.name: whole(getattr(sample, each.name), each.fill, np.dtype(each.dtype)) for each in _EXTRA},
        "proximal_versions": whole(versions.proximal, NOT_SAMPLED, np.int32),
        "rewards": np.array(reward, dtype=np.float32),
        "repeat_terminated": np.array(sample.repeat_terminated, dtype=np.int32),
    }


def sglang_params(gconfig: Any) -> Json:
    """Convert `GenerationHyperparameters` to SGLang's names. Raises `AdapterError` for unsupported parameters."""
    # `n_samples` is ignored: AReaL calls once for each.
    for name, kept in [("frequency_penalty", 0.0), ("use_beam_search", False), ("ignore_eos", False)]:
        if getattr(gconfig, name) != kept:
            raise AdapterError(f"gconfig.{name}={getattr(gconfig, name)!r} is not supported; expected {kept!r}")
    params: Json = {
        "max_new_tokens": gconfig.max_new_tokens,
        "min_new_tokens": gconfig.min_new_tokens,
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": -1 if gconfig.top_k >= _ALL_TOKENS else gconfig.top_k,
        "stop": gconfig.stop or None,
        "stop_token_ids": gconfig.stop_token_ids or None,
    }
    require_unfiltered(params, "gconfig.")
    return params


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
