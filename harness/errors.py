"""Every error the harness raises on purpose, as one tree.

    HarnessError
    ├── RequestError               the client sent something that cannot be served; state unchanged
    │   ├── MalformedRequest       400, names the field
    │   ├── OverLimit              400, names the limit: `over_limit`
    │   │   ├── BodyTooLarge       413
    │   │   ├── HeadersTooLarge    431
    │   │   ├── TooSlow            408, it did not arrive in time
    │   │   └── TooMany            429 + Retry-After, too much at one time
    │   ├── PromptTooLong          400, `context_length_exceeded`
    │   ├── Unauthorized           401
    │   ├── ScriptRefused          403, a script where tokens may not be forced, or cannot be
    │   ├── StrayRefused           403, a call of another program than the agent, where those are refused
    │   ├── RouteNotFound          404
    │   ├── ResponseNotFound       404, no answer of the session has this id
    │   │   └── PreviousResponseNotFound   400, `previous_response_not_found`
    │   ├── MethodNotAllowed       405
    │   ├── EncodingRefused        415, a body that is packed in a way the server does not read
    │   ├── UpgradeRefused         426, a WebSocket
    │   ├── Misdirected            421, the front of shards cannot answer it: names the shard that can
    │   ├── HoldNotFound           404, nothing to release at the gate
    │   ├── HoldExpired            409, the hold ran out before its holder came back
    │   └── EnginesHeld            409, another hold has paused the engines
    ├── TurnRefused                terminal for the agent: 404 and `x-should-retry: false`
    │   ├── SessionNotFound        id never seen, or deleted
    │   ├── SessionDamaged         the store has it and cannot read it back
    │   ├── SessionClosing         drained or closed
    │   ├── TurnAborted            this turn was aborted; its partial output is recorded
    │   ├── BranchEnded            the branch's last turn is not COMPLETED
    │   └── LimitReached           turns or tokens of the session used up
    │       └── ScriptEnded        the branch has said every step of the session's script
    ├── GateClosed                 503 + Retry-After: draining, or paused for longer than allowed
    ├── ServerBusy                 503 + Retry-After: too much waits to be read and encoded
    │   └── ServerStopping         the server ends; the next one on its store goes on with the turn
    ├── ShardUnavailable           503, a shard of the server is being started again
    │   └── ShardLost              502, it ended before it answered
    ├── AnswerChanged              503: the turn is not what its stream has said; a retry gets it
    ├── ClientLeft                 499: nobody reads the answer; a retry goes on where the turn broke off
    ├── EngineError                the engine failed; what it handed over is in the ledger, the rest is `unknown`
    │   ├── EngineUnavailable      not reachable, not ready, overloaded
    │   │   └── WeightsUnsettled   an update of its weights is under way or broke off
    │   ├── EngineConnectionLost   died in the middle of a generation
    │   ├── EngineRejected         refused the request; a retry cannot help
    │   ├── EngineReplyInvalid     answered something that contradicts itself
    │   ├── TokenizerMismatch      has another tokenizer than the sessions
    │   └── UnknownWeightVersion   a version label that is not a policy version
    ├── IllegalTransition          a command the lifecycle table has no entry for; nothing changed
    ├── LedgerImbalance            generated != trained + masked + dropped: a bug of ours
    ├── StoreError                 the session store cannot make a turn durable
    │   ├── StoreFull              no space left on its device
    │   └── SessionExists          400, a chosen session id that was used before
    ├── TokenizerError             tokenizer or chat template cannot be loaded or is unusable
    ├── ModelError                 weights cannot be fetched, verified or converted
    │   └── UnknownModel           a name or a folder that is no model
    ├── SessionServerError         a session server was not reached, or answered with an error
    ├── CannotListen               an address that a server cannot answer at
    ├── LaneError                  an engine cannot be installed, started or found on this machine
    ├── AgentError                 an agent cannot be prepared or started
    ├── AdapterError               a setting of a framework that cannot be kept, or an interface that differs
    ├── ScenarioError              a scenario file or its check is wrong
    ├── RunError                   a run directory cannot be created or resumed
    ├── SegmentError               a segment that cannot be trained, or does not fit into a pack
    ├── StepError                  a step that cannot be planned as asked, or whose bounds are used up
    └── LearnerError               a step that cannot be trained, or weights and state that cannot be saved or loaded

Each class states who is to blame (`cause`), the HTTP answer (`status`, `code`), whether the same request may
succeed later (`retryable`), and whether tokens sampled before it may be trained (`trainable`). Messages say what
was expected, what was seen and what to do next. Those about the client's own request are the client's; those about
engines and stores name addresses and files, which are the operator's: agents read `told` instead.
"""

