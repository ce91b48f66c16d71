"""A tokenizer, loaded from `tokenizer.json` itself.

`AutoTokenizer` is not used: for some families it builds a tokenizer that gives other ids than the file says, without
a word. Text written by people or tools is encoded with `encode_plain`, which never yields a marker, so a message cannot
forge a turn. Markers are the special tokens, and the further added tokens that a family guards (`guarding`), such as
Qwen's `<tool_response>`, which is not declared special. Does not know templates.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter
from os.path import commonprefix
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from harness.errors import TokenizerError
from harness.tokens.byte_level import WordEncoder, open_spellings, open_word_encoder

_LONG_TEXT = 10_000  # characters, a few milliseconds
_MOST_SOUGHT = 400  # added tokens: a search for more costs what looking words up saves
_STRETCH = 100_000  # characters, likewise: a search holds the interpreter until it is done


class Tokenizer:
    """Text to ids and back, without adding or dropping anything by itself."""

    def __init__(
        self,
        raw: RawTokenizer,
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
        """SHA-256 of `tokenizer.json`; empty for one that came from no file."""
        self.folder = folder
        """Absolute path of the folder it was loaded from."""

    @classmethod
    def load(cls, directory: Path) -> Self:
        """The tokenizer of a HuggingFace model folder.

        Raises `TokenizerError` when `tokenizer.json` is missing or unreadable.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"expected a HuggingFace folder with tokenizer.json, found none in {directory}")
        try:
            raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        raw.no_truncation()  # what a trainer wanted of its batches
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
        """This tokenizer, to which those of `added_tokens` that it has are markers as well."""
        further_markers = self.added_tokens & set(added_tokens)
        if further_markers == self._further_markers:
            return self
        return type(self)(
            self._raw,
            eos_ids=self.eos_ids,
            further_markers=further_markers,
            digest=self.digest,
            folder=self.folder,
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, in which markers written out are markers."""
        return self._encode_words(text) or _encode(self._raw, text)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text`, in which markers written out are ordinary characters."""
        return self._encode_words(text) or _encode(self._plain, text)

    def count_plain(self, text: str) -> int:
        """How many ids `encode_plain` gives; other threads run meanwhile."""
        return len(self._plain.encode_batch_fast([text], add_special_tokens=False)[0])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens written out; bytes that are not UTF-8 become U+FFFD."""
        if self._spellings is not None:
            return self._spellings.decode(ids)
        return str(self._raw.decode(ids, skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """How one id looks in the vocabulary, for messages; `<id>` when it is not in it."""
        return self._raw.id_to_token(token_id) or f"<{token_id}>"

    def __contains__(self, token_id: int) -> bool:
        """True if the vocabulary has the id."""
        return self._raw.id_to_token(token_id) is not None

    def marker_id(self, text: str) -> int | None:
        """The id of an added token, special or not; None when `text` is not one."""
        return self._raw.token_to_id(text) if text in self.added_tokens else None

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._raw.get_vocab_size(with_added_tokens=True))

    @cached_property
    def longest_token(self) -> int:
        """The most characters of text that one id can stand for."""
        # One by one: the vocabulary as a dictionary would be the most memory that a server ever holds.
        return max((len(self._raw.id_to_token(each) or "") for each in range(self.vocab_size)), default=1)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids that are a single byte to a decoder for which a run of such bytes is one text, or none."""
        if self._spellings is not None:
            return frozenset()
        ids = (self._raw.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token_id for token_id in ids if token_id is not None)

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """Texts of the markers, longest first."""
        specials = {token.content for token in self._raw.get_added_tokens_decoder().values() if token.special}
        return tuple(sorted(specials | self._further_markers, key=len, reverse=True))

    @cached_property
    def marker_pattern(self) -> re.Pattern[str]:
        """Matches a marker; nothing when there are none."""
        return re.compile(_alternatives(self.markers) if self.markers else r"(?!)")

    def find_markers(self, text: str) -> Iterator[re.Match[str]]:
        """The markers in `text`, from left to right; a long text is searched in stretches, so that others get on."""
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
        """Texts that are one id wherever they stand, special or not."""
        return frozenset(token.content for token in self._raw.get_added_tokens_decoder().values())

    def _encode_words(self, text: str) -> list[int]:
        """Ids of a text that nobody could read a marker in; none where it has to be encoded as a whole."""
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
        """Matches an added token."""
        return re.compile("|".join(map(re.escape, sorted(self.added_tokens, reverse=True))) or r"(?!)")

    @cached_property
    def _plain(self) -> RawTokenizer:
        """A tokenizer that reads every marker as characters; the library only lets special tokens be read so.

        It shares the vocabulary, which is tens of megabytes.
        """
        plain = RawTokenizer(self._raw.model)
        plain.normalizer, plain.pre_tokenizer = self._raw.normalizer, self._raw.pre_tokenizer
        # In the order that gives them their ids; many at once, since each call builds the library's search anew.
        added = (token for _, token in sorted(self._raw.get_added_tokens_decoder().items()))
        for is_special, tokens in groupby(added, key=attrgetter("special")):
            add = plain.add_special_tokens if is_special else plain.add_tokens
            add(list(tokens))
        plain.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in self._further_markers])
        plain.encode_special_tokens = True
        return plain


def _encode(raw: RawTokenizer, text: str) -> list[int]:
    """Encoding in batches, of one here, lets other threads run meanwhile; plain encoding stops them all."""
    if len(text) > _LONG_TEXT:
        return list(raw.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    return list(raw.encode(text, add_special_tokens=False).ids)


def _alternatives(texts: Sequence[str]) -> str:
    """An expression for the longest of `texts`: what they begin with alike is compared once, not once for each."""
    by_first: dict[str, list[str]] = {}
    for text in filter(None, texts):
        by_first.setdefault(text[0], []).append(text)
    groups: list[str] = []
    for alike in by_first.values():
        begin = commonprefix(alike)  # noqa: RUF071  # of characters
        rest = [text[len(begin) :] for text in alike]
        groups.append(re.escape(begin) + (_alternatives(rest) if any(rest) else ""))
    return f"(?:{'|'.join(groups)}){'' if all(texts) else '?'}"


def declared_token(config: Mapping[str, Any], name: str) -> str | None:
    """The text of a special token that `tokenizer_config.json` declares, as a text or an object; None without one."""
    token = config.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty when there is no such file; raises `TokenizerError` when it is not JSON."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}
