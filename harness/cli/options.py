"""Options that several commands share; every flag has an environment variable of the same meaning."""

from enum import StrEnum
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]

Renderer = Annotated[
    str,
    typer.Option(
        envvar="HARNESS_RENDERER",
        help="What writes conversations as ids: `none` the chat template, NAME of the renderers package, or `auto`.",
    ),
]


class RunEngine(StrEnum):
    """Engines that a run starts by itself."""

    LOCAL = "local"
    """A HuggingFace model in this process."""
    SCRIPTED = "scripted"
    """An engine that says what a script tells it."""
