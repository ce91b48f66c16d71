"""Every error of the tree ends a command with a code that says who has to act."""

import pytest

from harness import errors
from harness.suite.exits import ExitCode, NothingSelected, exit_code_of


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ScenarioError, ExitCode.USAGE),
        (errors.RunError, ExitCode.USAGE),
        (NothingSelected, ExitCode.NOTHING_SELECTED),
        (errors.EngineUnavailable, ExitCode.INFRASTRUCTURE),
        (errors.SessionServerError, ExitCode.INFRASTRUCTURE),
        (errors.StoreFull, ExitCode.INFRASTRUCTURE),
        (errors.ModelError, ExitCode.INFRASTRUCTURE),
        (errors.UnknownModel, ExitCode.USAGE),
        (errors.CannotListen, ExitCode.INFRASTRUCTURE),
        (errors.TokenizerError, ExitCode.INFRASTRUCTURE),
        (errors.AgentError, ExitCode.INFRASTRUCTURE),
        (errors.LedgerImbalance, ExitCode.INTERNAL),
        (errors.IllegalTransition, ExitCode.INTERNAL),
    ],
)
def test_an_error_has_an_exit_code(error: type[errors.HarnessError], code: ExitCode):
    """A bug of ours is internal, a failure of the surroundings can be retried, a wrong file cannot."""
    assert exit_code_of(error("x")) is code
