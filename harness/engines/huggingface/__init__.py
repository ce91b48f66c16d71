"""The local engine: a HuggingFace model in this process, on the CPU.

Importing it does not import torch; its `engine` module does. Start with `provider.py`.
"""

from harness.engines.huggingface.provider import HuggingFaceTokenProvider

__all__ = ["HuggingFaceTokenProvider"]
