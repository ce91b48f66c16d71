"""What a server serves: the properties in which two must agree to sample the same tokens from the same messages."""

from harness.engines.base import Capabilities
from harness.tokens.chat_tokenizer import ChatTokenizer
from harness.types import Json


def serving_identity(capabilities: Capabilities, chat_tokenizer: ChatTokenizer) -> Json:
    """Engine and model by name, weights, tokenizer, template and repeat guard by digest."""
    return {
        "engine": capabilities.engine,
        "model": capabilities.model,
        "weights_digest": capabilities.weights_digest,
        "tokenizer_digest": chat_tokenizer.tokenizer.digest,
        "template_digest": chat_tokenizer.describe().template_digest,
        "repeat_guard": capabilities.repeat_guard,
    }
