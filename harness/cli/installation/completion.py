"""`harness completion`: the script with which a shell completes commands and options.

The script calls `harness`, so it fits later versions. typer answers if `VARIABLE` is set.
"""

from typing import Annotated, Literal

import typer

from harness.cli import output

VARIABLE = "_HARNESS_COMPLETE"

_Shell = Annotated[Literal["bash", "zsh", "fish"], typer.Argument()]


def completion(shell: _Shell) -> None:
    """Print the completion script of a shell, for its startup file.

    Examples: `eval "$(harness completion bash)"`, `eval "$(harness completion zsh)"`, `harness completion fish |
    source`
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # which it has always had

    script = get_completion_script(prog_name="harness", complete_var=VARIABLE, shell=shell)
    output.print_text(script)
