"""`harness completion`: the script by which a shell completes commands and options.

The script asks `harness` itself, so it need not be made anew for another version. typer answers when it is asked by
`VARIABLE`; only then is that part of it loaded.
"""

from typing import Annotated, Literal

import typer

from harness.cli import output

VARIABLE = "_HARNESS_COMPLETE"

_Shell = Annotated[Literal["bash", "zsh", "fish"], typer.Argument(show_default=False)]


def completion(shell: _Shell) -> None:
    """Print the completion script of a shell, for its start-up file.

    Examples: `eval "$(harness completion bash)"`, `eval "$(harness completion zsh)"`,
    `harness completion fish | source`
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # which it has always had

    script = get_completion_script(prog_name="harness", complete_var=VARIABLE, shell=shell)
    output.print_text(script)
