"""Attach the guard where the engine's environment cannot install this distribution: put this folder on PYTHONPATH.

Python imports `sitecustomize` first in every process. This one patches an engine's scheduler on import.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent
_PACKAGE = _HERE.parents[1]
_PLUGINS = {
    "sglang.srt.managers.scheduler": "server_patch.repeat_terminate.sglang_plugin",
    "vllm.v1.core.sched.scheduler": "server_patch.repeat_terminate.vllm_plugin",
}


class _Patching(Loader):
    """Loader that lets the plugin patch a module."""

    def __init__(self, loader: Loader, plugin: str) -> None:
        self._loader = loader
        self._plugin = plugin

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import_module(self._plugin).register()


class _BesideSchedulers(MetaPathFinder):
    """Finder that gives engine schedulers a patching loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        plugin = _PLUGINS.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if plugin else None
        if spec is not None and spec.loader is not None and plugin is not None:
            spec.loader = _Patching(spec.loader, plugin)
        return spec


# Provides `server_patch` and nothing next to it.
def _provide_package() -> None:
    name = _PACKAGE.name
    if find_spec(name) is None:
        spec = spec_from_file_location(name, _PACKAGE / "__init__.py", submodule_search_locations=[str(_PACKAGE)])
        _load(spec, name)


def _run_next() -> None:
    # Python imports one `sitecustomize` only, so the one that this one hides is run from here.
    places = [Path(entry or ".").resolve() for entry in sys.path]
    behind = places.index(_HERE) + 1 if _HERE in places else 0
    others = [entry for entry, place in zip(sys.path[behind:], places[behind:], strict=True) if place != _HERE]
    _load(PathFinder.find_spec("sitecustomize", others), None)


def _load(spec: ModuleSpec | None, name: str | None) -> None:
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        if name is not None:
            sys.modules[name] = module
        spec.loader.exec_module(module)


# Another `sitecustomize` may run this one a second time.
if not any(type(finder).__name__ == _BesideSchedulers.__name__ for finder in sys.meta_path):
    _provide_package()
    sys.meta_path.insert(0, _BesideSchedulers())
    _run_next()
