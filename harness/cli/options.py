"""Options that several commands share; every flag has an environment variable of the same meaning."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from harness.cli import output

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
        envvar="HARNESS_ADMIN_TOKEN",
        help="Needed for everything but the model calls of a session.  [default: made at each start and printed]",
        show_default=False,
    ),
]

NoAuth = Annotated[
    bool,
    typer.Option(
        "--no-auth",
        envvar="HARNESS_NO_AUTH",
        help="On loopback: whoever reaches the port may do everything, agents too.",
    ),
]

OpenPaths = Annotated[
    bool,
    typer.Option(
        "--open-paths",
        envvar="HARNESS_OPEN_PATHS",
        help="A session's base_url is enough for its model calls, for agents that send no key.",
    ),
]

EngineKey = Annotated[
    str,
    typer.Option(
        envvar="HARNESS_ENGINE_KEY",
        help="API key of the engine servers; URL#key=VARIABLE names another one's. Prefer the variable to the option.",
        show_default=False,
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


class Access(NamedTuple):
    """Who may ask, as the options say it."""

    admin_token: str | None
    no_auth: bool
    open_paths: bool


def server_settings(
    host: str,
    port: int,
    access: Access,
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
    from harness.errors import ScenarioError
    from harness.server.access import new_admin_token
    from harness.server.settings import ServerSettings

    if access.no_auth and access.admin_token:
        raise ScenarioError(
            "expected --admin-token or --no-auth, got both; without either, a token is made and printed"
        )
    settings = ServerSettings(
        host=host,
        port=port,
        admin_token=None if access.no_auth else access.admin_token or new_admin_token(),
        open_paths=access.open_paths,
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


def made_token(settings: "ServerSettings", access: Access) -> str | None:
    """The admin token that was made at this start; None when the operator chose one, or none."""
    return None if access.admin_token else settings.admin_token


def say_who_may_ask(settings: "ServerSettings", access: Access) -> None:
    """Tell the operator once: the token that was made, or that there is none."""
    if token := made_token(settings, access):
        output.say(f"admin token of this start: {token} (--admin-token or HARNESS_ADMIN_TOKEN chooses one)")
    elif settings.admin_token is None:
        output.say(
            "no authentication: whoever reaches the port, agents included, can read, change and end every session"
        )
