"""The local engine: a HuggingFace model served in this process, on the CPU."""

from harness.engines.huggingface.provider import HuggingFaceTokenProvider

__all__ = ["HuggingFaceTokenProvider"]
