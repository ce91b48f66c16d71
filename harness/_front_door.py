"""Front doors: packages whose public names load on first use, so that importing them costs milliseconds.

A front door imports each name under `TYPE_CHECKING` and lists it with its module in a table; `lazy_loader` reads the
table. A name is cached in the package after its first use.
"""

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_loader(namespace: dict[str, object], homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return a module's `__getattr__`, which raises `AttributeError` with similar names for an unknown one.

    `namespace` is the module's `globals()`; `homes` maps public names to the modules that define them.
    """

    def load(name: str) -> object:
        if name not in homes:
            from difflib import get_close_matches  # only a mistake pays for it

            near = [] if name.startswith("__") else get_close_matches(name, homes, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}{hint}", name=name)
        found: object = getattr(import_module(homes[name]), name)
        namespace[name] = found
        return found

    return load
