"""Body fields that a dialect does not serve, and their note in the record.

They are ignored, because clients send much that only the vendor understands, and noted by name, because one may have
been meant to change the sampling. Values of named settings are noted; any other may hold a secret. A `strict` session
refuses these fields (`Session.require_served`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from harness.dialects.json_values import check_json, decode_json
from harness.errors import MalformedRequest, RequestError
from harness.types import Json

NULL = msgspec.Raw(b"null")
MOST_NOTED = 16
"""Most fields in one list of notes."""
LONGEST_NOTE = 500
"""Most bytes of a noted name, and of a value's JSON."""
_LEVELS = 16
_SCHEMAS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "regex", "ebnf")
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty", "length_penalty")
_CHOICES = ("bad_words", "allowed_token_ids", "logit_bias", "custom_logit_processor", "custom_params", "vllm_xargs")
_SAMPLERS = ("logits_processors", "no_repeat_ngram_size", "typical_p", "top_a", "watermark", "watermarking")
_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_sequences", "min_tokens", "min_new_tokens")
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")
_ENDS = ("stop_regex", "thinking_token_budget", "repetition_detection")
_TEXTS = ("system", "system_prompt", "instructions", "prefix", "suffix")
_PROMPTS = ("input_ids", "prompt_token_ids", "previous_input_messages", "session_params", "thread")
_OFF = ("ignore_eos", "use_beam_search", "continue_final_message", "add_special_tokens", "watermarking")
REFUSED: Mapping[str, str] = {
    "functions": "functions are offered as `tools`",
    "function_call": "a call is asked for with `tool_choice`",
    **dict.fromkeys((*_SCHEMAS, "json_schema"), "the answer's schema is asked for with `response_format`"),
    "response_format": "this dialect has another field for the answer's schema",
    **dict.fromkeys((*_PENALTIES, *_CHOICES, *_SAMPLERS), "such logprobs are not the model's"),
    **dict.fromkeys((*_SETTINGS, *_LENGTHS, "stop_token_ids"), "a session's `sampling` has it, or another field"),
    **dict.fromkeys((*_ENDS, "ignore_eos"), "a turn ends where the model, a stop string or a limit ends it"),
    **dict.fromkeys(_TEXTS, "instructions have another place in this dialect"),
    **dict.fromkeys(_PROMPTS, "the prompt is the conversation of this request, rendered by the server"),
    "add_special_tokens": "the template writes them",
    "lora_path": "the operator chooses the model",
    "documents": "the prompt has messages and tools only",
    "use_beam_search": "beams are no samples of the model",
    **dict.fromkeys(("best_of", "n"), "each answer is one sample"),
    **dict.fromkeys(("modalities", "audio"), "nothing but text can be recorded"),
    "truncate_prompt_tokens": "the model sees the whole prompt",
    **dict.fromkeys(
        ("continue_final_message", "add_generation_prompt"), "the prompt ends where the model's turn begins"
    ),
    **dict.fromkeys(
        ("enable_thinking", "thinking"), "`chat_template_kwargs` or the session's `template_variables` set it"
    ),
    "chat_template": "the operator chooses it, `harness serve --template`",
    **dict.fromkeys(
        ("chat_template_kwargs", "reasoning_effort"),
        "only chat completions set variables of the template, or the session does",
    ),
}
"""Fields that change the prompt or the sampling, with the alternative, for dialects that do not serve them."""
_NEUTRAL: Mapping[str, tuple[bytes, ...]] = {
    **dict.fromkeys(_OFF, (b"false",)),
    **dict.fromkeys(
        (*_PENALTIES[1:3], "min_new_tokens", "min_tokens", "min_p", "no_repeat_ngram_size"), (b"0", b"0.0")
    ),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "typical_p", "best_of", "n"), (b"1", b"1.0")),
    "add_generation_prompt": (b"true",),
    "modalities": (b'["text"]',),
    **dict.fromkeys(("logit_bias", "custom_params", "vllm_xargs", "chat_template_kwargs"), (b"{}",)),
    "top_k": (b"0", b"-1"),
}
"""Values of refused fields that ask for nothing."""
_NOTHING = (b"[]", b'""')

_T = TypeVar("_T", bound=msgspec.Struct)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_value_decoder = msgspec.json.Decoder(Any)


class BodyDecoder(Generic[_T]):
    """Decoder of an object that may have unknown fields. `spell` turns their names into those of `REFUSED`."""

    def __init__(self, body: type[_T], spell: Callable[[str], str] = str) -> None:
        # It refuses unknown fields. Nearly all bodies have none and are decoded once.
        exact = msgspec.defstruct(body.__name__, (), bases=(body,), forbid_unknown_fields=True)
        self._exact: msgspec.json.Decoder[_T] = msgspec.json.Decoder(exact)
        self._tolerant = msgspec.json.Decoder(body)
        self._spell = spell

    def decode(self, content: bytes | msgspec.Raw, within: str = "") -> tuple[_T, list[str]]:
        """Return the body, or its field `within`, and the unknown fields. Raises `MalformedRequest` for refused."""
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
                if bytes(raw) in (*_NOTHING, *_NEUTRAL.get(spelled, ())):
                    continue
                raise MalformedRequest(f"{name}: expected none, {REFUSED[spelled]}", param=name)
            unknown.append(name)
        return wire, unknown


def find_ignored(
    wire: msgspec.Struct, settings: Mapping[str, tuple[bytes, ...]], others: Iterable[str], unknown: Iterable[str]
) -> dict[str, Any]:
    """Return the unserved fields that were sent, with their values; None for a possible secret.

    `settings` and `others` name `msgspec.Raw` fields of `wire`; a setting lists the values at which nothing is ignored.
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
