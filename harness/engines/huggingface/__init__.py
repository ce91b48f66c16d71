"""The local engine: a HuggingFace model in this process, on the CPU.

`thread`, `scheduler`, `local_generation` and this import need no torch; `engine` and below do. Start with
`provider.py`.
"""

from harness.engines.huggingface.provider import HuggingFaceTokenProvider

__all__ = ["HuggingFaceTokenProvider"]
