"""Make torchvision importable with a CPU torch, for a local SGLang. Test support.

torchvision registers operators in a CUDA extension, which does not load here. Its Python part only needs the schemas of
two, declared right before it is imported.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_OPERATORS = ("nms", "qnms")
_ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_declared: list[object] = []  # torch forgets operators whose library object is collected


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Declare the operators when torchvision is imported."""
        if fullname == "torchvision" and not _declared:
            _declare_operators()
        return None


def _declare_operators() -> None:
    import torch

    if torch.version.cuda is not None:
        raise ImportError(
            "server_patch/sglang_cpu/path is for CPU builds of torch, this is a CUDA build: remove it from PYTHONPATH"
        )
    library = torch.library.Library("torchvision", "FRAGMENT")
    _declared.append(library)
    for name in _OPERATORS:
        library.define(f"{name}{_ARGUMENTS}")


def _run_next() -> None:
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


sys.meta_path.insert(0, _BeforeTorchvision())
_run_next()
