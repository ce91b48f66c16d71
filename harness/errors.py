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

Each class states who is to blame (`cause`), the HTTP answer (`status`, `code`), whether the same request may succeed
later (`retryable`), and whether earlier tokens may be trained (`trainable`). Messages say what was expected, what was
seen and what to do next. Agents read only messages about their own request. Others name addresses and files, so agents
get `told` instead.
"""

from enum import StrEnum

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


class HarnessError(Exception):
    """Base class of every deliberate harness error."""

    cause: Cause = Cause.HARNESS
    status: int = 500
    code: str = "internal_error"
    retryable: bool = False
    trainable: bool = False
    told: str = "the server failed; its log says how"
    """Text for agents in place of the message; empty if the message is about their own request."""

    @property
    def message(self) -> str:
        """Text for the operator."""
        return str(self.args[0]) if self.args else type(self).__name__

    @property
    def message_to_agents(self) -> str:
        """Text for agents, without addresses, files or other parties' data."""
        return self.told or self.message


class RequestError(HarnessError):
    """The request cannot be served as it is; nothing was changed.

    `param` is the path of the offending field (`messages[2].role`), if one field is at fault. The message may quote the
    request, so it is cut: it goes into answers and logs.
    """

    cause = Cause.AGENT
    status = 400
    code = "invalid_request"
    told = ""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}…")
        self.param = param


class MalformedRequest(RequestError):
    """Invalid JSON, a wrong type, an unknown role or an unsupported option."""


class EncodingRefused(RequestError):
    """The server does not support this `content-encoding`."""

    status = 415
    code = "encoding_refused"


