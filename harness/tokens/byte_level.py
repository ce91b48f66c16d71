"""Byte-level tokenizers: encode text word by word and decode ids one by one, with cached results.

Words are cut here only in ASCII, where Python's regular expressions agree with those of `tokenizers`, and only for
known pre-tokenizers. Text must not contain a spelled-out added token.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

_MOST_WORDS = 20_000  # of about 200 bytes
_LONGEST_WORD = 24  # characters
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = ("", " ", "  ", "\n")
_PROBES = (
    *_SPACES,
    *"\t\r\x00\x0b\x0c\x1c\x7faZ57_'.-{/",
    *(" \n\n", "\r\n", "Word", "CamelCase", "x86", "2048", "it's", "WE'LL", "'re", "!?", "..."),
)
_SHOWN = [code for codes in (range(33, 127), range(161, 173), range(174, 256)) for code in codes]
_BYTES = {chr(code): code for code in _SHOWN} | {
    chr(256 + number): code for number, code in enumerate(code for code in range(256) if code not in _SHOWN)
}
"""Bytes by vocabulary character: printable ones as themselves, the others from U+0100 on."""


class WordEncoder:
    """Encoder of ASCII text without added tokens."""

    def __init__(self, cuts: tuple[re.Pattern[str], ...], encode: Callable[[str], list[int]]) -> None:
        self._cuts = cuts
        self._known = _Known(encode)
        self._known_stretches = _Known(lambda stretch: self._encode(f" {stretch}"))
        texts = [probe for probe in _PROBES if probe.strip() == probe != ""]
        pairs = product(texts, [f" {right}" for right in (*texts, " a", " 1", " .", "", " ", "\n", "\na")])
        self._cuts_before_spaces = all(
            [*self._cut(left + right)] == [*self._cut(left), *self._cut(right)] for left, right in pairs
        )

    def encode(self, text: str) -> list[int]:
        if not self._cuts_before_spaces:
            return self._encode(text)
        # Cutting takes most of the time, so text is looked up from one space to the next. White space goes on.
        first, *stretches = text.split(" ")
        look_up = self._known_stretches.get
        ids, begun = ([], first) if first[-1:].isspace() else (self._encode(first), "")
        for stretch in stretches:
            if not begun and (known := look_up(stretch)):
                ids += known
                continue
            begun += f" {stretch}"
            if stretch[-1:].strip():
                ids += self._known_stretches[stretch] if begun == f" {stretch}" else self._encode(begun)
                begun = ""
        return ids + self._encode(begun)

    def _encode(self, text: str) -> list[int]:
        return list(chain.from_iterable(map(self._known.__getitem__, self._cut(text))))

    def _cut(self, text: str) -> Iterable[str]:
        words: Iterable[str] = (text,)
        for cut in self._cuts:
            words = chain.from_iterable(map(cut.findall, words))
        return words


class _Known(dict[str, tuple[int, ...]]):
    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._encode(word))
        if len(word) <= _LONGEST_WORD:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids


class Spellings(dict[int, bytes]):
    def __init__(self, raw: "RawTokenizer") -> None:
        self._raw = raw

    def __missing__(self, token_id: int) -> bytes:
        token = self._raw.id_to_token(token_id) or ""  # the library decodes unknown ids to nothing, too
        try:
            spelled = bytes(map(_BYTES.__getitem__, token))
        except KeyError:  # an added token, which is spelled as plain text
            spelled = token.encode()
        self[token_id] = spelled
        return spelled

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.__getitem__, ids)).decode(errors="replace")


def open_spellings(raw: "RawTokenizer") -> Spellings | None:
    """Return the spellings if the tokenizer decodes byte by byte."""
    is_byte_level = raw.decoder is not None and _state(raw.decoder).get("type") == "ByteLevel"
    return Spellings(raw) if is_byte_level else None


def open_word_encoder(raw: "RawTokenizer", encode: Callable[[str], list[int]]) -> WordEncoder | None:
    """Return an encoder equal to `encode`, the encoding of `raw`, if there is one."""
    # NFC leaves ASCII alone, other normalizers may not.
    changes_ascii = raw.normalizer is not None and _state(raw.normalizer) != {"type": "NFC"}
    if changes_ascii or raw.truncation is not None or raw.padding is not None or raw.pre_tokenizer is None:
        return None
    try:
        # The text between two matches is a word, too.
        cuts = tuple(
            re.compile(rf"(?:{cut})|(?:(?!{cut})(?s:.))+", re.ASCII) for cut in _cuts(_state(raw.pre_tokenizer))
        )
    except (ValueError, re.error):
        return None
    words = WordEncoder(cuts, encode)
    # Compared on hard texts: one wrong id would corrupt prompts, so a single difference rules the encoder out.
    for first in _PROBES:
        text = "".join(chain.from_iterable(product((first,), _SPACES, _PROBES)))
        if words.encode(text) != encode(text):
            return None
    return words


def _state(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _cuts(state: Mapping[str, Any]) -> Iterator[str]:
    match state:
        case {"type": "Sequence", "pretokenizers": parts}:
            for part in parts:
                yield from _cuts(part)
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            yield _for_ascii(pattern)
        case {"type": "Digits", "individual_digits": is_each}:
            yield "[0-9]" if is_each else "[0-9]+"
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": uses_regex}:
            if uses_regex:
                yield _for_ascii(_GPT2)
        case _:
            raise ValueError(f"texts are cut by {state.get('type')}")


def _for_ascii(pattern: str) -> str:
    if "[[" in pattern or "&&" in pattern:
        raise ValueError(f"{pattern} has classes of classes")
    written: list[str] = []
    is_in_class = False
    for part in re.findall(r"\\p\{\w+\}|\\.|\(\?|.", pattern, re.DOTALL):
        if part.startswith(r"\p"):
            category = part[3:-1]
            members = re.escape(
                "".join(c for c in map(chr, range(128)) if unicodedata.category(c).startswith(category))
            )
            written.append(members if is_in_class else f"[{members}]" if members else "(?!)")
        elif part == "(" and not is_in_class:
            written.append("(?:")
        else:
            is_in_class = part == "[" or (is_in_class and part != "]")
            written.append(part)
    return "".join(written)