from enum import StrEnum

_LONGEST_MESSAGE = 500  # characters of what a client gets to read about its own request


class Cause(StrEnum):
    """The party that has to change something before the same thing can work."""

    AGENT = "agent"
    """The agent program, or the client library it uses."""
    ENGINE = "engine"
    """The inference engine, or the network to it."""
    HARNESS = "harness"
    """This project, or the machine it runs on."""
    LIMIT = "limit"
    """Nobody: a limit that was asked for has been reached."""
    SCENARIO = "scenario"
    """The author of a scenario, a check or a command line."""


class HarnessError(Exception):
    """Base of the tree; catch it to catch everything the harness raises on purpose."""

    cause: Cause = Cause.HARNESS
    status: int = 500
    code: str = "internal_error"
    retryable: bool = False
    trainable: bool = False
    told: str = "the server failed; its log says how"
    """Given to agents instead of the message; empty where the message is about what they did themselves."""

    @property
    def message(self) -> str:
        """The text given to the user, without the class name."""
        return str(self.args[0]) if self.args else type(self).__name__

    @property
    def message_to_agents(self) -> str:
        """The text given to an agent: no address, file or word of somebody else's is in it."""
        return self.told or self.message


class RequestError(HarnessError):
    """The request cannot be served as it is; nothing was changed.

    `param` is the path of the offending field (`messages[2].role`), None when no single field is at fault. The message
    may quote what was sent and is cut where it gets long: it goes into answers and logs.
    """

    cause = Cause.AGENT
    status = 400
    code = "invalid_request"
    told = ""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}…")
        self.param = param


class MalformedRequest(RequestError):
    """Not JSON, a wrong type, an unknown role, an option that is not offered."""


class EncodingRefused(RequestError):
    """The header `content-encoding` of a request names an encoding that the server does not read."""

    status = 415
    code = "encoding_refused"


