"""Which modules of the package import which."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import lookaside

PACKAGE = Path(lookaside.__file__).parent


def imports() -> dict[str, set[str]]:
    """What each module imports of the package, in functions and for types too."""
    paths = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    modules = {name.removesuffix(".__init__") for name in paths} | {"lookaside._native"}
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        of = found.setdefault(name.removesuffix(".__init__"), set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                of.update(each.name for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{each.name}" for each in node.names}
                of.update(names & modules or {node.module})
        of &= modules
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter(imports()).prepare()  # raises CycleError


def test_the_roles_do_not_import_each_other() -> None:
    found = imports()
    roles = [
        {name for name in found if f"{name}.".startswith(f"lookaside.{role}.")}
        for role in ("scheduler", "worker")
    ]
    for role, other in (roles, reversed(roles)):
        reached, left = set(role), list(role)
        while left:
            for name in found.get(left.pop(), ()):
                if name not in reached:
                    reached.add(name)
                    left.append(name)
        assert len(role) > 5 and not reached & other
