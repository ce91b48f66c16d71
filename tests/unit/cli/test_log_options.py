"""How much of the log stands on standard error."""

import pytest
import typer

from harness.cli.main import Level, app, choose_level


@pytest.mark.parametrize(
    ("usual", "verbose", "quiet", "log_level", "chosen"),
    [
        ("info", 0, False, None, "info"),
        ("error", 0, False, None, "error"),
        ("info", 1, False, None, "debug"),
        ("error", 1, False, None, "info"),
        ("error", 2, False, None, "debug"),
        ("error", 5, False, None, "debug"),
        ("info", 0, True, None, "error"),
        ("error", 0, True, None, "critical"),
        ("info", 0, False, "warning", "warning"),
        ("error", 1, False, "critical", "info"),
        ("info", 0, True, "debug", "error"),
    ],
)
def test_the_level(usual: Level, verbose: int, quiet: bool, log_level: Level | None, chosen: str):
    """More and less than the command's own, or exactly the one that was named."""
    assert choose_level(usual, verbose=verbose, quiet=quiet, log_level=log_level) == chosen


def test_more_and_less_is_a_contradiction():
    """And is told of."""
    with pytest.raises(typer.BadParameter, match="got both"):
        choose_level("info", verbose=1, quiet=True, log_level=None)


def test_every_command_has_the_options():
    """Those of groups, too."""
    commands = [typer.main.get_command(app)]
    for each in commands:  # which grows by the commands of groups
        commands += getattr(each, "commands", {}).values()
    without = [
        each.name
        for each in commands
        if not hasattr(each, "commands")
        and not {"-v", "-q", "--log-level"} <= {flag for option in each.params for flag in option.opts}
    ]

    assert len(commands) > 30
    assert without == []