class OverLimit(RequestError):
    """More of something than the operator allows in one request; `limit` is the name of that limit."""

    code = "over_limit"

    def __init__(self, message: str, *, limit: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.limit = limit


class BodyTooLarge(OverLimit):
    """The request body exceeds the server's limit."""

    status = 413
    code = "body_too_large"


class HeadersTooLarge(OverLimit):
    """The header lines of a request exceed the server's limits."""

    status = 431
    code = "headers_too_large"


class TooSlow(OverLimit):
    """A request, or the reader of an answer, takes longer than the server waits."""

    status = 408
    code = "too_slow"
    retryable = True


class TooMany(OverLimit):
    """More at one time than the operator allows: of sessions, or of calls of one session; for now."""

    status = 429
    code = "too_many"
    retryable = True
    retry_after_s = 1


class PromptTooLong(RequestError):
    """The prompt does not fit into the model's context.

    Dialects say so in the words that make their clients shorten the conversation: it has `tokens` at least, and
    `context_length` is the most.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, *, tokens: int, context_length: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.tokens = tokens
        self.context_length = context_length


class Unauthorized(RequestError):
    """The admin token or the session's key is missing or wrong."""

    status = 401
    code = "unauthorized"


class StrayRefused(RequestError):
    """A call of another program than the session's agent, and the session refuses those."""

    cause = Cause.AGENT
    status = 403
    code = "stray_refused"


class ScriptRefused(RequestError):
    """A session with a script where the operator does not allow it, or whose engine does not say what it is told to."""

    cause = Cause.SCENARIO
    status = 403
    code = "script_refused"


class RouteNotFound(RequestError):
    """No such route; answered as JSON because agents parse it."""

    status = 404
    code = "route_not_found"


class ResponseNotFound(RequestError):
    """No answer of the session has this id: it is another session's, or the turn has no answer."""

    status = 404
    code = "response_not_found"

    def __init__(self, response_id: str, *, param: str | None = None) -> None:
        super().__init__(f"no answer of this session has the id {response_id[:64]!r}", param=param)


class PreviousResponseNotFound(ResponseNotFound):
    """A request goes on from an answer that the session does not have."""

    status = 400
    code = "previous_response_not_found"

    def __init__(self, response_id: str) -> None:
        super().__init__(response_id, param="previous_response_id")


class MethodNotAllowed(RequestError):
    """The route exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class UpgradeRefused(RequestError):
    """A WebSocket is asked for; clients that can do without one ask again by HTTP, at once."""

    status = 426
    code = "upgrade_refused"


class Misdirected(RequestError):
    """Somebody else answers this: a shard serves the model calls of its sessions, its front turns its gate."""

    status = 421
    code = "misdirected"


class HoldNotFound(RequestError):
    """The holder has no hold on the gate: it never had one here, or released it already."""

    status = 404
    code = "hold_not_found"

    def __init__(self, holder: str) -> None:
        super().__init__(
            f"{holder!r} has no hold on this gate: it was released before, or never placed", param="holder"
        )


class HoldExpired(RequestError):
    """The hold ran out before its holder renewed it: what it kept shut has been open meanwhile."""

    status = 409
    code = "hold_expired"

    def __init__(self, holder: str) -> None:
        super().__init__(
            f"the hold of {holder!r} ran out, and what it kept shut has been open since; begin anew with another"
            " holder, renew it in time, or ask for a longer ttl_s",
            param="holder",
        )


class EnginesHeld(RequestError):
    """The engines are paused under the hold of somebody else; the same request may succeed when that one ends."""

    status = 409
    code = "engines_held"
    retryable = True


class TurnRefused(HarnessError):
    """The session will never serve this turn.

    Answered 404 with `x-should-retry: false`: the only answer that ended every measured client within seconds.
    """

    cause = Cause.LIMIT
    status = 404
    code = "turn_refused"
    trainable = True
    told = ""


class SessionNotFound(TurnRefused):
    """The id was never given out, or the session has been deleted."""

    cause = Cause.AGENT
    code = "session_not_found"
    trainable = False


class SessionDamaged(TurnRefused):
    """The session's rows in the store cannot be read back; it is kept aside, and the others are served."""

    cause = Cause.HARNESS
    code = "session_damaged"
    trainable = False
    told = "the session cannot be read back from the store; the server's log says why"


class SessionClosing(TurnRefused):
    """The session was drained or closed; it accepts no further turn."""

    code = "session_closed"


class TurnAborted(TurnRefused):
    """The engine aborted this turn; the partial output is recorded and never served as complete (I2)."""

    cause = Cause.ENGINE
    code = "turn_aborted"


class BranchEnded(TurnRefused):
    """The branch ends in a turn that is not COMPLETED; what follows it could never be trained."""

    code = "branch_ended"


class LimitReached(TurnRefused):
    """A limit of the session (turns, tokens) is used up."""

    code = "limit_reached"


class ScriptEnded(LimitReached):
    """Every step of the session's script has been said on this branch."""

    code = "script_ended"


class GateClosed(HarnessError):
    """The server takes no new work for now; `retry_after_s` says when to ask again."""

    status = 503
    code = "gate_closed"
    retryable = True
    told = ""

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerBusy(HarnessError):
    """Too many large requests wait to be read and encoded; nothing of this one was kept."""

    status = 503
    code = "server_busy"
    retryable = True
    told = ""
    retry_after_s = 1


class ServerStopping(GateClosed):
    """The server ends; with a durable store the same request goes on at the next one."""

    code = "server_stopping"

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after_s=2)


class ShardUnavailable(HarnessError):
    """The shard that has the session does not answer: it is being started again, on its store and its port."""

    status = 503
    code = "shard_unavailable"
    retryable = True
    told = "a part of the server is being started again; ask again later"


class ShardLost(ShardUnavailable):
    """The shard ended before it answered; nobody knows whether it did what was asked."""

    status = 502
    code = "shard_lost"


class AnswerChanged(HarnessError):
    """What a stream has said of a turn is not what is recorded: part was lost or read otherwise, or its id is another.

    The turn is recorded and undelivered, so the same request is answered with it.
    """

    status = 503
    code = "answer_changed"
    retryable = True
    told = "the answer is not the one that has begun; ask again"


