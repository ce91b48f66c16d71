"""From the name of an engine, as it stands on a command line or in a scenario, to its provider.

`local` and `scripted` run in this process. `NAME=URL[,URL]` names servers; a name this version has no provider for is
refused here, before anything starts.
"""

from pathlib import Path

from harness.engines.base import TokenProvider
from harness.engines.scripted import Script, ScriptedEngine
from harness.errors import ScenarioError
from harness.tokens.tokenizer import Tokenizer

ENGINES = ("local", "scripted")


def open_engine(
    name: str, *, model_dir: Path | None = None, tokenizer: Tokenizer | None = None, script: Path | None = None
) -> TokenProvider:
    """The provider called `name`; enter it to start it.

    `local` needs `model_dir`, `scripted` needs `tokenizer` and plays `script` when there is one. Raises
    `ScenarioError` when the name is unknown or what it needs is missing.
    """
    match name:
        case "local":
            return _local(model_dir)
        case "scripted":
            if tokenizer is None:
                raise ScenarioError("the scripted engine needs a tokenizer; pass --tokenizer DIR or --model")
            return ScriptedEngine(tokenizer, None if script is None else Script.load(script))
        case _:
            kind = name.partition("=")[0]
            raise ScenarioError(f"no engine {kind!r} in this version; expected one of {', '.join(ENGINES)}")


def _local(model_dir: Path | None) -> TokenProvider:
    if model_dir is None:
        raise ScenarioError("the local engine needs weights; pass --model NAME_OR_DIR")
    from harness.engines.huggingface import HuggingFaceTokenProvider  # torch and transformers: seconds to import

    return HuggingFaceTokenProvider(model_dir)
