"""miles (interface of radixark/miles 31f1ca96) over a session server.

    --rollout-function-path harness.adapters.miles.RolloutFn
    --custom-generate-function-path harness.adapters.miles.Generate
    --custom-convert-samples-to-train-data-path harness.adapters.miles.convert

Agent modules export `abort` for miles; programs that outlive miles call `close`. See docs/embedding.md.
"""

from harness.adapters.miles.convert import convert
from harness.adapters.miles.generate import Generate, RolloutFn, abort, close
from harness.adapters.step_reports import log_rollout

__all__ = ["Generate", "RolloutFn", "abort", "close", "convert", "log_rollout"]
