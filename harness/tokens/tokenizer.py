"""Tokenizer loaded from `tokenizer.json` itself.

`encode_plain` encodes text of people and tools. It never yields a marker, so a message cannot forge a turn. Markers are
the special tokens, and further added tokens that a family guards, such as Qwen's `<tool_response>`.
"""

import hashlib
import json
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from harness.errors import TokenizerError
from harness.tokens.byte_level import WordEncoder, open_spellings, open_word_encoder

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

_LONG_TEXT = 10_000  # characters, a few milliseconds
_MOST_SOUGHT = 400  # added tokens; a search for more costs what the word cache saves
_STRETCH = 100_000  # characters; a search holds the GIL until it is done
_OPEN = 3  # borders at the end of a conversation, behind which its next turn may read differently


class _KnownText(NamedTuple):
    """A text up to a border, a special token that the text behind it cannot change."""

    text: str
    ids: npt.NDArray[np.int32]


class Tokenizer:
    def __init__(
        self,
        raw: "RawTokenizer",
        *,
        eos_ids: frozenset[int],
        further_markers: Collection[str] = frozenset(),
        digest: str = "",
        folder: Path | None = None,
    ) -> None:
        self._raw = raw
        self._further_markers = frozenset(further_markers)
        self.eos_ids = eos_ids
        """Ids that end the model's turn."""
        self._spellings = open_spellings(raw)
        self.digest = digest
        """SHA-256 of `tokenizer.json`, empty without a file."""
        self.folder = folder
        """Absolute path of the source folder."""
        self._heads: deque[_KnownText] | None = None  # of texts that it remembers

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Load the tokenizer of a HuggingFace folder. Raises `TokenizerError` for a missing `tokenizer.json`."""
        from tokenizers import Tokenizer as RawTokenizer  # a trainer imports this module and reads no text

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"expected a HuggingFace folder with tokenizer.json, found none in {directory}")
        # Not `AutoTokenizer`, which for some families silently builds a tokenizer with ids other than the file's.
        try:
            raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        raw.no_truncation()  # a setting for training batches
        raw.no_padding()
        # A turn ends at the ids of `generation_config.json` and at the `eos_token` of `tokenizer_config.json`.
        declared = read_json(directory / "generation_config.json").get("eos_token_id")
        eos_ids = {declared} if isinstance(declared, int) else set(declared or ())
        text = declared_token(read_json(directory / "tokenizer_config.json"), "eos_token")
        token_id = None if text is None else raw.token_to_id(text)
        ends = frozenset(eos_ids if token_id is None else eos_ids | {token_id})
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(raw, eos_ids=ends, digest=digest, folder=directory.absolute())

    def guarding(self, added_tokens: Collection[str]) -> Self:
        """Return this tokenizer with the `added_tokens` that it has as further markers."""
        further_markers = self.added_tokens & set(added_tokens)
        if further_markers == self._further_markers:
            return self
        return type(self)(
            self._raw, eos_ids=self.eos_ids, further_markers=further_markers, digest=self.digest, folder=self.folder
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Markers in it are markers."""
        if self._heads is not None and len(text) > _LONG_TEXT:
            return self._encode_grown(text, self._heads)
        return self._encode_words(text) or _encode(self._raw, text)

    def remember(self, texts: int) -> None:
        """Encode only what is new in a long text that begins like one of the last `texts`. For one thread."""
        self._heads = deque(maxlen=texts)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of `text`. Markers in it are ordinary characters."""
        return self._encode_words(text) or _encode(self._plain, text)

    def count_plain(self, text: str) -> int:
        """Count the ids of `encode_plain`. Other threads run meanwhile."""
        return len(self._plain.encode_batch_fast([text], add_special_tokens=False)[0])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text with special tokens. Bytes that are not UTF-8 become U+FFFD."""
        if self._spellings is not None:
            return self._spellings.decode(ids)
        return str(self._raw.decode(ids, skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        return self._raw.id_to_token(token_id) or f"<{token_id}>"

    def __contains__(self, token_id: int) -> bool:
        return self._raw.id_to_token(token_id) is not None

    def marker_id(self, text: str) -> int | None:
        """Return the id of an added token, special or not."""
        return self._raw.token_to_id(text) if text in self.added_tokens else None

    @cached_property
    def vocab_size(self) -> int:
        return int(self._raw.get_vocab_size(with_added_tokens=True))

    @cached_property
    def longest_token(self) -> int:
        """Most characters that one id can stand for."""
        # One by one: the vocabulary as a dictionary would set the peak memory of a server.
        return max((len(self._raw.id_to_token(each) or "") for each in range(self.vocab_size)), default=1)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Single-byte ids, if the decoder reads a run of them as one text, or as none."""
        if self._spellings is not None:
            return frozenset()
        ids = (self._raw.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token_id for token_id in ids if token_id is not None)

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """Texts, longest first."""
        specials = {token.content for token in self._raw.get_added_tokens_decoder().values() if token.special}
        return tuple(sorted(specials | self._further_markers, key=len, reverse=True))

    @cached_property
    def marker_pattern(self) -> re.Pattern[str]:
        return re.compile(_alternatives(self.markers) if self.markers else r"(?!)")

    def find_markers(self, text: str) -> Iterator[re.Match[str]]:
        if len(text) <= _STRETCH:
            yield from self.marker_pattern.finditer(text)
            return
        position, reach = 0, max(map(len, self.markers), default=1)
        while position < len(text):
            end = position + _STRETCH
            found = self.marker_pattern.search(text, position, end + reach)
            if found is not None and found.start() < end:
                yield found
            position = end if found is None or found.start() >= end else found.end()

    @cached_property
    def added_tokens(self) -> frozenset[str]:
        """Texts that are one id wherever they occur."""
        return frozenset(token.content for token in self._raw.get_added_tokens_decoder().values())

    def _encode_grown(self, text: str, heads: deque[_KnownText]) -> list[int]:
        # Text that continues a head otherwise than with a border may share tokens with its end.
        border = self._border_pattern
        known = [each for each in heads if text.startswith(each.text) and border.match(text, len(each.text))]
        head = max(known, key=lambda each: len(each.text), default=_KnownText("", np.zeros(0, np.int32)))
        start = len(head.text)
        borders = [found.start() for found in border.finditer(text, start)]
        if len(borders) > _OPEN:
            cut = borders[-_OPEN]
            grown = _KnownText(
                text[:cut], np.concatenate([head.ids, np.asarray(_encode(self._raw, text[start:cut]), np.int32)])
            )
            if known:
                heads.remove(head)
            heads.append(grown)
            head, start = grown, cut
        return [*head.ids.tolist(), *_encode(self._raw, text[start:])]

    @cached_property
    def _border_pattern(self) -> re.Pattern[str]:
        # The library splits a text at these tokens before all else, without the white space before them, so that their
        # two sides are encoded apart.
        added = self._raw.get_added_tokens_decoder().values()
        borders = [
            each.content for each in added if each.special and not (each.normalized or each.lstrip or each.single_word)
        ]
        return re.compile("|".join(map(re.escape, sorted(borders, reverse=True))) or r"(?!)")

    def _encode_words(self, text: str) -> list[int]:
        # Empty: the text may hold an added token, or words cannot be looked up, so it is encoded as a whole.
        if len(text) > _LONG_TEXT or self._words is None or not text.isascii() or self._added_pattern.search(text):
            return []
        return self._words.encode(text)

    @cached_property
    def _words(self) -> WordEncoder | None:
        if len(self.added_tokens) > _MOST_SOUGHT:
            return None
        return open_word_encoder(self._raw, partial(_encode, self._raw))

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.added_tokens, reverse=True))) or r"(?!)")

    @cached_property
    def _plain(self) -> "RawTokenizer":
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as RawTokenizer

        # The library reads only special tokens as characters, so guarded markers become special here. The vocabulary,
        # tens of megabytes, is shared.
        plain = RawTokenizer(self._raw.model)
        plain.normalizer, plain.pre_tokenizer = self._raw.normalizer, self._raw.pre_tokenizer
        # In the order that gives them their ids. In batches, because each call rebuilds the library's search.
        added = (token for _, token in sorted(self._raw.get_added_tokens_decoder().items()))
        for is_special, tokens in groupby(added, key=attrgetter("special")):
            add = plain.add_special_tokens if is_special else plain.add_tokens
            add(list(tokens))
        plain.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in self._further_markers])
        plain.encode_special_tokens = True
        return plain


def _encode(raw: "RawTokenizer", text: str) -> list[int]:
    if len(text) > _LONG_TEXT:  # a batch, here of one, lets other threads run; plain encoding blocks them
        return list(raw.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    return list(raw.encode(text, add_special_tokens=False).ids)


def _alternatives(texts: Sequence[str]) -> str:
    by_first: dict[str, list[str]] = {}  # a common beginning is compared once
    for text in filter(None, texts):
        by_first.setdefault(text[0], []).append(text)
    groups: list[str] = []
    for alike in by_first.values():
        begin = commonprefix(alike)  # noqa: RUF071  # of characters
        rest = [text[len(begin) :] for text in alike]
        groups.append(re.escape(begin) + (_alternatives(rest) if any(rest) else ""))
    return f"(?:{'|'.join(groups)}){'' if all(texts) else '?'}"


def declared_token(config: Mapping[str, Any], name: str) -> str | None:
    token = config.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, empty without such a file. Raises `TokenizerError` if it is not JSON."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}
