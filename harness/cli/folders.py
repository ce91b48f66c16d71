"""The folders that a command line names: of a model, fetched when need be, and of a tokenizer."""

from pathlib import Path

from harness.errors import ScenarioError


def model_directory(model: str | None) -> Path | None:
    """The folder of the weights, fetched when they are in the catalogue."""
    if model is None:
        return None
    from harness.cli.download import open_download_progress
    from harness.models import resolve_model

    with open_download_progress(model) as progress:
        return resolve_model(model, progress=progress)


def tokenizer_directory(tokenizer: Path | None, model_dir: Path | None) -> Path:
    """The folder of the tokenizer. Raises `ScenarioError` when none was named."""
    folder = tokenizer or model_dir
    if folder is None:
        raise ScenarioError("no tokenizer: expected --model NAME_OR_DIR, or --tokenizer DIR")
    return folder
