"""Tokenizer of some kilobytes that needs no download: its tokens are bytes, and pieces of given words.

For scripted engines, whose words need ids and no weights. The same words give the same ids on every machine.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from harness.lab.models.chat_templates import find_template
from harness.machine.cache import cache_directory, install, staging
from harness.machine.disk import hold_lock

SMALL_TOKENIZER = "small-tokenizer"

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0 to 2. Ids 3 to 258 are the bytes."""

# Words of tool calls and of the game that is shipped: a call is less than twenty tokens, not seventy bytes.
WORDS = (
    *("<tool_call>\n", "\n</tool_call>", '{"name": "', '", "arguments": {"', '": ', "}}"),
    *("guess", "number", "The", "the", "and", "is", "right", "from", "to", "too", "high", "low"),
)


def write_small_tokenizer(folder: Path, words: Sequence[str] = ()) -> Path:
    """Write a tokenizer of bytes and `words` to `folder`, with the harness's template, and return it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in words:
        [(spelled, _)] = split.pre_tokenize_str(word)
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in pieces:
                pieces.append(spelled[:end])
                merges.append((spelled[: end - 1], spelled[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    shutil.copyfile(find_template("chatml_hermes"), folder / "chat_template.jinja")
    return folder


def small_tokenizer(cache: Path | None = None) -> Path:
    """Return the cached folder of the tokenizer with `WORDS`."""
    digest = hashlib.sha256("\0".join(WORDS).encode()).hexdigest()[:12]
    target = (cache or cache_directory()) / "tokenizers" / f"{SMALL_TOKENIZER}-{digest}"
    with hold_lock(target.with_name(f"{target.name}.lock")):
        if not (target / "tokenizer.json").is_file():
            with staging(target) as scratch:
                install(write_small_tokenizer(scratch / "built", WORDS), target, scratch)
    return target
