"""Choice of experts in a transformers model: read from a pass, or given to it.

transformers has no argument for it. A router ends in one `topk` over a token's scores of all experts, and computes the
weights from what that returns. So replacing its result replaces the choice, and the weights stay the router's own, with
their gradient.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from harness.token_rows import RoutedExperts

Choose = Callable[[int, Tensor], Tensor]
"""From a layer and its router's own choice to the choice, int64 [tokens, top_k]."""

_ROUTER = re.compile(r"layers\.(\d+)\.(?:\w+\.)*(?:gate|router)$")


class Routers:
    """Routers of a causal model, by layer."""

    def __init__(self, model: Any) -> None:
        found = ((_ROUTER.search(name), name, module) for name, module in model.named_modules())
        self._modules = {
            int(match[1]): module
            for match, name, module in found
            if match and hasattr(model.get_submodule(name.rpartition(".")[0]), "experts")
        }
        self.shape: RoutedExperts | None = RoutedExperts.of_config(model.config.to_dict()) if self._modules else None
        """None for a dense model."""

    @contextmanager
    def choosing(self, choose: Choose) -> Iterator[None]:
        """Let `choose` decide in every pass of the block, including those that a backward pass repeats."""
        assert self.shape is not None
        for layer, module in self._modules.items():
            choice = _TopK(self.shape, partial(choose, layer))
            module.forward = partial(_route, module.forward, choice)
        try:
            yield
        finally:
            for module in self._modules.values():
                del module.forward  # the class's is behind it

    @contextmanager
    def proving(self) -> Iterator[None]:
        """Take the model for a dense one unless the passes of the block show the choice of each router."""
        seen: set[int] = set()

        def note(layer: int, own: Tensor) -> Tensor:
            seen.add(layer)
            return own

        with nullcontext() if self.shape is None else self.choosing(note):
            yield
        if seen != self._modules.keys():
            self.shape = None


class _TopK(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    def __init__(self, shape: RoutedExperts, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._shape = shape
        self._choose = choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        # Group-limited routers call it before over groups, with other shapes.
        if func not in (torch.topk, Tensor.topk) or args[0].shape != (len(args[0]), self._shape.experts):
            return result
        experts = self._choose(result.indices)
        return torch.return_types.topk((args[0].gather(-1, experts), experts))


def _route(forward: Callable[..., Any], choice: _TopK, *args: Any, **kwargs: Any) -> Any:
    with choice:
        return forward(*args, **kwargs)