class ClientLeft(HarnessError):
    """The client closed its connection before the answer; what was sampled waits for its retry (I5)."""

    cause = Cause.AGENT
    status = 499
    code = "client_left"
    retryable = True
    told = ""


class EngineError(HarnessError):
    """The engine failed; unless a subclass knows better, it may not fail the next time."""

    cause = Cause.ENGINE
    status = 502
    code = "engine_error"
    retryable = True
    told = "the engine failed; the server's log says how"
    may_have_sampled: bool = True
    """Tokens may have been sampled that were not handed over: nobody but the engine knows how many (I4)."""


class EngineUnavailable(EngineError):
    """The engine is not reachable, not ready or overloaded."""

    status = 503
    code = "engine_unavailable"
    may_have_sampled = False
    told = "no engine can be reached, or it takes no requests now; ask again later"


class EngineConnectionLost(EngineError):
    """The engine went away in the middle of a generation."""

    code = "engine_connection_lost"
    told = "the engine went away in the middle of a generation"


class EngineRejected(EngineError):
    """The engine refused the request; sending it again cannot help."""

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
    """The engine encodes text in another way than the sessions do."""

    code = "tokenizer_mismatch"
    retryable = False


class UnknownWeightVersion(EngineError):
    """The engine reported a weight version that is not a policy version."""

    code = "unknown_weight_version"
    retryable = False


class WeightsUnsettled(EngineUnavailable):
    """An update of the engine's weights is under way or broke off; nothing is sampled until one has succeeded."""

    code = "weights_unsettled"


class IllegalTransition(HarnessError):
    """A command arrived in a phase whose table row does not allow it; nothing changed."""

    code = "illegal_transition"


class LedgerImbalance(HarnessError):
    """Tokens were generated that are neither trained nor masked nor dropped, or the other way round."""

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
    """The store has a session of that id, closed perhaps; its turns stay its own."""

    status = 400
    code = "session_exists"
    retryable = False
    told = "session_id: there was a session of this id; choose another"


class TokenizerError(HarnessError):
    """The tokenizer or its chat template cannot be loaded, or is not usable for sessions."""

    cause = Cause.SCENARIO
    code = "tokenizer_error"


class ModelError(HarnessError):
    """Model weights cannot be fetched, verified, converted or loaded."""

    cause = Cause.SCENARIO
    code = "model_error"


class UnknownModel(ModelError):
    """A name, a hub id or a folder that is no model: somebody has to write another one."""

    code = "unknown_model"


class CannotListen(HarnessError):
    """The address of a server cannot be bound: it is taken, or not one of this machine."""

    code = "cannot_listen"


class LaneError(HarnessError):
    """A real engine cannot be installed or started on this machine, or there is none of that name."""

    cause = Cause.ENGINE
    code = "lane_error"


class AgentError(HarnessError):
    """An agent program cannot be prepared or started."""

    cause = Cause.AGENT
    code = "agent_error"


class AdapterError(HarnessError):
    """A setting of a framework that an adapter cannot keep, or a framework of another interface than expected."""

    cause = Cause.SCENARIO
    code = "adapter_error"


class ScenarioError(HarnessError):
    """A scenario file, its check, or a reward is wrong."""

    cause = Cause.SCENARIO
    code = "scenario_error"


class RunError(HarnessError):
    """A run directory cannot be created, read or resumed."""

    cause = Cause.SCENARIO
    code = "run_error"


class SessionServerError(HarnessError):
    """The session server was not reached, or answered with an error.

    `status` is that of the answer, 0 when there was none. `was_refused` says that nothing can have changed on the
    server: it was never reached, or it said 503.
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
    """A segment cannot be trained, or does not fit into a pack: its encoder or `packing_length` is to be changed."""

    cause = Cause.SCENARIO
    code = "segment_error"


class StepError(HarnessError):
    """A step cannot be planned as it was asked for, or its bounds of attempts and dropped groups are used up."""

    cause = Cause.SCENARIO
    code = "step_error"


class LearnerError(HarnessError):
    """A step cannot be trained, or the weights or the state of a learner cannot be written or read."""

    cause = Cause.SCENARIO
    code = "learner_error"
