"""Functions by their paths."""

import importlib


def load_function(path):
    """What `path` names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
