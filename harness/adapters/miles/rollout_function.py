"""miles' own rollout function, with the set-up looked at before anything runs.

miles hands its arguments to a rollout function when it makes it, and to a generate function with the first sample only.
There a mistake in the set-up costs every sample, and a step that filters them makes groups for ever.
"""

from typing import Any

from harness.adapters.miles.agents import find_agent
from harness.adapters.miles.generate import open_rollouts
from harness.adapters.miles.settings import read_settings
from harness.errors import AdapterError

GENERATE = "harness.adapters.miles.Generate"


class RolloutFn:
    """For `--rollout-function-path`: miles' `InferenceRolloutFn`, refused at the start where `Generate` would refuse.

    Raises `AdapterError` that names the option when it is made, also for an agent that is not there.
    """

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
        """What miles' own answers for this `RolloutFnInput`.

        Raises before the first one what would keep every rollout from running: `SessionServerError` when the session
        server does not answer, `AgentError` for a program that cannot be made ready, `AdapterError` for a server of
        another version. Once this has worked, such a thing costs the samples that it meets.
        """
        await open_rollouts(self._miles.state, self._load)
        return await self._miles(given)
