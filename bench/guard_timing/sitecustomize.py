"""Times the repeat guard inside a server: this folder stands first on the PYTHONPATH of a benchmark's server.

What a hook takes beyond the function it wraps is added up, per process, and written to `GUARD_TIMING_DIR` a few times a
second. The clock's own cost is in the sum, so the figures are upper bounds.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from time import perf_counter_ns, sleep
from typing import Any

HERE = Path(__file__).resolve().parent
WRITE_EVERY_S = 0.2
THREAD = "guard_timing"


class Sum:
    """Of one process."""

    calls = 0
    spent_ns = 0

    def write(self, path: Path) -> None:
        """For as long as the process lives."""
        written = 0
        while True:
            sleep(WRITE_EVERY_S)
            if self.calls != written:
                written = self.calls
                scratch = path.with_suffix(".new")
                scratch.write_text(json.dumps({"calls": self.calls, "spent_ns": self.spent_ns}))
                scratch.rename(path)


def timed(hook: Callable[..., Any], total: Sum) -> Callable[..., Any]:
    """`hook(owner, original, *arguments)`, which adds to `total` what it takes beside `original`."""

    def around(owner: Any, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        inside = 0

        def timed_original(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            begun = perf_counter_ns()
            result = original(*args, **kwargs)
            inside += perf_counter_ns() - begun
            return result

        begun = perf_counter_ns()
        result = hook(owner, timed_original, *arguments, **named)
        total.spent_ns += perf_counter_ns() - begun - inside
        total.calls += 1
        return result

    return around


def measure(folder: Path) -> None:
    """Time the hooks of both engines, of which this process uses at most one."""
    from server_patch.repeat_terminate.sglang_plugin import FinishHook
    from server_patch.repeat_terminate.vllm_plugin import StopHook

    total = Sum()
    for hook in (FinishHook, StopHook):
        hook.__call__ = timed(hook.__call__, total)
    path = folder / f"{os.getpid()}.json"
    threading.Thread(target=total.write, args=(path,), name=THREAD, daemon=True).start()


def run_next() -> None:
    """The `sitecustomize` that this one stands before."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


# The `sitecustomize` that is run next looks for its own next one, and finds this.
if not any(thread.name == THREAD for thread in threading.enumerate()):
    measure(Path(os.environ["GUARD_TIMING_DIR"]))
    run_next()
