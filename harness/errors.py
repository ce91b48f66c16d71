"""Errors that the harness raises on purpose, as one tree.

    HarnessError
    ├── RequestError                    unservable request; state unchanged
    │   ├── MalformedRequest
    │   ├── OverLimit
    │   │   ├── BodyTooLarge
    │   │   ├── HeadersTooLarge
    │   │   ├── TooSlow
    │   │   └── TooMany
    │   ├── PromptTooLong
    │   ├── Unauthorized
    │   ├── ScriptRefused
    │   ├── StrayRefused
    │   ├── RouteNotFound
    │   ├── ResponseNotFound
    │   │   └── PreviousResponseNotFound
    │   ├── MethodNotAllowed
    │   ├── EncodingRefused
    │   ├── UpgradeRefused
    │   ├── Misdirected
    │   ├── HoldNotFound
    │   ├── HoldExpired
    │   └── EnginesHeld
    ├── TurnRefused                     terminal for the agent
    │   ├── SessionNotFound
    │   ├── SessionDamaged
    │   ├── SessionClosing
    │   ├── TurnAborted
    │   ├── BranchEnded
    │   ├── InheritanceEnded
    │   └── LimitReached
    │       └── ScriptEnded
    ├── GateClosed
    │   └── ServerStopping
    ├── ServerBusy
    ├── ShardUnavailable
    │   └── ShardLost
    ├── AnswerChanged
    ├── ClientLeft
    ├── EngineError                     received tokens are in the ledger
    │   ├── EngineUnavailable
    │   │   └── WeightsUnsettled
    │   ├── EngineConnectionLost
    │   ├── EngineRejected
    │   ├── EngineReplyInvalid
    │   ├── TokenizerMismatch
    │   └── UnknownWeightVersion
    ├── IllegalTransition
    ├── LedgerImbalance
    ├── StoreError
    │   ├── StoreFull
    │   └── SessionExists
    ├── TokenizerError
    ├── ModelError
    │   └── UnknownModel
    ├── SessionServerError
    ├── CannotListen
    ├── LaneError
    ├── AgentError
    ├── SandboxFailed
    ├── AdapterError
    ├── ScenarioError
    ├── RunError
    ├── SegmentError
    ├── StepError
    └── LearnerError

The head of each class states the HTTP answer (`code`, `status`), who is to blame (`cause`) and whether the same request
may succeed later (`retryable`); a class inherits the rest. Messages say what was expected, what was seen and what to do
next. Agents read only messages about their own request. Others name addresses and files, so agents get `told` instead.
"""

from enum import StrEnum
from typing import TypedDict, Unpack

_LONGEST_MESSAGE = 500  # characters of what a client gets to read about its own request


class Cause(StrEnum):
    """Party that has to change something before a retry can succeed."""

    AGENT = "agent"
    """Agent program or its client library."""
    ENGINE = "engine"
    """Inference engine, or the network to it."""
    HARNESS = "harness"
    """This project or its machine."""
    LIMIT = "limit"
    """A configured limit; no party is at fault."""
    SCENARIO = "scenario"
    """Author of a scenario, check or command line."""


class _Facts(TypedDict, total=False):
    code: str
    cause: Cause
    status: int
    retryable: bool
    may_have_sampled: bool
    told: str


class HarnessError(Exception):
    """Base class of every deliberate harness error."""

    cause: Cause = Cause.HARNESS
    status: int = 500
    code: str = "internal_error"
    retryable: bool = False
    told: str = "the server failed; see its log"
    """Text for agents in place of the message; empty if the message is about their own request."""

    def __init_subclass__(cls, **facts: Unpack[_Facts]) -> None:
        for name, fact in facts.items():
            setattr(cls, name, fact)

    @property
    def message(self) -> str:
        """Text for the operator."""
        return str(self.args[0]) if self.args else type(self).__name__

    @property
    def message_to_agents(self) -> str:
        """Text for agents, without addresses, files or other parties' data."""
        return self.told or self.message


class RequestError(HarnessError, code="invalid_request", cause=Cause.AGENT, status=400, told=""):
    """The request cannot be served as it is; nothing was changed.

    `param` is the path of the offending field (`messages[2].role`), if one field is at fault. The message may quote the
    request, so it is cut: it goes into answers and logs.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}…")
        self.param = param


class MalformedRequest(RequestError):
    """Invalid JSON, a wrong type, an unknown role or an unsupported option."""


class EncodingRefused(RequestError, code="encoding_refused", status=415):
    """The server does not support this `content-encoding`."""


class OverLimit(RequestError, code="over_limit"):
    """The request exceeds an operator limit, named by `limit`."""

    def __init__(self, message: str, *, limit: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.limit = limit


class BodyTooLarge(OverLimit, code="body_too_large", status=413):
    """The request body exceeds the server's limit."""


class HeadersTooLarge(OverLimit, code="headers_too_large", status=431):
    """The request headers exceed the server's limits."""


