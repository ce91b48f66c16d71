"""Test support: stand-ins with which SGLang serves a small dense model on a CPU.

`harness engine up sglang` puts `path/` on `PYTHONPATH`, without a GPU only. The stand-ins refuse a CUDA torch. Experts,
speculative decoding and images are out of scope.
"""
