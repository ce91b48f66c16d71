"""Exit codes of every command, following pytest where it has one."""

from collections.abc import Mapping
from enum import IntEnum

from harness import errors


class ExitCode(IntEnum):
    # A script can retry infrastructure failures alone.
    PASSED = 0
    CHECKS_FAILED = 1
    """The run is complete, but a check failed."""
    INTERRUPTED = 2
    """A run can be resumed."""
    INTERNAL = 3
    """A bug of the harness, such as an unbalanced ledger."""
    USAGE = 4
    """Wrong command line or file."""
    NOTHING_SELECTED = 5
    INFRASTRUCTURE = 6
    """Engine, model, disk or environment failed; a retry may pass."""


class NothingSelected(errors.ScenarioError):
    """No scenario was found."""


_EXITS: Mapping[ExitCode, tuple[type[errors.HarnessError], ...]] = {
    ExitCode.NOTHING_SELECTED: (NothingSelected,),  # first: it is a `ScenarioError`
    ExitCode.USAGE: (errors.ScenarioError, errors.RunError, errors.UnknownModel, errors.SegmentError),
    ExitCode.INFRASTRUCTURE: (
        *(errors.CannotListen, errors.SessionServerError, errors.ShardUnavailable, errors.StoreError, errors.StepError),
        *(errors.EngineError, errors.LaneError, errors.ModelError, errors.TokenizerError, errors.LearnerError),
        *(errors.AgentError, errors.SandboxFailed),
    ),
}


def exit_code_of(error: errors.HarnessError) -> ExitCode:
    return next((code for code, kinds in _EXITS.items() if isinstance(error, kinds)), ExitCode.INTERNAL)
