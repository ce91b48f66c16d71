"""Identity of a server, without program versions: equal servers sample the same tokens from the same messages."""

from harness.engines.base import Capabilities, TokenProvider
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.types import Json


def serving_identity(capabilities: Capabilities, chat_tokenizer: ChatTokenizer) -> Json:
    return {
        "engine": capabilities.engine,
        "model": capabilities.model,
        "weights_digest": capabilities.weights_digest,
        "tokenizer_digest": chat_tokenizer.tokenizer.digest,
        "template_digest": chat_tokenizer.describe().template_digest,
        "repeat_guard": capabilities.repeat_guard,
    }


def programs_of(engine: TokenProvider) -> list[str]:
    """Return the programs that sample for `engine`, such as `sglang 0.5.15` or `local`."""
    found = [worker.capabilities for worker in engine.workers.providers.values()]
    return sorted({f"{each.engine} {each.version}".rstrip() for each in found})
