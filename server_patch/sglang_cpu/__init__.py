"""Test support: stand-ins with which SGLang serves a small dense model on a CPU, without its CUDA kernels.

`harness engine up sglang` puts `path/` on `PYTHONPATH`, on machines without a GPU only. The stand-ins refuse a CUDA
torch. Experts, speculative decoding and images are out of scope.
"""
