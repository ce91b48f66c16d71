"""Body fields that a dialect does not serve, and their note in the record.

They are ignored, because clients send much that only the vendor understands, and noted by name, because one may have
been meant to change the sampling. Values of named settings are noted; any other may hold a secret. A `strict` session
refuses these fields (`Session.require_served`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from harness.decoding import json_decoder
from harness.dialects.json_values import check_json, decode_json
from harness.errors import MalformedRequest, RequestError
from harness.types import Json

NULL = msgspec.Raw(b"null")
MOST_NOTED = 16
"""Most fields in one list of notes."""
LONGEST_NOTE = 500
"""Most bytes of a noted name, and of a value's JSON."""
_LEVELS = 16
_REASONS: Mapping[str, str] = {
    "use `tools`": "functions",
    "use `tool_choice`": "function_call",
    "use `response_format`": "guided_json guided_regex guided_choice guided_grammar"
    " structured_outputs structural_tag regex ebnf json_schema grammar format",
    "use this dialect's own field for the answer's schema": "response_format",
    "such logprobs are not the model's": "repetition_penalty frequency_penalty presence_penalty length_penalty"
    " bad_words allowed_token_ids logit_bias custom_logit_processor custom_params vllm_xargs logits_processors"
    " no_repeat_ngram_size typical_p typical top_a watermark watermarking repeat_penalty mirostat tfs_z"
    " dry_multiplier xtc_probability dynatemp_range top_n_sigma smoothing_factor epsilon_cutoff eta_cutoff"
    " bad_words_ids suppress_tokens samplers sampler_order",
    "set it in the session's `sampling`, or use another field": "temperature top_p top_k min_p seed stop stop_sequences"
    " min_tokens min_new_tokens max_tokens max_completion_tokens max_output_tokens max_new_tokens stop_token_ids"
    " n_predict num_predict random_seed",
    "a turn ends where the model, a stop string or a limit ends it": "ignore_eos stop_regex thinking_token_budget"
    " thinking_budget repetition_detection",
    "the prompt is this request's conversation, rendered by the server": "input_ids prompt_token_ids session_params"
    " previous_input_messages thread",
    "the template writes them": "add_special_tokens",
    "the operator chooses the model": "lora_path lora adapter_id",
    "the prompt has messages and tools only": "documents safe_prompt prompt_mode",
    "beam search does not sample from the model": "use_beam_search",
    "each answer is one sample": "best_of n",
    "nothing but text can be recorded": "modalities audio",
    "the model sees the whole prompt": "truncate_prompt_tokens prompt_truncate_len",
    "the prompt ends where the model's turn begins": "continue_final_message add_generation_prompt prefix suffix"
    " response_prefix",
    "set it in the session's `template_variables`, or in `chat_template_kwargs` of chat completions": "enable_thinking"
    " thinking think",
    "the operator sets it with `harness serve --template`": "chat_template",
    "only chat completions set variables of the template, or the session does": "chat_template_kwargs reasoning_effort",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Fields that change the prompt or the sampling, with the alternative, for dialects that do not serve them."""
_AT_REST: Mapping[str, str] = {
    "false": "ignore_eos use_beam_search continue_final_message add_special_tokens watermarking safe_prompt",
    "0": "frequency_penalty presence_penalty min_new_tokens min_tokens min_p no_repeat_ngram_size top_k top_a"
    " mirostat dry_multiplier xtc_probability dynatemp_range top_n_sigma smoothing_factor epsilon_cutoff eta_cutoff",
    "1": "repetition_penalty length_penalty typical_p typical best_of n repeat_penalty tfs_z",
    "-1": "top_k top_n_sigma",
    "true": "add_generation_prompt",
    "{}": "logit_bias custom_params vllm_xargs chat_template_kwargs",
    '["text"]': "modalities",
}
_NEUTRAL = {(name, value) for value, names in _AT_REST.items() for name in names.split()}
"""Values of refused fields that ask for nothing."""
_NOTHING = ("[]", '""')

Settings = Mapping[str, tuple[bytes, ...]]
"""Ignored settings, with the values at which nothing is ignored."""

_T = TypeVar("_T", bound=msgspec.Struct)
_fields_decoder = json_decoder(dict[str, msgspec.Raw])
_value_decoder = json_decoder(Any)


class BodyDecoder(Generic[_T]):
    """Decoder of an object that may have unknown fields. `spell` turns their names into names in `REFUSED`.

    The `ignored` fields of `body`, of any kind, stay `msgspec.Raw`, for `find_ignored`.
    """

    def __init__(self, body: type[_T], spell: Callable[[str], str] = str, ignored: Iterable[str] = ()) -> None:
        whole: Any = msgspec.defstruct(body.__name__, [(name, msgspec.Raw, NULL) for name in ignored], bases=(body,))
        self._tolerant: msgspec.json.Decoder[_T] = json_decoder(whole)
        # It refuses unknown fields. Nearly all bodies have none and are decoded once.
        exact: Any = msgspec.defstruct(body.__name__, (), bases=(whole,), forbid_unknown_fields=True)
        self._exact: msgspec.json.Decoder[_T] = json_decoder(exact)
        self._spell = spell

    def decode(self, content: bytes | msgspec.Raw, within: str = "") -> tuple[_T, list[str]]:
        """Return the body, or its field `within`, and the unknown fields. Raises `MalformedRequest` for refused."""
        content = b"{}" if within and content == NULL else content
        try:
            return self._exact.decode(content), []
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            wire = decode_json(self._tolerant, content, within)
        known = wire.__struct_encode_fields__
        unknown: list[str] = []
        for name, raw in decode_json(_fields_decoder, content).items():
            spelled = self._spell(name)
            if name in known or raw == NULL:
                continue
            if spelled in REFUSED and spelled not in wire.__struct_fields__:
                value = bytes(raw).decode(errors="replace").removesuffix(".0")
                if value in _NOTHING or (spelled, value) in _NEUTRAL:
                    continue
                raise MalformedRequest(f"{name}: expected none, {REFUSED[spelled]}", param=name)
            unknown.append(f"{within}.{name}" if within else name)
        return wire, unknown


def find_ignored(
    wire: msgspec.Struct, settings: Settings, others: Iterable[str], unknown: Iterable[str]
) -> dict[str, Any]:
    """Return the unserved fields that were sent, with their values; None for a possible secret.

    `settings` and `others` name `msgspec.Raw` fields of `wire`.
    """
    sent = {name: raw for name in settings if (raw := getattr(wire, name)) is not NULL}
    meant = {name: raw for name, each in sent.items() if (raw := bytes(each)) != b"null" and raw not in settings[name]}
    names = [name for name in others if (raw := getattr(wire, name)) is not NULL and raw != NULL]
    if not meant and not names:
        return {name[:LONGEST_NOTE]: None for name in unknown}
    spelled = dict(zip(wire.__struct_fields__, wire.__struct_encode_fields__, strict=True))
    found = {spelled[name]: _shorten(raw) for name, raw in meant.items()}
    return found | {name[:LONGEST_NOTE]: None for name in (*map(spelled.__getitem__, names), *unknown)}


def note_ignored(ignored: Mapping[str, Any]) -> Json:
    """Return at most `MOST_NOTED` fields, for `TurnNotes.ignored`."""
    return dict(list(ignored.items())[:MOST_NOTED])


def _shorten(raw: bytes) -> Any:
    try:
        value = decode_json(_value_decoder, raw[: LONGEST_NOTE + 1])
        check_json(value, "", _LEVELS)
    except RequestError:
        # Cut off, or too deep to store.
        return raw[:LONGEST_NOTE].decode(errors="replace")
    return value
