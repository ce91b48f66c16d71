"""Model and tokenizer of an engine server: `/v1/models`, alike in SGLang and vLLM, and `/tokenize`.

With another tokenizer than the sessions' the engine would silently sample from other tokens, so a difference is an
error before the first turn. A server without that route or without a tokenizer is accepted uncompared.
"""

from http import HTTPStatus

import msgspec

from harness.engines.remote.http_client import EngineClient, HttpCall
from harness.errors import EngineReplyInvalid, TokenizerMismatch
from harness.machine.log import get_logger
from harness.tokens.tokenizer import Tokenizer

log = get_logger(__name__)

SESSION_SERVER = "session-harness"
"""Owner of models listed by a session server."""

_ANSWER_S = 30.0


class ServedModel(msgspec.Struct, frozen=True):
    """Entry of `/v1/models`."""

    id: str
    max_model_len: int = 0
    """Prompt plus output, in tokens; 0 if unknown."""
    root: str = ""
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[ServedModel]


async def find_model(client: EngineClient) -> ServedModel:
    """Return the server's first model; adapters come after it. Raises `EngineError`."""
    models = await client.get("/v1/models", _Models, deadline_s=_ANSWER_S)
    if not models.data:
        raise EngineReplyInvalid(f"{client.name} serves no model: expected one in /v1/models, got an empty list")
    model = models.data[0]
    if model.owned_by == SESSION_SERVER:
        raise EngineReplyInvalid(f"{client.name} is a session server: name the engine behind it")
    if not model.max_model_len:
        raise EngineReplyInvalid(f"{client.name} does not say how long a prompt may be: no max_model_len in /v1/models")
    return model


TEXTS = (
    "Hello, world!",
    "def f(x):\n    return x ** 2\n",
    "  spaces\t\tand\n\n\nlines  ",
    "1234567890 3.14",
    "Grüße, 日本語, Привет 🙂",
    "<|im_start|>user\nhi<|im_end|>\n",
)

_IDS_SHOWN = 8
_MOST_MARKERS = 8


class OtherEncoding(msgspec.Struct, frozen=True):
    """Text that the server encodes differently."""

    text: str
    ours: list[int]
    theirs: list[int]

    def __str__(self) -> str:
        return f"{self.text!r} is {_show(self.theirs)} there and {_show(self.ours)} here"


class _Tokens(msgspec.Struct):
    tokens: list[int]


def texts_to_compare(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return `TEXTS`, plus one with the tokenizer's own markers."""
    markers = sorted(tokenizer.markers)[:_MOST_MARKERS]
    return (*TEXTS, "x".join(markers)) if markers else TEXTS


async def find_difference(client: EngineClient, tokenizer: Tokenizer) -> OtherEncoding | None:
    """Return the first text that the server encodes differently. Raises `EngineError` if it does not tokenize."""
    for text in texts_to_compare(tokenizer):
        theirs, ours = (await client.call(_asking(text), _Tokens)).tokens, tokenizer.encode(text)
        if theirs != ours:
            return OtherEncoding(text, ours, theirs)
    return None


async def require_same_tokenizer(client: EngineClient, tokenizer: Tokenizer) -> None:
    """Raise `TokenizerMismatch` if the server encodes a text differently."""
    answer = await client.ask(_asking(TEXTS[0]))
    if answer.status != HTTPStatus.OK:
        log.info("tokenizer_not_compared", engine=client.name, status=answer.status)
        return
    found = await find_difference(client, tokenizer)
    if found is not None:
        raise TokenizerMismatch(
            f"{client.name} has another tokenizer: {found};"
            " name the folder of the model that it serves: --tokenizer, or ,tokenizer=FOLDER behind a --teacher"
        )


def _asking(text: str) -> HttpCall:
    return HttpCall("POST", "/tokenize", _ANSWER_S, {"prompt": text, "add_special_tokens": False})


def _show(ids: list[int]) -> str:
    return str(ids[:_IDS_SHOWN]) + "..." * (len(ids) > _IDS_SHOWN)
