"""Exit codes of every command, following pytest where it has one."""

from enum import IntEnum

from harness.errors import (
    AgentError,
    CannotListen,
    EngineError,
    HarnessError,
    LaneError,
    LearnerError,
    ModelError,
    RunError,
    SandboxFailed,
    ScenarioError,
    SegmentError,
    SessionServerError,
    ShardUnavailable,
    StepError,
    StoreError,
    TokenizerError,
    UnknownModel,
)


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


class NothingSelected(ScenarioError):
    """No scenario was found."""


_EXITS: tuple[tuple[type[HarnessError], ExitCode], ...] = (
    (NothingSelected, ExitCode.NOTHING_SELECTED),
    (ScenarioError, ExitCode.USAGE),
    (RunError, ExitCode.USAGE),
    (UnknownModel, ExitCode.USAGE),
    (SegmentError, ExitCode.USAGE),
    (CannotListen, ExitCode.INFRASTRUCTURE),
    (EngineError, ExitCode.INFRASTRUCTURE),
    (SessionServerError, ExitCode.INFRASTRUCTURE),
    (ShardUnavailable, ExitCode.INFRASTRUCTURE),
    (StoreError, ExitCode.INFRASTRUCTURE),
    (LaneError, ExitCode.INFRASTRUCTURE),
    (ModelError, ExitCode.INFRASTRUCTURE),
    (TokenizerError, ExitCode.INFRASTRUCTURE),
    (AgentError, ExitCode.INFRASTRUCTURE),
    (SandboxFailed, ExitCode.INFRASTRUCTURE),
    (StepError, ExitCode.INFRASTRUCTURE),
    (LearnerError, ExitCode.INFRASTRUCTURE),
)


def exit_code_of(error: HarnessError) -> ExitCode:
    # First match wins: `NothingSelected` is a `ScenarioError`, so it stands above it.
    return next((code for kind, code in _EXITS if isinstance(error, kind)), ExitCode.INTERNAL)
