"""verl's agent loop over a session server. verl creates one per sample, so it keeps no state."""

from collections.abc import Mapping
from typing import Any

from harness.adapters.agents import stated_reward
from harness.adapters.episodes import EpisodeSettings, episodes_of
from harness.adapters.sampling import FILTERS, require_unfiltered
from harness.adapters.verl.output import FIELDS, Room, fit, output_fields
from harness.errors import AdapterError
from harness.machine.log import get_logger
from harness.rollouts.agents.task import AgentFunction
from harness.samples.delivery import Selection
from harness.samples.rollout import ENDED_WELL, Rollout
from harness.sessions.session_config import Recorded

VERSION = "0.9.1"
"""Version of verl whose interface this module uses."""

VERL_REWARD_MISSING = "verl_reward_missing"

_log = get_logger(__name__)

_NOT_OURS = frozenset({"logprobs", "repetition_penalty"})
"""Parameters of verl unknown to sessions."""


class SessionAgentLoop:
    """An agent loop for verl, the `_target_` in the `agent_loop_config_path` file.

    Args:
        trainer_config: verl's configuration, with the rollout's lengths.
        tokenizer: Source of the filler id.
        session_server: URL of the session server; `HARNESS_ADMIN_TOKEN` holds its token.
        agent: Dotted path of an async function `run(base_url, prompt, request_kwargs, metadata, **kwargs)`, a
            bundled program's name, or a script's path.
        is_scored_by_agent: False if verl scores.
        options: See `EpisodeSettings.read`.

    Raises `AdapterError` for a missing agent and unsupported settings.
    """

    def __init__(
        self,
        *,
        trainer_config: Any,
        server_manager: Any = None,  # verl hands it to every loop, and sessions need none of these
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        hf_model_type: str | None = None,
        tools: Any = None,
        name: str | None = None,  # of the item, which hydra hands over whole
        session_server: str,
        agent: AgentFunction | str,
        is_scored_by_agent: bool = True,
        **options: Any,
    ) -> None:
        rollout = trainer_config.config.actor_rollout_ref.rollout
        if _needs_logprobs(trainer_config.config):
            require_unfiltered({name: getattr(rollout, name, None) for name in FILTERS}, "rollout.")
        self._room = Room(rollout.prompt_length, rollout.response_length)
        self._takes_lists = _takes_lists(trainer_config.config)
        self._tokenizer = tokenizer
        self._is_scored_by_agent = is_scored_by_agent
        record = (Recorded.ROUTED_EXPERTS,) if getattr(rollout, "enable_rollout_routing_replay", False) else ()
        self._settings = EpisodeSettings.read(session_server, agent, record=record, **options)
        if is_scored_by_agent:
            self._settings.require_trusted("set is_scored_by_agent=False")

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> Any:
        """Return an `AgentLoopOutput`, masked if the rollout was cut short or its program stated no reward.

        verl's queue, known by `session_id` in its rows, gets a list of several. Raises `AdapterError` for unsupported
        settings or a function without a reward, `SessionServerError` and `AgentError`.
        """
        from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

        _require_fields(AgentLoopOutput)
        sampling = {name: value for name, value in sampling_params.items() if name not in _NOT_OURS}
        if sampling_params.get("repetition_penalty", 1.0) != 1.0:
            raise AdapterError("sampling parameter 'repetition_penalty' is not supported; expected 1.0")
        row = fields | dict(fields.get("extra_info") or {})
        selection = None if self._takes_lists and "session_id" in fields else Selection.ONE
        episodes = episodes_of(self._settings)
        rollout = await episodes.run(
            [dict(message) for message in fields["raw_prompt"]], row, sampling, sum(self._room), selection
        )
        reward = self._read_reward(rollout) if self._is_scored_by_agent else None
        is_scored = reward is not None or not self._is_scored_by_agent
        rollout = fit(rollout, self._room, is_trained=is_scored and rollout.outcome.kind in ENDED_WELL)
        if self._is_scored_by_agent and reward is None:
            reward = 0.0  # else verl would score this one, and a batch must have one source of rewards
        router = episodes.sessions.router if self._settings.record else None
        about = (self._room, self._tokenizer.eos_token_id, fields.get("global_steps"))
        made = [output_fields(rollout, sample, *about, router=router) for sample in rollout.samples or (None,)]
        outputs = [AgentLoopOutput(**each, reward_score=reward) for each in made]
        return outputs if len(outputs) > 1 else outputs[0]

    def _read_reward(self, rollout: Rollout) -> float | None:
        try:
            return stated_reward(rollout)
        except AdapterError as error:
            if not self._settings.runs_program:
                raise  # a bug in the function, which affects every row
            _log.warning(VERL_REWARD_MISSING, error=error.message)  # the model may have written that result
            return None


def _needs_logprobs(config: Any) -> bool:
    # The loss then takes ratios to the rollout's logprobs; otherwise verl computes its own.
    correction = getattr(getattr(config, "algorithm", None), "rollout_correction", None)
    return any(getattr(correction, name, None) for name in ("rollout_is", "rollout_rs", "bypass_mode"))


def _takes_lists(config: Any) -> bool:
    # Settings under which verl counts a rollout once however many outputs it has, in its group and in the loss.
    algorithm, actor = getattr(config, "algorithm", None), getattr(config.actor_rollout_ref, "actor", None)
    return (
        getattr(algorithm, "adv_estimator", "gae") in ("gae", "grpo", "reinforce_plus_plus")
        and getattr(actor, "loss_agg_mode", "token-mean") != "seq-mean-token-mean"
        and not getattr(getattr(config, "distillation", None), "enabled", False)
    )


def _require_fields(output: Any) -> None:
    missing = sorted(FIELDS - output.model_fields.keys())
    if missing:
        from verl import __version__

        raise AdapterError(
            f"verl {__version__}: AgentLoopOutput has no {', '.join(missing)}; expected the interface of verl {VERSION}"
        )
