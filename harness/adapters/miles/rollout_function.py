"""miles' own rollout function, with the options looked at before anything runs.

miles hands its arguments to a rollout function when it makes it, and to a generate function with the first sample only.
"""

from typing import Any

from harness.adapters.miles.settings import read_settings
from harness.errors import AdapterError

GENERATE = "harness.adapters.miles.Generate"


class RolloutFn:
    """For `--rollout-function-path`: miles' `InferenceRolloutFn`, refused at the start where `Generate` would refuse.

    Raises `AdapterError` that names the option when it is made.
    """

    def __init__(self, given: Any) -> None:
        args = given.args
        if args.custom_generate_function_path != GENERATE:
            raise AdapterError(
                f"--custom-generate-function-path: expected {GENERATE}, got {args.custom_generate_function_path}"
            )
        read_settings(args)
        from miles.rollout.inference_rollout.inference_rollout_common import InferenceRolloutFn

        self._miles = InferenceRolloutFn(given)

    async def __call__(self, given: Any) -> Any:
        """What miles' own answers for this `RolloutFnInput`."""
        return await self._miles(given)