class OverLimit(RequestError):
    """The request exceeds an operator limit, named by `limit`."""

    code = "over_limit"

    def __init__(self, message: str, *, limit: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.limit = limit


class BodyTooLarge(OverLimit):
    """The request body exceeds the server's limit."""

    status = 413
    code = "body_too_large"


class HeadersTooLarge(OverLimit):
    """The request headers exceed the server's limits."""

    status = 431
    code = "headers_too_large"


class TooSlow(OverLimit):
    """The client sends its request, or reads the answer, too slowly."""

    status = 408
    code = "too_slow"
    retryable = True


class TooMany(OverLimit):
    """Too many concurrent sessions, or calls of one session."""

    status = 429
    code = "too_many"
    retryable = True
    retry_after_s = 1


class PromptTooLong(RequestError):
    """The prompt does not fit into the model's context.

    Dialects phrase it so that their clients shorten the conversation. `tokens` is a lower bound.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, *, tokens: int, context_length: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.context_length = context_length


class Unauthorized(RequestError):
    """The admin token or session key is missing or wrong."""

    status = 401
    code = "unauthorized"


class StrayRefused(RequestError):
    """The session refuses calls of programs other than its agent."""

    cause = Cause.AGENT
    status = 403
    code = "stray_refused"


class ScriptRefused(RequestError):
    """The session has a script, but scripts are disabled or the engine cannot force tokens."""

    cause = Cause.SCENARIO
    status = 403
    code = "script_refused"


class RouteNotFound(RequestError):
    """No such route; answered as JSON because agents parse it."""

    status = 404
    code = "route_not_found"


class ResponseNotFound(RequestError):
    """The session has no answer with this id."""

    status = 404
    code = "response_not_found"

    def __init__(self, response_id: str, *, param: str | None = None) -> None:
        super().__init__(f"no answer of this session has the id {response_id[:64]!r}", param=param)


class PreviousResponseNotFound(ResponseNotFound):
    """The request continues an answer that the session does not have."""

    status = 400
    code = "previous_response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(response_id, param="previous_response_id")


class MethodNotAllowed(RequestError):
    """The route does not support the method."""

    status = 405
    code = "method_not_allowed"


class UpgradeRefused(RequestError):
    """WebSockets are unsupported; clients that can use HTTP retry at once."""

    status = 426
    code = "upgrade_refused"


class Misdirected(RequestError):
    """Wrong server: the front serves the gate, a shard the model calls of its sessions."""

    status = 421
    code = "misdirected"


class HoldNotFound(RequestError):
    """The holder has no hold on the gate, or released it already."""

    status = 404
    code = "hold_not_found"

    def __init__(self, holder: str) -> None:
        super().__init__(
            f"{holder!r} has no hold on this gate: it was released before, or never placed", param="holder"
        )


class HoldExpired(RequestError):
    """The hold ran out before its holder renewed it, so the gate was open meanwhile."""

    status = 409
    code = "hold_expired"

    def __init__(self, holder: str) -> None:
        super().__init__(
            f"the hold of {holder!r} ran out, and what it kept shut has been open since; begin anew with another"
            " holder, renew it in time, or ask for a longer ttl_s",
            param="holder",
        )


class EnginesHeld(RequestError):
    """Another hold has paused the engines; retry when it ends."""

    status = 409
    code = "engines_held"
    retryable = True


class TurnRefused(HarnessError):
    """The session will never serve this turn.

    404 with `x-should-retry: false` is the only answer that ended every measured client within seconds.
    """

    cause = Cause.LIMIT
    status = 404
    code = "turn_refused"
    trainable = True
    told = ""


class SessionNotFound(TurnRefused):
    """The server never issued the id, or the session was deleted."""

    cause = Cause.AGENT
    code = "session_not_found"
    trainable = False


class SessionDamaged(TurnRefused):
    """The store cannot read the session back; other sessions are unaffected."""

    cause = Cause.HARNESS
    code = "session_damaged"
    trainable = False
    told = "the session cannot be read back from the store; the server's log says why"


class SessionClosing(TurnRefused):
    """The session was drained or closed; it accepts no further turn."""

    code = "session_closed"


class TurnAborted(TurnRefused):
    """The engine aborted this turn; its partial output is recorded, never served as complete (I2)."""

    cause = Cause.ENGINE
    code = "turn_aborted"


class BranchEnded(TurnRefused):
    """The branch's last turn is not COMPLETED, so no later turn could be trained."""

    code = "branch_ended"


class InheritanceEnded(TurnRefused):
    """A strict heir got a request that its inherited record does not have."""

    cause = Cause.AGENT
    code = "inheritance_ended"
    trainable = False


class LimitReached(TurnRefused):
    """A limit of the session (turns, tokens, staleness) is used up."""

    code = "limit_reached"


class ScriptEnded(LimitReached):
    """The branch has used every step of the session's script."""

    code = "script_ended"


class GateClosed(HarnessError):
    """The server accepts no new work; retry after `retry_after_s`."""

    status = 503
    code = "gate_closed"
    retryable = True
    told = ""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerBusy(HarnessError):
    """Too many large requests wait to be read and encoded; the server kept nothing of this one."""

    status = 503
    code = "server_busy"
    retryable = True
    told = ""
    retry_after_s = 1


class ServerStopping(GateClosed):
    """The server shuts down; with a durable store, the next one continues the request."""

    code = "server_stopping"

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=2)


class ShardUnavailable(HarnessError):
    """The session's shard does not answer; it restarts on the same store and port."""

    status = 503
    code = "shard_unavailable"
    retryable = True
    told = "a part of the server is being started again; ask again later"


class ShardLost(ShardUnavailable):
    """The shard ended before it answered; the request may have taken effect."""

    status = 502
    code = "shard_lost"


class AnswerChanged(HarnessError):
    """The recorded turn differs from its stream (text, tokens or id).

    The turn is recorded and undelivered, so a retry gets it.
    """

    status = 503
    code = "answer_changed"
    retryable = True
    told = "the answer is not the one that has begun; ask again"


class ClientLeft(HarnessError):
    """The client closed its connection before the answer; sampled tokens wait for its retry (I5)."""

    cause = Cause.AGENT
    status = 499
    code = "client_left"
    retryable = True
    told = ""


class EngineError(HarnessError):
    """The engine failed; a retry may succeed unless a subclass says otherwise."""

    cause = Cause.ENGINE
    status = 502
    code = "engine_error"
    retryable = True
    told = "the engine failed; the server's log says how"
    may_have_sampled: bool = True
    """True if the engine may have sampled tokens that it did not return (I4)."""


class EngineUnavailable(EngineError):
    """The engine is unreachable, not ready or overloaded."""

    status = 503
    code = "engine_unavailable"
    may_have_sampled = False
    told = "no engine can be reached, or it takes no requests now; ask again later"


