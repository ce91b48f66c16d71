"""The decisions of the operator of a session server."""

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
    """Settings of one server; the defaults suit a machine of one's own."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    public_url: str | None = None
    """The beginning of a session's `base_url`, where agents reach the server by another name. Of a front: with the port
    of the session's shard in the place of its own."""
    admin_token: str | None = field(default=None, repr=False)
    """Required from whoever creates, reads, drains or deletes sessions. None: whoever reaches the server may do
    everything, which only suits a loopback address where nobody but its owner can ask."""
    open_paths: bool = False
    """The address of a session is enough for its model calls, for agents that send no key. Without an admin token it
    always is."""
    pause_timeout_s: float = 600.0
    """How long a paused gate holds a request before it answers 503."""
    drain_grace_s: float = 20.0
    """How long a turn in flight may go on after a drain. An engine that has not handed it over by then is not waited
    for: the turn is ABORTED with what has arrived, and answered 404."""
    stop_grace_s: float = 5.0
    """How long turns in flight may go on when the server is told to end; the rest waits on disk for the next server."""
    comment_every_s: float = 5.0
    """How long a streamed answer waits before it begins with an event that keeps it alive, and between two of them."""
    streaming: StreamingMode = StreamingMode.RECORDED
    """When the text of streamed answers goes out, in sessions that do not say it themselves."""
    write_timeout_s: float = 60.0
    """How long an answer may wait for a client that takes nothing of it; then the client counts as one that left."""
    engine_attempts: int = 3
    """How often a request is sent to an engine that fails in a way that may pass."""
    engine_retry_s: float = 0.25
    """Before the second attempt; doubles with each further one."""
    max_unsolicited_aborts: int = 3
    """How often a turn is continued that the engine cut short and nobody asked it to; then it is ABORTED."""
    allow_forced_tokens: bool = False
    """Sessions may bring a script, whose words their turns say in the place of the model's; never trained."""
    score_inputs: bool = True
    """Have the first request after a weight update score the tokens before it; it has to read them anyway."""
    limits: RequestLimits = DEFAULT_LIMITS
    """How much one request may hold."""
    idle_ttl_s: float | None = None
    """After how long a session that nobody asks for is closed; None keeps it. `harness serve` says 24 hours."""
    idle_page_out_s: float | None = None
    """After how long a session that nobody asks for is kept by the store alone, until somebody does; None keeps it in
    memory. Needs a store in a file."""
    keep_closed_s: float | None = None
    """How long the store keeps the rows of a closed session; None for ever. `harness serve` says 30 days."""
    dialects: tuple[Dialect, ...] = DIALECTS
    """The APIs that agents may speak, each at its own route."""
    model: str | None = None
    """Model name in answers; None takes the engine's."""
    matchings: tuple[str, ...] = ()
    """`package.module:function` paths that sessions may choose for matching, besides the built-in ones."""
    selections: tuple[str, ...] = ()
    """`package.module:function` paths that sessions may choose their branches with (`samples.delivery`)."""
    otlp_endpoint: str | None = None
    """The OpenTelemetry collector, as `http://host:4318`, that gets a span for each session, turn and engine request
    (OTLP over HTTP); None sends none. `OTEL_EXPORTER_OTLP_HEADERS` of the environment has the headers."""
    shard: ShardPlace | None = None
    """The place of this server among those of a front; None for one that stands alone."""
    noise: tuple[str, ...] = (BILLING_HEADER,)
    """Regular expressions of what is taken out at the beginning of a conversation's first message."""
    repeat_guard: RepeatTerminateConfig | None = None
    """The repeat guard that the engine must run; None takes that of the environment (`HARNESS_REPEAT_TERMINATE_*`)."""

    def check(self) -> None:
        """Raises `ScenarioError`.

        For a server open to the network without a token, a matching, a noise or a collector that is none, a number that
        cannot be meant.
        """
        self.limits.check_numbers()
        for name in _SECONDS:
            seconds = getattr(self, name)
            least = 0.0 if name in _MAY_BE_ZERO else _SHORTEST_S
            if seconds is not None and not least <= seconds <= _LONGEST_S:  # no comparison holds for a NaN
                raise ScenarioError(f"{name}: expected {least:g}..{_LONGEST_S:g} seconds, got {seconds}")
        try:
            is_loopback = self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name of whatever
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
        """Whether a model call needs the key of its session."""
        return bool(self.admin_token) and not self.open_paths
