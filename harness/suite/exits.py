"""How a command ends, as a process exit code: the one place where these numbers are written down.

The numbers follow pytest where it has one. A failed check, a broken tool and a wrong command line are different
things to whoever reads the code, a script that retries infrastructure failures first of all.
"""

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
    """Exit codes of every command."""

    PASSED = 0
    """It did what was asked, and every check held."""
    CHECKS_FAILED = 1
    """The run is complete, a check of a scenario does not hold."""
    INTERRUPTED = 2
    """Stopped by Ctrl+C or SIGTERM; a run can be resumed."""
    INTERNAL = 3
    """A bug of the harness, an unbalanced ledger included."""
    USAGE = 4
    """The command line or a file it names is wrong; nothing was run."""
    NOTHING_SELECTED = 5
    """There is no scenario where one was looked for."""
    INFRASTRUCTURE = 6
    """An engine, a model, the disk or an agent's environment failed; the same command may pass later."""


class NothingSelected(ScenarioError):
    """A suite holds no scenario."""


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
    (StepError, ExitCode.INFRASTRUCTURE),
    (LearnerError, ExitCode.INFRASTRUCTURE),
)


def exit_code_of(error: HarnessError) -> ExitCode:
    """The exit code of a command that ended with `error`; the first class that fits decides."""
    return next((code for kind, code in _EXITS if isinstance(error, kind)), ExitCode.INTERNAL)
