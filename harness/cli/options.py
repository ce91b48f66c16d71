"""Options that several commands share; every flag has an environment variable of the same meaning."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from harness.server.settings import ServerSettings

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]

Renderer = Annotated[
    str,
    typer.Option(
        envvar="HARNESS_RENDERER",
        help="What writes conversations as ids: `none` the chat template, NAME of the renderers package, or `auto`.",
    ),
]


# What `serve` and `router` have in common.

Tokenizer = Annotated[
    Path | None,
    typer.Option(
        envvar="HARNESS_TOKENIZER",
        help="Folder with tokenizer and chat template.  [default: that of --model]",
        show_default=False,
    ),
]

Host = Annotated[str, typer.Option(envvar="HARNESS_HOST")]

Port = Annotated[int, typer.Option(envvar="HARNESS_PORT", min=0, max=65535, help="0 takes a free one.")]

Store = Annotated[str, typer.Option(envvar="HARNESS_STORE", help="SQLite file that keeps the sessions, or `memory`.")]

PauseTimeout = Annotated[
    float, typer.Option(envvar="HARNESS_PAUSE_TIMEOUT", min=0, help="Seconds a paused server holds a request.")
]

DrainGrace = Annotated[
    float,
    typer.Option(envvar="HARNESS_DRAIN_GRACE", min=0, help="Seconds after a drain that an engine may keep a turn."),
]

StopGrace = Annotated[
    float,
    typer.Option(
        envvar="HARNESS_STOP_GRACE", min=0, help="Seconds that turns in flight may go on after the signal to end."
    ),
]

AdminToken = Annotated[
    str | None,
    typer.Option(
        envvar="HARNESS_ADMIN_TOKEN", help="Needed to create and read sessions, when set.", show_default=False
    ),
]

Matchings = Annotated[
    list[str] | None,
    typer.Option(
        envvar="HARNESS_MATCHING",
        metavar="MODULE:FUNCTION",
        help="Lets sessions choose this function to match replayed histories; may be repeated.",
        show_default=False,
    ),
]

RequestLimits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        envvar="HARNESS_LIMIT",
        metavar="NAME=NUMBER",
        help="How much one request may hold, such as body_bytes=33554432 (docs/limits.md); may be repeated.",
        show_default=False,
    ),
]

IdleHours = Annotated[
    float,
    typer.Option(
        envvar="HARNESS_IDLE_HOURS", min=0, help="A session that nobody asks for is closed after so long; 0 keeps it."
    ),
]

KeepDays = Annotated[
    float,
    typer.Option(
        envvar="HARNESS_KEEP_DAYS", min=0, help="The store forgets closed sessions after so long; 0 keeps them."
    ),
]


def server_settings(
    host: str,
    port: int,
    admin_token: str | None,
    pause_timeout: float,
    matching: list[str] | None,
    *,
    limit: list[str] | None = None,
    idle_hours: float,
    keep_days: float,
    drain_grace: float,
    stop_grace: float,
) -> "ServerSettings":
    """What these options say of a session server. Raises `ScenarioError` when nobody should serve like that."""
    from harness.dialects.request_limits import read_limits
    from harness.server.settings import ServerSettings

    settings = ServerSettings(
        host=host,
        port=port,
        admin_token=admin_token,
        pause_timeout_s=pause_timeout,
        drain_grace_s=drain_grace,
        stop_grace_s=stop_grace,
        matchings=tuple(matching or ()),
        limits=read_limits(limit or ()),
        idle_ttl_s=idle_hours * 3600 or None,
        keep_closed_s=keep_days * 86_400 or None,
    )
    settings.check()
    return settings