class EngineConnectionLost(EngineError):
    """The connection broke during a generation."""

    code = "engine_connection_lost"
    told = "the engine went away in the middle of a generation"


class EngineRejected(EngineError):
    """The engine refused the request; a retry cannot help."""

    status = 400
    code = "engine_rejected"
    retryable = False
    may_have_sampled = False
    told = "the engine refused the request; the server's log has its words"


class EngineReplyInvalid(EngineError):
    """The engine's answer contradicts itself or the request."""

    code = "engine_reply_invalid"
    retryable = False


class TokenizerMismatch(EngineError):
    """The engine's tokenizer differs from the sessions'."""

    code = "tokenizer_mismatch"
    retryable = False


class UnknownWeightVersion(EngineError):
    """The engine reported a weight version that is not a policy version."""

    code = "unknown_weight_version"
    retryable = False


class WeightsUnsettled(EngineUnavailable):
    """A weight update runs or broke off; the engine samples again after one succeeds."""

    code = "weights_unsettled"


class IllegalTransition(HarnessError):
    """The lifecycle table does not allow this command in this phase; nothing changed."""

    code = "illegal_transition"


class LedgerImbalance(HarnessError):
    """A bug: generated tokens differ from trained + masked + dropped."""

    code = "ledger_imbalance"


class StoreError(HarnessError):
    """The session store cannot make a turn durable, so the turn is not acknowledged."""

    status = 503
    code = "store_failed"
    retryable = True
    told = "the turn could not be made durable; ask again later"


class StoreFull(StoreError):
    """No space left on the store's device."""

    code = "store_full"


class SessionExists(StoreError):
    """The store already has a session, open or closed, with the chosen id."""

    status = 400
    code = "session_exists"
    retryable = False
    told = "session_id: there was a session of this id; choose another"


class TokenizerError(HarnessError):
    """The tokenizer or chat template cannot be loaded or used."""

    cause = Cause.SCENARIO
    code = "tokenizer_error"


class ModelError(HarnessError):
    """Model weights cannot be fetched, verified, converted or loaded."""

    cause = Cause.SCENARIO
    code = "model_error"


class UnknownModel(ModelError):
    """The name, hub id or folder is not a model."""

    code = "unknown_model"


class CannotListen(HarnessError):
    """The server address is taken, or not on this machine."""

    code = "cannot_listen"


class LaneError(HarnessError):
    """A local SGLang or vLLM server is unknown, or cannot be installed or started."""

    cause = Cause.ENGINE
    code = "lane_error"


class AgentError(HarnessError):
    """An agent program cannot be prepared or started."""

    cause = Cause.AGENT
    code = "agent_error"


class SandboxFailed(HarnessError):
    """A sandbox cannot be made, was killed by its limits, or cannot be removed; its agent is not to blame."""

    code = "sandbox_failed"


class AdapterError(HarnessError):
    """A framework setting is unsupported, or the framework's interface differs."""

    cause = Cause.SCENARIO
    code = "adapter_error"


class ScenarioError(HarnessError):
    """A scenario file, its check or a reward is wrong."""

    cause = Cause.SCENARIO
    code = "scenario_error"


class RunError(HarnessError):
    """A run directory cannot be created, read or resumed."""

    cause = Cause.SCENARIO
    code = "run_error"


class SessionServerError(HarnessError):
    """The session server was unreachable, or answered with an error.

    `status` is 0 without an answer. `was_refused` guarantees that the server's state is unchanged: it was never
    reached, or answered 503.
    """

    code = "session_server_error"

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


class SegmentError(HarnessError):
    """A segment cannot be trained or does not fit a pack; change its encoder or `packing_length`."""

    cause = Cause.SCENARIO
    code = "segment_error"


class StepError(HarnessError):
    """A step cannot be planned, or used up its bounds on attempts and dropped groups."""

    cause = Cause.SCENARIO
    code = "step_error"


class LearnerError(HarnessError):
    """A step cannot be trained, or the learner's weights or state cannot be saved or loaded."""

    cause = Cause.SCENARIO
    code = "learner_error"
