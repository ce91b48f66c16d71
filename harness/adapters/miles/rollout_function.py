"""miles' rollout function, with the setup checked first.

miles gives arguments to a generate function only with the first sample, where an error costs every sample.
"""

from typing import Any

from harness.adapters.miles.agents import find_agent
from harness.adapters.miles.generate import open_rollouts
from harness.adapters.miles.settings import read_settings
from harness.errors import AdapterError

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
