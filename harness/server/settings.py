"""Operator settings of a session server."""

import ipaddress
from dataclasses import dataclass, field

from harness.dialects.dialect import DIALECTS, Dialect
from harness.dialects.prompt_noise import BILLING_HEADER, NoiseRules
from harness.dialects.request_limits import DEFAULT_LIMITS, RequestLimits
from harness.engines.teachers import TeacherSpec, check_teachers
from harness.errors import MalformedRequest, ScenarioError
from harness.samples.delivery import load_selection
from harness.server.telemetry.tracing.collector import check_collector
from harness.sessions.session_config import StreamingMode
from harness.sessions.shard_ids import ShardPlace
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
    """Settings whose defaults suit a private machine."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free port."""
    public_url: str | None = None
    """Start of session URLs, if agents reach the server by another name. A front replaces its port with the shard's."""
    admin_token: str | None = field(default=None, repr=False)
    """Required to create, read, drain or delete sessions. None lets every client do everything."""
    open_paths: bool = False
    """Model calls need no key, only the session's address. Always so without an admin token."""
    pause_timeout_s: float = 600.0
    """Longest wait of a request at a paused gate, before it is answered 503."""
    drain_grace_s: float = 20.0
    """Seconds for turns in flight after a drain. Then they are ABORTED with the tokens so far, and answered 404."""
    stop_grace_s: float = 5.0
    """Seconds that turns in flight may continue when the server stops. The next server continues the rest."""
    comment_every_s: float = 5.0
    """Interval of keep-alive events in a streamed answer."""
    streaming: StreamingMode = StreamingMode.RECORDED
    """Default streaming mode of sessions."""
    write_timeout_s: float = 60.0
    """Seconds without a read after which a client counts as disconnected."""
    engine_attempts: int = 3
    """Attempts per request if the engine's error is retryable."""
    engine_retry_s: float = 0.25
    """Seconds before the second attempt; doubles each time."""
    max_unsolicited_aborts: int = 3
    """Unexplained engine aborts that a turn survives. The next one leaves it ABORTED."""
    allow_forced_tokens: bool = False
    """Lets sessions bring a script that replaces the model's output. Scripted tokens are never trained."""
    score_inputs: bool = True
    """Let the first request after a weight update score the tokens before it, which it reads anyway."""
    limits: RequestLimits = DEFAULT_LIMITS
    idle_ttl_s: float | None = None
    """Idle seconds before a session is closed; None keeps it. `harness serve` sets 24 hours."""
    idle_page_out_s: float | None = None
    """Idle seconds before a session is evicted from memory; None keeps it there. Needs a store in a file."""
    keep_closed_s: float | None = None
    """Seconds that the store keeps a closed session; None keeps it forever. `harness serve` sets 30 days."""
    dialects: tuple[Dialect, ...] = DIALECTS
    """APIs for agents, each at its own route."""
    model: str | None = None
    """Model name in answers; None uses the engine's."""
    matchings: tuple[str, ...] = ()
    """Extra `package.module:function` paths that sessions may choose for matching."""
    selections: tuple[str, ...] = ()
    """Extra `package.module:function` paths that sessions may choose for selecting branches (`samples.delivery`)."""
    otlp_endpoint: str | None = None
    """OTLP collector for spans, as `http://host:4318`. `OTEL_EXPORTER_OTLP_HEADERS` has its headers."""
    shard: ShardPlace | None = None
    """Position among the shards of a front, if any."""
    noise: tuple[str, ...] = (BILLING_HEADER,)
    """Regular expressions to remove from the start of a conversation."""
    repeat_guard: RepeatTerminateConfig | None = None
    """Repeat guard that the engine must run; None reads `HARNESS_REPEAT_TERMINATE_*`."""
    teachers: tuple[TeacherSpec, ...] = ()
    """Engines that score sampled tokens."""

    def check(self) -> None:
        """Validate the settings. Raises `ScenarioError`."""
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
                f"refusing to bind {self.host} without an admin token: any client could create and read sessions;"
                " give it one (--admin-token, HARNESS_ADMIN_TOKEN) or bind 127.0.0.1"
            )
        if self.public_url is not None and not self.public_url.startswith(("http://", "https://")):
            raise ScenarioError(f"public_url: expected an address that begins with http(s)://, got {self.public_url!r}")
        if self.otlp_endpoint is not None:
            check_collector(self.otlp_endpoint)
        NoiseRules(self.noise)
        check_teachers(self.teachers)
        for teacher in self.teachers:
            teacher.check_files()
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
