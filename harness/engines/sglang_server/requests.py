"""Request bodies of SGLang's native routes. Pure.

Like SGLang 0.5.23, ignores unknown keys and refuses unknown sampling parameters. Known features that this server lacks
are refused, never ignored: fields declared as None, penalties that are not neutral.
"""

from typing import Annotated, Literal, TypeVar
from uuid import uuid4

import msgspec

from harness.decoding import read_json
from harness.engines.base import PauseMode
from harness.errors import EngineRejected
from harness.types import GenerationRequest, Json, SamplingParams, TokenIds, as_ids
from server_patch.force_tokens.script import read_script
from server_patch.repeat_terminate.signals import is_probe, prefix_length

_T = TypeVar("_T")

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

_ALL_TOKENS = -1
_NO_LOGPROBS = -1
PAUSES = {"abort": PauseMode.ABORT, "retract": PauseMode.KEEP, "in_place": PauseMode.KEEP}


class SGLangSampling(msgspec.Struct, forbid_unknown_fields=True):
    """`sampling_params`; parameters about text are accepted without effect."""

    max_new_tokens: Count = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = _ALL_TOKENS
    min_p: float = 0.0
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    sampling_seed: Seed | None = None
    min_new_tokens: Count = 0
    json_schema: str | None = None
    custom_params: Json | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: int = 1
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False

    def __post_init__(self) -> None:
        neutral = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "n": 1}
        for name, value in neutral.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name}: this server can only do {value}, got {getattr(self, name)}")
        if self.top_k < _ALL_TOKENS:
            raise ValueError(f"top_k: expected -1 (every token) or more, got {self.top_k}")


class GenerateRequest(msgspec.Struct):
    """`POST /generate`: one prompt in token ids."""

    input_ids: list[TokenId]
    rid: str = msgspec.field(default_factory=lambda: uuid4().hex)
    sampling_params: SGLangSampling = msgspec.field(default_factory=SGLangSampling)
    return_logprob: bool = False
    logprob_start_len: int = _NO_LOGPROBS
    top_logprobs_num: Count = 0
    stream: bool = False
    return_sampling_mask: bool = False
    session_id: str | None = None
    text: None = None
    input_embeds: None = None
    image_data: None = None
    lora_path: None = None
    session_params: None = None
    custom_logit_processor: None = None
    token_ids_logprob: None = None

    def __post_init__(self) -> None:
        size = len(self.input_ids)
        if self.return_logprob and not _NO_LOGPROBS <= self.logprob_start_len < max(size, 1):
            raise ValueError(f"logprob_start_len: expected -1..{size - 1}, got {self.logprob_start_len}")

    @property
    def samples_nothing(self) -> bool:
        """True if only the prompt is read."""
        return self.sampling_params.max_new_tokens == 0

    @property
    def probes_guard(self) -> bool:
        """True for a request that asks for the repeat guard."""
        return is_probe(self.sampling_params.custom_params)

    @property
    def scores_from(self) -> int | None:
        """Index of the first prompt token to score, or None; SGLang counts from the token before."""
        if not self.return_logprob or self.logprob_start_len == _NO_LOGPROBS:
            return None
        return self.logprob_start_len + 1

    @property
    def script_ids(self) -> TokenIds | None:
        """Ids to output. Raises `EngineRejected` if invalid."""
        try:
            script = read_script(self.sampling_params.custom_params)
        except ValueError as error:
            raise EngineRejected(str(error)) from error
        return as_ids(script) if script else None

    @property
    def params(self) -> SamplingParams:
        asked = self.sampling_params
        return SamplingParams(
            max_new_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(asked.top_k, 0),
            min_p=asked.min_p,
            seed=asked.sampling_seed,
            stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
            stop_token_ids=tuple(asked.stop_token_ids or ()),
            ignore_eos=asked.ignore_eos,
            top_logprobs=self.top_logprobs_num if self.return_logprob else 0,
            min_new_tokens=asked.min_new_tokens,
            json_schema=asked.json_schema,
            sampling_mask=self.return_sampling_mask,
        )

    @property
    def generation(self) -> GenerationRequest:
        return GenerationRequest(
            as_ids(self.input_ids),
            self.params,
            self.rid,
            self.session_id,
            prompt_logprobs_from=self.scores_from,
            continues=prefix_length(self.sampling_params.custom_params, len(self.input_ids)),
            script_ids=self.script_ids,
        )


class AbortRequest(msgspec.Struct):
    """`POST /abort_request`."""

    rid: str = ""
    abort_all: bool = False


class PauseRequest(msgspec.Struct):
    """`POST /pause_generation`; no KV survives a weight change here, so `in_place` equals `retract`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueRequest(msgspec.Struct):
    """`POST /continue_generation`."""


class UpdateRequest(msgspec.Struct):
    """`POST /update_weights_from_disk`; always flushes the cache."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False


class TokenizeRequest(msgspec.Struct):
    """`POST /tokenize`."""

    prompt: str
    add_special_tokens: Literal[False] = False


def decode(content: bytes, kind: type[_T]) -> _T:
    """Decode `content`. Raises `EngineRejected` with the place and the expected type."""
    try:
        return read_json(content, kind)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise EngineRejected(f"invalid request body: {error}") from error
