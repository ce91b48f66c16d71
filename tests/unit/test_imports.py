"""No module of the harness imports, however late, one that imports it."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

from tests.checkout import ROOT


def module_of(name: str, known: set[str]) -> str:
    """The module that an imported name is, or is in."""
    return name if name in known else name.rpartition(".")[0]


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Names that are imported at the top, in functions and for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_two_modules_import_each_other() -> None:
    """The front door names them all, for type checkers, and is left out."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in ("harness", "server_patch")
        for path in (ROOT / folder).rglob("*.py")
    }
    names = {*files} - {"harness"}
    graph = {
        name: {module_of(each, names) for each in imports_of(ast.parse(files[name].read_bytes()))} & names - {name}
        for name in names
    }
    try:
        order = [*TopologicalSorter(graph).static_order()]
    except CycleError as error:
        raise AssertionError(f"a circle: {' -> '.join(error.args[1])}") from None

    assert {*order} == names
    assert order.index("harness.errors") < order.index("harness.server.app") < order.index("harness.cli.main")
