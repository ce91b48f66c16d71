"""Resolution of `--model` to a model folder on this machine.

Three forms are understood, in this order: a name of the catalogue (fetched if missing), a local HuggingFace folder, and
a hub id.
"""

import re
from pathlib import Path

from harness.errors import ModelError, UnknownModel
from harness.lab.models.catalogue import CATALOGUE, CatalogueModel, find_model
from harness.lab.models.convert import FORMAT_VERSION, convert_gguf, require_converter, template_digest
from harness.lab.models.fetch import fetch_gguf
from harness.lab.models.tiny import GeneratedModel, generate_tiny, tiny_recipe
from harness.machine.cache import (
    cache_directory,
    install,
    is_intact,
    require_space,
    staging,
    storage_error,
    write_manifest,
)
from harness.machine.locks import hold_lock
from harness.machine.progress import FetchPhase, FetchProgress, silent

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_REQUIRED_FILES = ("config.json", "tokenizer.json", "*.safetensors")


def resolve_model(model: str, *, cache: Path | None = None, progress: FetchProgress = silent) -> Path:
    """Return the local folder of `model`, downloading what is missing.

    Blocks for as long as the download takes. Raises `ModelError`, or `UnknownModel` if `model` names none.
    """
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
    """Return the cached folder of a catalogue model, fetched and converted if it is missing or damaged.

    Any number of processes may call it at once: one works, the others wait. Raises `ModelError`.
    """
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
    return {"gguf_sha256": model.gguf_sha256, "format": FORMAT_VERSION, "template_sha256": template_digest()}


def _require_complete(folder: Path) -> Path:
    missing = [pattern for pattern in _REQUIRED_FILES if not any(folder.glob(pattern))]
    if missing:
        raise UnknownModel(f"{folder} is not a HuggingFace model folder: {', '.join(missing)} missing")
    return folder
