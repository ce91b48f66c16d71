"""Test support: stand-ins that let SGLang import and serve a small dense model on a CPU, without its CUDA kernels.

`path/` is a folder for `PYTHONPATH`; `harness engine up sglang` puts it there, on machines without a GPU only, and
nothing else ever does. It holds a module of the name of SGLang's kernel package and a `sitecustomize` that makes the
CUDA build of torchvision importable beside a CPU build of torch. Both refuse to load where torch is a CUDA build: a
stand-in that hid real kernels would be slow at best. Models with experts, speculative decoding and images are out of
scope.
"""
