"""JSON messages of vLLM's two token endpoints, as far as this project reads them."""

from typing import Annotated, Any

import msgspec

from harness.decoding import json_decoder
from harness.types import VersionSpan

TokenId = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class Usage(msgspec.Struct):
    """Token counts; `prompt_tokens_details` needs `--enable-prompt-tokens-details`."""

    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class PromptEntry(msgspec.Struct):
    """Logprob of one input token."""

    logprob: float | None = None


PromptEntries = list[msgspec.Raw]
"""Entries of all input tokens, undecoded because only the last are wanted; the first is null."""

NO_ENTRIES = msgspec.Raw(b"null")

decode_entries = json_decoder(PromptEntries | None).decode
decode_entry = json_decoder(dict[TokenId, PromptEntry] | None).decode


class Alternative(msgspec.Struct, gc=False):
    """Token and its logprob."""

    token_id: TokenId
    logprob: float | None = None


class SampledEntry(msgspec.Struct, gc=False):
    """Sampled token with logprob and alternatives."""

    token_id: TokenId
    logprob: float | None = None
    top_logprobs: list[Alternative] = []


class SampledList(msgspec.Struct):
    """Logprobs of `/inference/v1/generate`."""

    content: list[SampledEntry] | None = None


class NamedLogprobs(msgspec.Struct):
    """Logprobs of `/v1/completions`."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] | None = None


class GenerateChoice(msgspec.Struct):
    """Output of `/inference/v1/generate`."""

    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: SampledList | None = None
    weight_versions: list[VersionSpan] | None = None
    routed_experts: msgspec.Raw = NO_ENTRIES
    """Base64 of an `.npy` file, undecoded: a server sends it with every reply."""
    sampling_mask: list[list[TokenId]] | None = None
    """Candidates of each token; a server sends them with every reply."""


class CompletionChoice(msgspec.Struct):
    """Output of `/v1/completions`."""

    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: NamedLogprobs | None = None
    prompt_logprobs: msgspec.Raw = NO_ENTRIES
    """`PromptEntries`, undecoded."""


class GenerateChunk(msgspec.Struct):
    """Reply of `/inference/v1/generate`, or a chunk."""

    request_id: str = ""
    choices: list[GenerateChoice] = []
    usage: Usage | None = None
    prompt_logprobs: msgspec.Raw = NO_ENTRIES
    """`PromptEntries`, undecoded."""
    error: Any = None


class CompletionChunk(msgspec.Struct, rename={"request_id": "id"}):
    """Reply of `/v1/completions`, or a chunk."""

    request_id: str = ""
    choices: list[CompletionChoice] = []
    usage: Usage | None = None
    error: Any = None
