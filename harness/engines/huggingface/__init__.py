"""The local engine: a HuggingFace model on this CPU. Importing does not import torch. Start with `provider.py`."""

from harness.engines.huggingface.provider import HuggingFaceTokenProvider

__all__ = ["HuggingFaceTokenProvider"]
