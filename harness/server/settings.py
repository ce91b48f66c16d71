"""Operator settings of a session server."""

import ipaddress
from dataclasses import dataclass, field

from harness.dialects.dialect import DIALECTS, Dialect
from harness.dialects.noise import BILLING_HEADER, NoiseRules
from harness.dialects.request_limits import DEFAULT_LIMITS, RequestLimits
from harness.errors import MalformedRequest, ScenarioError
from harness.samples.delivery import load_selection
from harness.sessions.session_config import StreamingMode
from harness.sessions.shard_ids import ShardPlace
from harness.telemetry.tracing.collector import traces_url
from harness.tokens.matching import normal_form
from server_patch.repeat_terminate import RepeatTerminateConfig

_LONGEST_S = 10 * 365 * 86_400.0
_SHORTEST_S = 0.001
_SECONDS = (
    "pause_timeout_s",
    "drain_grace_s",
    "stop_grace_s",
    "write_timeout_s",
    "comment_every_s",
    "engine_retry_s",
    "idle_ttl_s",
    "idle_page_out_s",
    "keep_closed_s",
)
_MAY_BE_ZERO = ("pause_timeout_s", "drain_grace_s", "stop_grace_s", "engine_retry_s")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server. The defaults suit a private machine."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port."""
    public_url: str | None = None
    """Start of each session's `base_url`, if agents reach the server by another name. A front replaces the port with
    that of the session's shard.
    """
    admin_token: str | None = field(default=None, repr=False)
    """Required to create, read, drain or delete sessions. None lets every client do everything, which only suits a
    loopback address without other users.
    """
    open_paths: bool = False
    """Model calls need only the session's address, for agents that send no key. Always so without an admin token."""
    pause_timeout_s: float = 600.0
    """Seconds that a paused gate holds a request before it answers 503."""
    drain_grace_s: float = 20.0
    """Seconds that a turn in flight may continue after a drain. If the engine has not handed it over by then, the turn
    is ABORTED with the tokens so far, and answered 404.
    """
    stop_grace_s: float = 5.0
    """Seconds that turns in flight may continue when the server stops. The next server continues the rest from disk."""
    comment_every_s: float = 5.0
    """Seconds before and between keep-alive events of a streamed answer."""
    streaming: StreamingMode = StreamingMode.RECORDED
    """Default time to send the text of streamed answers. Sessions may override it."""
    write_timeout_s: float = 60.0
    """Seconds that an answer waits for a client that reads nothing. Then the client counts as disconnected."""
    engine_attempts: int = 3
    """Attempts to send a request to an engine that fails with a retryable error."""
    engine_retry_s: float = 0.25
    """Seconds before the second attempt; doubles with each further one."""
    max_unsolicited_aborts: int = 3
    """Number of unexplained engine aborts after which a turn is ABORTED."""
    allow_forced_tokens: bool = False
    """Lets sessions bring a script, which replaces the model's output in their turns. Scripted tokens are never
    trained.
    """
    score_inputs: bool = True
    """Let the first request after a weight update score the tokens before it, which it has to read anyway."""
    limits: RequestLimits = DEFAULT_LIMITS
    """Size limits of one request."""
    idle_ttl_s: float | None = None
    """Seconds without a request after which a session is closed; None keeps it. `harness serve` sets 24 hours."""
    idle_page_out_s: float | None = None
    """Seconds without a request after which a session is evicted from memory until its next request; None never evicts.
    Needs a store in a file.
    """
    keep_closed_s: float | None = None
    """Seconds that the store keeps a closed session; None keeps it forever. `harness serve` sets 30 days."""
    dialects: tuple[Dialect, ...] = DIALECTS
    """APIs that agents may use, each at its own route."""
    model: str | None = None
    """Model name in answers; None uses the engine's."""
    matchings: tuple[str, ...] = ()
    """`package.module:function` paths that sessions may choose for matching, besides the built-in ones."""
    selections: tuple[str, ...] = ()
    """`package.module:function` paths that sessions may choose for selecting branches (`samples.delivery`)."""
    otlp_endpoint: str | None = None
    """OpenTelemetry collector (`http://host:4318`) for a span per session, turn and engine request (OTLP over HTTP), or
    None. Headers come from `OTEL_EXPORTER_OTLP_HEADERS`.
    """
    shard: ShardPlace | None = None
    """Position among the shards of a front; None if standalone."""
    noise: tuple[str, ...] = (BILLING_HEADER,)
    """Regular expressions to remove from the start of a conversation's first message."""
    repeat_guard: RepeatTerminateConfig | None = None
    """Repeat guard that the engine must run; None uses `HARNESS_REPEAT_TERMINATE_*` from the environment."""

    def check(self) -> None:
        """Validate the settings. Raises `ScenarioError`.

        A server without an admin token must bind a loopback address.
        """
        self.limits.check_numbers()
        for name in _SECONDS:
            seconds = getattr(self, name)
            least = 0.0 if name in _MAY_BE_ZERO else _SHORTEST_S
            if seconds is not None and not least <= seconds <= _LONGEST_S:  # NaN fails every comparison
                raise ScenarioError(f"{name}: expected {least:g}..{_LONGEST_S:g} seconds, got {seconds}")
        try:
            is_loopback = self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a host name
            is_loopback = False
        if not is_loopback and not self.admin_token:
            raise ScenarioError(
                f"refusing to bind {self.host} without an admin token: anybody could create and read sessions;"
                " give it one (--admin-token, HARNESS_ADMIN_TOKEN) or bind 127.0.0.1"
            )
        if self.otlp_endpoint is not None:
            traces_url(self.otlp_endpoint)
        NoiseRules(self.noise)
        try:
            normal_form(self.matchings)
            for path in self.selections:
                load_selection(path)
        except MalformedRequest as error:
            raise ScenarioError(f"--{error.message}") from error

    @property
    def needs_keys(self) -> bool:
        """True if a model call needs the key of its session."""
        return bool(self.admin_token) and not self.open_paths
