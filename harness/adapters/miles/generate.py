"""miles' generate and rollout functions over a session server.

A failed rollout is an ABORTED sample; wrong settings raise. miles gives arguments to a generate function only with the
first sample, where an error costs every sample, so the rollout function checks the setup first.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from harness.adapters.agents import LoadFunction
from harness.adapters.miles.rollouts import MilesRollouts, find_agent, make_task
from harness.adapters.miles.samples import STAMPS, aborted_sample, require_fields, samples_of
from harness.adapters.miles.settings import MilesSettings, add_arguments, read_settings
from harness.adapters.trainer_sessions import rollout_directory
from harness.errors import AdapterError
from harness.machine.log import get_logger
from harness.samples.delivery import Selection
from harness.samples.roles import Role
from harness.types import Json

MILES_ROLLOUT_FAILED = "miles_rollout_failed"
MILES_REWARD_FAILED = "miles_reward_failed"

_log = get_logger(__name__)

# By miles' `GenerateState`. miles makes a `Generate` per state, or per sample where a data set names its own, and calls
# a module's `abort` with its arguments only.
_of_state: dict[Any, MilesRollouts] = {}


class Generate:
    """Generate function for `--custom-generate-function-path`."""

    add_arguments = staticmethod(add_arguments)

    async def __call__(self, request: Any) -> Any:
        """Convert a `GenerateFnInput` to a `GenerateFnOutput`. Raises `AdapterError` for unsupported settings."""
        from miles.rollout.base_types import GenerateFnOutput
        from miles.utils.misc import load_function

        require_fields(request.sample)
        given = (request.state, request.sample, request.sampling_params, load_function, "miles.rollout.rm_hub.async_rm")
        return GenerateFnOutput(samples=await run_sample(*given, is_one=request.evaluation))


async def run_sample(
    state: Any, sample: Any, sampling_params: Json, load: LoadFunction, scoring: str, *, is_one: bool
) -> Any:
    """Run the rollout of `sample` and return a list of samples, or one if required, as for an evaluation.

    `state` is the framework's `GenerateState` (`args`, `tokenizer`, `aborted`), `scoring` the path of its scoring
    function. Raises `AdapterError` for unsupported settings.
    """
    rollouts = _rollouts_of(state, load)
    settings = replace(rollouts.settings, selection=Selection.ONE, record=()) if is_one else rollouts.settings
    try:
        samples = await _generate(rollouts, settings, state, sample, sampling_params)
        await _share_reward(samples, state.args, load, scoring)
    except AdapterError:
        raise
    except Exception as error:  # noqa: BLE001  # a failure costs one rollout only
        _log.warning(MILES_ROLLOUT_FAILED, index=sample.index, error=repr(error), exc_info=True)
        samples = [aborted_sample(sample, f"{type(error).__name__}: {error}")]
    return samples[0] if settings.selection == Selection.ONE else samples


async def open_rollouts(state: Any, load: LoadFunction) -> None:
    """Prepare rollouts, once. Raises `SessionServerError`, `AgentError` or `AdapterError`."""
    await _rollouts_of(state, load).open()


async def abort(args: Any) -> None:
    """End every rollout of a run; agent modules export this for miles. `Generate` sees miles' own abort 50 ms later."""
    await asyncio.gather(*(rollouts.end() for rollouts in _rollouts_with(args)))


async def close(args: Any) -> None:
    """End every rollout of a run, and close what they use. Idempotent."""
    for rollouts in _rollouts_with(args):
        await rollouts.close()
    for state in [state for state in _of_state if state.args is args]:
        del _of_state[state]


async def _generate(
    rollouts: MilesRollouts, settings: MilesSettings, state: Any, sample: Any, sampling_params: Json
) -> list[Any]:
    agent = await rollouts.open()
    name = f"{sample.group_index}-{sample.index}-{uuid4().hex[:8]}"
    async with rollout_directory(settings.workdir, name) as workdir:
        task = make_task(settings, agent, sample, sampling_params, workdir)
        rollout = await rollouts.run(task, state)
    if rollout is None:
        return [aborted_sample(sample, "the step was aborted")]
    # In the loop, as miles does: its tokenizer is used there and is not thread-safe.
    return samples_of(sample, rollout, state.tokenizer.decode, trusts_agent=settings.trusts_agent)


async def _share_reward(samples: Sequence[Any], args: Any, load: LoadFunction, scoring: str) -> None:
    # Samples of one rollout share the reward of its last answer.
    is_aborted = any(sample.status is type(sample.status).ABORTED for sample in samples)
    if len(samples) < 2 or is_aborted or samples[0].reward is not None:
        return
    main = [sample for sample in samples if sample.metadata[STAMPS].get("role") == Role.MAIN]
    try:
        reward = await load(scoring)(args, (main or samples)[-1])
    except Exception as error:  # noqa: BLE001  # a failure costs one rollout only
        _log.warning(MILES_REWARD_FAILED, index=samples[0].index, error=repr(error), exc_info=True)
        for sample in samples:
            sample.status = type(sample.status).ABORTED
        return
    for sample in samples:
        sample.reward = reward


def _rollouts_of(state: Any, load: LoadFunction) -> MilesRollouts:
    found = _of_state.get(state)
    if found is None or found.loop is not asyncio.get_running_loop():  # they work in their own loop only
        found = _of_state[state] = MilesRollouts(state.args, load)
    return found


def _rollouts_with(args: Any) -> list[MilesRollouts]:
    loop = asyncio.get_running_loop()
    return [rollouts for rollouts in _of_state.values() if rollouts.args is args and rollouts.loop is loop]


GENERATE = "harness.adapters.miles.Generate"


class RolloutFn:
    """miles' `InferenceRolloutFn`. Raises `AdapterError` for settings that `Generate` refuses."""

    def __init__(self, given: Any) -> None:
        args = given.args
        if args.custom_generate_function_path != GENERATE:
            raise AdapterError(
                f"--custom-generate-function-path: expected {GENERATE}, got {args.custom_generate_function_path}"
            )
        from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn
        from miles.utils.misc import load_function

        find_agent(read_settings(args), load_function)
        self._load = load_function
        self._miles = InferenceRolloutFn(given)

    async def __call__(self, given: Any) -> Any:
        """Run miles' rollout function.

        The first call raises if no rollout could run: `SessionServerError` for a silent server, `AgentError` for a
        broken program, `AdapterError` for another version. Later failures cost single samples.
        """
        await open_rollouts(self._miles.state, self._load)
        return await self._miles(given)
