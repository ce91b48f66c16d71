"""A trainer's environment: what has to be installed to import the manager and the adapters."""

import subprocess
import sys

import pytest

from harness.errors import ScenarioError
from harness.machine.extras import require_package

FEW = ("httpx", "msgspec", "numpy", "structlog", "tenacity")
OF_THOSE = ("anyio", "certifi", "h11", "httpcore", "idna", "sniffio", "typing_extensions")

BLOCK = f"""
import sys
from importlib.abc import MetaPathFinder

allowed = {{*sys.stdlib_module_names, "harness", "server_patch", *{FEW + OF_THOSE}}}

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"not installed: {{name}}", name=name)

sys.meta_path.insert(0, Blocked())
"""

NAMES = """
from harness import AgentTask, FunctionAgent, ProgramAgent, SessionManager, WeightUpdater, abort_rollout, paused_rollout
from harness import Outcome, Rollout, Sample, SessionServerAddress, read_samples
from harness.training import Collector, Pack, SegmentMaker, SessionSource, StepPipeline
import harness.adapters.areal.workflow, harness.adapters.miles.generate
import harness.adapters.slime.convert, harness.adapters.verl.agent_loop
"""


def test_a_trainer_imports_with_few_packages() -> None:
    """Any other package is missing: no web framework, tokenizer, validator or second HTTP client."""
    subprocess.run([sys.executable, "-c", BLOCK + NAMES], check=True, timeout=200)


def test_a_missing_package_is_named_with_its_extra() -> None:
    """The error has the command that installs it."""
    require_package("httpx", "run", "--shards")
    with pytest.raises(ScenarioError, match=r"--shards: .* no_such_package, .* 'session-harness\[run\]'"):
        require_package("no_such_package", "run", "--shards")