class TooSlow(OverLimit, code="too_slow", status=408, retryable=True):
    """The client sends its request, or reads the answer, too slowly."""


class TooMany(OverLimit, code="too_many", status=429, retryable=True):
    """Too many concurrent sessions, or calls of one session."""

    retry_after_s = 1


class PromptTooLong(RequestError, code="context_length_exceeded"):
    """The prompt does not fit into the context; clients shorten the conversation. `tokens` is a lower bound."""

    def __init__(self, message: str, *, tokens: int, context_length: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.context_length = context_length


class Unauthorized(RequestError, code="unauthorized", status=401):
    """The admin token or session key is missing or wrong."""


class StrayRefused(RequestError, code="stray_refused", cause=Cause.AGENT, status=403):
    """The session refuses calls of programs other than its agent."""


class ScriptRefused(RequestError, code="script_refused", cause=Cause.SCENARIO, status=403):
    """The session has a script, but scripts are disabled or the engine cannot force tokens."""


class RouteNotFound(RequestError, code="route_not_found", status=404):
    """No such route; answered as JSON because agents parse it."""


class ResponseNotFound(RequestError, code="response_not_found", status=404):
    """The session has no answer with this id."""

    def __init__(self, response_id: str, *, param: str | None = None) -> None:
        super().__init__(f"no answer of this session has the id {response_id[:64]!r}", param=param)


class PreviousResponseNotFound(ResponseNotFound, code="previous_response_not_found", status=400):
    """The request continues an answer that the session does not have."""

    def __init__(self, response_id: str) -> None:
        super().__init__(response_id, param="previous_response_id")


class MethodNotAllowed(RequestError, code="method_not_allowed", status=405):
    """The route does not support the method."""


class UpgradeRefused(RequestError, code="upgrade_refused", status=426):
    """WebSockets are unsupported; clients that can use HTTP retry at once."""


class Misdirected(RequestError, code="misdirected", status=421):
    """Wrong server: the front serves the gate, a shard the model calls of its sessions."""


class HoldNotFound(RequestError, code="hold_not_found", status=404):
    """The holder has no hold on the gate, or released it already."""

    def __init__(self, holder: str) -> None:
        super().__init__(
            f"{holder!r} has no hold on this gate: it was released before, or never placed", param="holder"
        )


class HoldExpired(RequestError, code="hold_expired", status=409):
    """The hold ran out before its holder renewed it, so the gate was open meanwhile."""

    def __init__(self, holder: str) -> None:
        super().__init__(
            f"the hold of {holder!r} expired, and what it kept closed has been open since; start over with another"
            " holder, renew it in time, or set a longer ttl_s",
            param="holder",
        )


class EnginesHeld(RequestError, code="engines_held", status=409, retryable=True):
    """Another hold has paused the engines; retry when it ends."""


class TurnRefused(HarnessError, code="turn_refused", cause=Cause.LIMIT, status=404, told=""):
    """The session will never serve this turn. Only 404 with `x-should-retry: false` ends every client in seconds."""


class SessionNotFound(TurnRefused, code="session_not_found", cause=Cause.AGENT):
    """The server never issued the id, or the session was deleted."""


class SessionDamaged(TurnRefused, code="session_damaged", cause=Cause.HARNESS):
    """The store cannot read the session back; other sessions are unaffected."""

    told = "the session cannot be read back from the store; see the server's log"


class SessionClosing(TurnRefused, code="session_closed"):
    """The session was drained or closed; it accepts no further turn."""


class TurnAborted(TurnRefused, code="turn_aborted", cause=Cause.ENGINE):
    """The engine aborted this turn; its partial output is recorded, never served as complete (I2)."""


class BranchEnded(TurnRefused, code="branch_ended"):
    """The branch's last turn is not COMPLETED, so no later turn could be trained."""


class InheritanceEnded(TurnRefused, code="inheritance_ended", cause=Cause.AGENT):
    """A strict heir got a request that its inherited record does not have."""


class LimitReached(TurnRefused, code="limit_reached"):
    """A limit of the session (turns, tokens, staleness) is used up."""


class ScriptEnded(LimitReached, code="script_ended"):
    """The branch has used every step of the session's script."""


class GateClosed(HarnessError, code="gate_closed", status=503, retryable=True, told=""):
    """The server accepts no new work; retry after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerBusy(HarnessError, code="server_busy", status=503, retryable=True, told=""):
    """Too many large requests wait, or too many rows are in flight; the server kept nothing of it."""

    retry_after_s = 1


class ServerStopping(GateClosed, code="server_stopping"):
    """The server shuts down; with a durable store, the next one continues the request."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=2)


class ShardUnavailable(HarnessError, code="shard_unavailable", status=503, retryable=True):
    """The session's shard does not answer; it restarts on the same store and port."""

    told = "a part of the server is restarting; retry later"


class ShardLost(ShardUnavailable, code="shard_lost", status=502):
    """The shard ended before it answered; the request may have taken effect."""


class AnswerChanged(HarnessError, code="answer_changed", status=503, retryable=True):
    """The recorded turn differs from its stream (text, tokens or id). It is undelivered, so a retry gets it."""

    told = "the answer differs from the one that was started; retry"


class ClientLeft(HarnessError, code="client_left", cause=Cause.AGENT, status=499, retryable=True, told=""):
    """The client closed its connection before the answer; sampled tokens wait for its retry (I5)."""


class EngineError(HarnessError, code="engine_error", cause=Cause.ENGINE, status=502, retryable=True):
    """The engine failed; a retry may succeed unless a subclass says otherwise."""

    may_have_sampled: bool = True
    """True if the engine may have sampled tokens that it did not return (I4)."""

    told = "the engine failed; see the server's log"


class EngineUnavailable(EngineError, code="engine_unavailable", status=503, may_have_sampled=False):
    """The engine is unreachable, not ready or overloaded."""

    told = "no engine is reachable, or none accepts requests now; retry later"


class EngineConnectionLost(EngineError, code="engine_connection_lost"):
    """The connection broke during a generation."""

    told = "the connection to the engine was lost during generation"


class EngineRejected(EngineError, code="engine_rejected", status=400, retryable=False, may_have_sampled=False):
    """The engine refused the request; a retry cannot help."""

    told = "the engine refused the request; see the server's log"


class EngineReplyInvalid(EngineError, code="engine_reply_invalid", retryable=False):
    """The engine's answer contradicts itself or the request."""


class TokenizerMismatch(EngineError, code="tokenizer_mismatch", retryable=False):
    """The engine's tokenizer differs from the sessions'."""


class UnknownWeightVersion(EngineError, code="unknown_weight_version", retryable=False):
    """The engine reported a weight version that is not a policy version."""


class WeightsUnsettled(EngineUnavailable, code="weights_unsettled"):
    """A weight update runs or broke off; the engine samples again after one succeeds."""


class IllegalTransition(HarnessError, code="illegal_transition"):
    """The lifecycle table does not allow this command in this phase; nothing changed."""


class LedgerImbalance(HarnessError, code="ledger_imbalance"):
    """A bug: generated tokens differ from trained + masked + dropped."""


class StoreError(HarnessError, code="store_failed", status=503, retryable=True):
    """The session store cannot make a turn durable, so the turn is not acknowledged."""

    told = "the turn could not be stored; retry later"


class StoreFull(StoreError, code="store_full"):
    """No space left on the store's device."""


class SessionExists(StoreError, code="session_exists", status=400, retryable=False):
    """The store already has a session, open or closed, with the chosen id."""

    told = "session_id: an earlier session had this id; choose another"


class TokenizerError(HarnessError, code="tokenizer_error", cause=Cause.SCENARIO):
    """The tokenizer or chat template cannot be loaded or used."""


class ModelError(HarnessError, code="model_error", cause=Cause.SCENARIO):
    """Model weights cannot be fetched, verified, converted or loaded."""


class UnknownModel(ModelError, code="unknown_model"):
    """The name, hub id or folder is not a model."""


class CannotListen(HarnessError, code="cannot_listen"):
    """The server address is taken, or not on this machine."""


class LaneError(HarnessError, code="lane_error", cause=Cause.ENGINE):
    """A local SGLang or vLLM server is unknown, or cannot be installed or started."""


class AgentError(HarnessError, code="agent_error", cause=Cause.AGENT):
    """An agent program cannot be prepared or started."""


class SandboxFailed(HarnessError, code="sandbox_failed"):
    """A sandbox cannot be made, was killed by its limits, or cannot be removed; its agent is not to blame."""


class AdapterError(HarnessError, code="adapter_error", cause=Cause.SCENARIO):
    """A framework setting is unsupported, or the framework's interface differs."""


class ScenarioError(HarnessError, code="scenario_error", cause=Cause.SCENARIO):
    """A scenario file, its check or a reward is wrong."""


class RunError(HarnessError, code="run_error", cause=Cause.SCENARIO):
    """A run directory cannot be created, read or resumed."""


class SessionServerError(HarnessError, code="session_server_error"):
    """The session server was unreachable, or answered with an error.

    `status` is 0 without an answer. `was_refused` guarantees that the server's state is unchanged: it was never
    reached, or answered 503.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        code: str = "unreachable",
        was_refused: bool = False,
        retryable: bool = False,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.was_refused = was_refused
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class SegmentError(HarnessError, code="segment_error", cause=Cause.SCENARIO):
    """A segment cannot be trained or does not fit a pack; change its encoder or `packing_length`."""


class StepError(HarnessError, code="step_error", cause=Cause.SCENARIO):
    """A step cannot be planned, or used up its bounds on attempts and dropped groups."""


class LearnerError(HarnessError, code="learner_error", cause=Cause.SCENARIO):
    """A step cannot be trained, or the learner's weights or state cannot be saved or loaded."""
