"""Options that several commands share; every flag has an environment variable."""

import functools
import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from harness.cli import output
from harness.errors import RunError, ScenarioError

if TYPE_CHECKING:
    from harness.rollouts.client.session_server import SessionServerClient
    from harness.server.settings import ServerSettings
    from harness.tokens.chat_tokenizer import ChatTokenizer

_T = TypeVar("_T")


def yields_to(*flags: str) -> Callable[..., Any]:
    """Return a callback that drops an option set by a variable if one of `flags` is on the command line.

    Options of the command line are read first, so their sources are known.
    """

    def drop(context: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
        came_by = {name: getattr(context.get_parameter_source(name), "name", "") for name in (param.name or "", *flags)}
        is_overruled = came_by[param.name or ""] == "ENVIRONMENT" and "COMMANDLINE" in map(came_by.get, flags)
        return None if is_overruled else value

    return drop


def option(variable: str, text: str, *flags: str, **details: Any) -> Any:
    """Return a flag with its environment variable and its help."""
    return typer.Option(*flags, envvar=variable, help=text, **details)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would run, and start nothing.")]

Renderer = Annotated[
    str,
    option(
        "HARNESS_RENDERER", "Renderer of conversations: `none` (chat template), NAME of package renderers, or `auto`."
    ),
]

Template = Annotated[
    str | None,
    option(
        "HARNESS_TEMPLATE",
        "Chat template in place of the folder's: a file, or ours:"
        " `deepseek_v3`, `gpt_oss`, `mistral_nemo`, `phi4`, `chatml_hermes`.",
        callback=yields_to("server"),
    ),
]


def find_tokenizer(named: str | Path) -> Path:
    """Resolve `--tokenizer`: a folder, or a model of the catalogue. Raises `ModelError`."""
    from harness.lab.models.catalogue import CATALOGUE

    if str(named) in CATALOGUE:
        from harness.cli.download import fetch

        return fetch(str(named))
    return Path(named).expanduser()


@contextmanager
def empty_folder(out: Path | None, prefix: str) -> Iterator[Path]:
    """Yield the folder of `--out`, or a temporary one. Raises `RunError` if there is something in it."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix=prefix) if out is None else nullcontext(out) as place:
        folder = Path(place)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{out} exists and is not empty; choose another --out")
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def tokenizer_option(text: str) -> Any:
    return option("HARNESS_TOKENIZER", text, parser=find_tokenizer, metavar="NAME_OR_DIR")


ReadsTokens = Annotated[
    Path | None,
    tokenizer_option(
        "Tokenizer that decodes the tokens: a folder, or a model of the catalogue.  [default: the recorded one]"
    ),
]

Server = Annotated[str, option("HARNESS_SERVER", "A session server, a front or a router.", metavar="URL")]

AdminToken = Annotated[str | None, option("HARNESS_ADMIN_TOKEN", "That of --server.")]


def ask_named(server: str, admin_token: str | None, question: "Callable[[SessionServerClient], Awaitable[_T]]") -> _T:
    """Return the answer of `--server`. Raises `ScenarioError` for a bad address, `SessionServerError`."""
    from harness.rollouts.client.connections import SessionServerAddress, server_url
    from harness.rollouts.client.session_server import ask_server

    return ask_server(SessionServerAddress(server_url(server), admin_token), question)


Otlp = Annotated[
    str | None,
    option(
        "HARNESS_OTLP_ENDPOINT",
        "OpenTelemetry collector that gets spans over HTTP, such as http://127.0.0.1:4318.",
        callback=yields_to("server"),
        metavar="URL",
    ),
]


def require_collector(otlp: str | None) -> str | None:
    """Check `--otlp` before starting a server that sends to it; None if empty. Raises `ScenarioError`."""
    from harness.server.telemetry.tracing.collector import check_collector

    if otlp:
        check_collector(otlp)
    return otlp or None


_SECRETS = frozenset({"admin_token", "engine_key"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of a session server; a command takes them all with `takes_server_options`."""

    tokenizer: Annotated[
        Path | None,
        tokenizer_option("Tokenizer and chat template: folder, or model of the catalogue.  [default: --model's]"),
    ] = None
    renderer: Renderer = "auto"
    template: Template = None
    template_variable: Annotated[
        list[str] | None,
        option(
            "HARNESS_TEMPLATE_VARIABLE",
            "Set a variable of the chat template, as `enable_thinking=false`; may be repeated.",
            metavar="NAME=JSON",
        ),
    ] = None
    host: Annotated[str, typer.Option(envvar="HARNESS_HOST")] = "127.0.0.1"
    port: Annotated[int, option("HARNESS_PORT", "0 picks a free one.", min=0, max=65535)] = 8000
    public_url: Annotated[
        str | None, option("HARNESS_PUBLIC_URL", "Public address of the server, if it is behind a proxy.")
    ] = None
    store: Annotated[str, option("HARNESS_STORE", "SQLite file that keeps the sessions, or `memory`.")] = "memory"
    pause_timeout: Annotated[
        float, option("HARNESS_PAUSE_TIMEOUT", "Seconds a paused server holds a request.", min=0)
    ] = 600.0
    drain_grace: Annotated[
        float, option("HARNESS_DRAIN_GRACE", "Seconds after a drain that an engine may keep a turn.", min=0)
    ] = 20.0
    stop_grace: Annotated[
        float, option("HARNESS_STOP_GRACE", "Seconds that turns in flight get to finish after a stop signal.", min=0)
    ] = 5.0
    write_timeout: Annotated[
        float, option("HARNESS_WRITE_TIMEOUT", "Seconds until a client that reads nothing is disconnected.", min=0)
    ] = 60.0
    admin_token: Annotated[
        str | None,
        option(
            "HARNESS_ADMIN_TOKEN",
            "Token for everything but model calls.  [default: generated at each start and printed]",
            callback=yields_to("no_auth"),
        ),
    ] = None
    no_auth: Annotated[
        bool,
        option(
            "HARNESS_NO_AUTH",
            "Loopback only: every client, agents included, may do everything.",
            "--no-auth",
            callback=yields_to("admin_token"),
        ),
    ] = False
    open_paths: Annotated[
        bool,
        option("HARNESS_OPEN_PATHS", "Accept model calls by base_url alone, for agents without a key.", "--open-paths"),
    ] = False
    matching: Annotated[
        list[str] | None,
        option("HARNESS_MATCHING", "Function that may match histories; may be repeated.", metavar="MODULE:FUNCTION"),
    ] = None
    teacher: Annotated[
        list[str] | None,
        option(
            "HARNESS_TEACHER",
            "Let this engine score each turn's tokens: NAME=local=FOLDER, or NAME=KIND=URL[,tokenizer=FOLDER];"
            " may be repeated.",
            metavar="NAME=ENGINE",
            show_default=False,
        ),
    ] = None
    selection: Annotated[
        list[str] | None,
        option("HARNESS_SELECTION", "Function that may choose samples; may be repeated.", metavar="MODULE:FUNCTION"),
    ] = None
    noise: Annotated[
        list[str] | None,
        option(
            "HARNESS_NOISE", "Text to cut from conversations' start; '' for none; may be repeated.", metavar="REGEX"
        ),
    ] = None
    limit: Annotated[
        list[str] | None,
        option(
            "HARNESS_LIMIT", "One of docs/limits.md, as body_bytes=33554432; may be repeated.", metavar="NAME=NUMBER"
        ),
    ] = None
    allow_forced_tokens: Annotated[
        bool,
        option("HARNESS_ALLOW_FORCED_TOKENS", "For tests: engines say a session's script.", "--allow-forced-tokens"),
    ] = False
    streaming: Annotated[
        Literal["recorded", "live"],
        option("HARNESS_STREAMING", "Stream when a turn is durable (`recorded`), or text as it is sampled (`live`)."),
    ] = "recorded"
    idle_hours: Annotated[
        float, option("HARNESS_IDLE_HOURS", "Hours until an unused session is closed; 0 keeps it.", min=0)
    ] = 24.0
    idle_page_out: Annotated[
        float,
        option(
            "HARNESS_IDLE_PAGE_OUT", "Move unused sessions to the store after so many seconds; 0 keeps them.", min=0
        ),
    ] = 0.0
    keep_days: Annotated[
        float, option("HARNESS_KEEP_DAYS", "Days until a closed session is deleted from the store; 0 keeps it.", min=0)
    ] = 30.0
    otlp: Otlp = None
    engine_key: Annotated[
        str, option("HARNESS_ENGINE_KEY", "API key of engine servers without URL#key=VARIABLE; prefer this variable.")
    ] = ""

    def settings(self) -> "ServerSettings":
        """Return the server's settings. Raises `ScenarioError` if they would leave it open by mistake."""
        from harness.dialects.prompt_noise import BILLING_HEADER
        from harness.dialects.request_limits import read_limits
        from harness.engines.teachers import TeacherSpec
        from harness.server.http.access import new_admin_token
        from harness.server.settings import ServerSettings
        from harness.sessions.session_config import StreamingMode

        if self.no_auth and self.admin_token:
            raise ScenarioError(
                "expected --admin-token or --no-auth, got both; without either, a token is made and printed"
            )
        settings = ServerSettings(
            host=self.host,
            port=self.port,
            public_url=self.public_url,
            admin_token=None if self.no_auth else self.admin_token or new_admin_token(),
            open_paths=self.open_paths,
            pause_timeout_s=self.pause_timeout,
            drain_grace_s=self.drain_grace,
            stop_grace_s=self.stop_grace,
            write_timeout_s=self.write_timeout,
            matchings=tuple(self.matching or ()),
            selections=tuple(self.selection or ()),
            teachers=tuple(map(TeacherSpec.parse, self.teacher or ())),
            noise=(BILLING_HEADER,) if self.noise is None else tuple(text for text in self.noise if text),
            limits=read_limits(self.limit or ()),
            allow_forced_tokens=self.allow_forced_tokens,
            streaming=StreamingMode(self.streaming),
            idle_ttl_s=self.idle_hours * 3600 or None,
            idle_page_out_s=self.idle_page_out or None,
            keep_closed_s=self.keep_days * 86_400 or None,
            otlp_endpoint=require_collector(self.otlp),
        )
        settings.check()
        return settings

    def as_arguments(self, **others: Any) -> list[str]:
        """Format the options as a command line, replaced by `others`; secrets are left out."""
        options = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _SECRETS} | others
        arguments: list[str] = []
        for name, value in options.items():
            flag = "--" + name.replace("_", "-")
            match value:
                case None | False:
                    pass
                case True:
                    arguments.append(flag)
                case list() | tuple():
                    arguments += (f"{flag}={each}" for each in value)
                case _:
                    arguments.append(f"{flag}={value}")
        return arguments

    def open_tokenizer(self, model_dir: Path | None) -> "ChatTokenizer":
        """Open the chat tokenizer of `--tokenizer`, else of `model_dir`. Raises `ScenarioError` without either."""
        from harness.lab.models.tokenizer_files import find_template
        from harness.tokens.model_family import open_chat_tokenizer

        folder = self.tokenizer or model_dir
        if folder is None:
            raise ScenarioError("no tokenizer: expected --model NAME_OR_DIR, or --tokenizer DIR")
        template = None if self.template is None else find_template(self.template)
        try:
            pairs = (each.partition("=") for each in self.template_variable or ())
            variables = {name: json.loads(value) for name, _, value in pairs}
        except ValueError as error:
            raise ScenarioError(f'--template-variable: expected NAME=JSON, as `effort="low"`: {error}') from error
        return open_chat_tokenizer(folder, template_file=template, renderer=self.renderer, template_variables=variables)

    def announce(self, url: str, settings: "ServerSettings", said: str, *, as_json: bool, **more: Any) -> None:
        """Tell the operator that the server answers and how to get in: `said`, or one JSON document with `more`."""
        token = None if self.admin_token else settings.admin_token  # made at this start
        if as_json:
            output.print_json({"url": url, "admin_token": token} | more)
            sys.stdout.flush()
            return
        output.say(said)
        if token:
            output.say(f"admin token of this start: {token} (--admin-token or HARNESS_ADMIN_TOKEN chooses one)")
        elif settings.admin_token is None:
            output.say(
                "no authentication: every client that reaches the port, agents included, can read, change and end every"
                " session"
            )


def takes_server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `server` of `command` by the fields of `ServerOptions`, for typer."""
    own = inspect.signature(command).parameters
    hints = inspect.get_annotations(ServerOptions)
    shared = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])
        for each in fields(ServerOptions)
    ]

    @functools.wraps(command)
    def run_command(**options: Any) -> None:
        server = ServerOptions(**{each.name: options.pop(each.name) for each in shared})
        command(**options, server=server)

    parameters = [each for name, old in own.items() for each in (shared if name == "server" else [old])]
    run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which typer reads
    run_command.__annotations__ = {each.name: each.annotation for each in parameters}
    return run_command
