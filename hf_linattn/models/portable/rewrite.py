"""Modules of this package as files of one flat folder, which is all that transformers loads from a checkpoint.

transformers copies the files that relative imports of the form `from .name import ...` lead to, from file to file. So
every module gets a file of its own, imports are rewritten to that form, and what no import names stays behind: the
kernels, which are found by name on first use.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT.name


class Import(NamedTuple):
    """One name that an import statement brings: from a module of this package, or that module itself."""

    module: str
    name: str | None  # None: the module
    alias: str | None


def file_of(module: str) -> Path | None:
    """The file of a module of this package, if there is one."""
    path = ROOT.joinpath(*module.split(".")[1:])
    choices = (path / "__init__.py", path.with_suffix(".py") if path != ROOT else path)
    return next((choice for choice in choices if choice.is_file()), None)


@functools.cache
def statements(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """The import statements of a source, inside functions too, in their order."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return tuple(sorted(found, key=lambda node: (node.lineno, node.col_offset)))


def imports_of(node: ast.Import | ast.ImportFrom, package: str) -> list[Import]:
    """What `from ... import ...` brings from this package; nothing for other import statements.

    Args:
        package: what a leading dot stands for in the module that holds the statement.
    """
    if isinstance(node, ast.Import):
        return []
    if node.level:
        parts = package.split(".")
        base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
    else:
        base = node.module
    if base.split(".")[0] != PACKAGE:
        return []
    found = []
    for alias in node.names:
        whole = f"{base}.{alias.name}"
        is_module = file_of(whole) is not None
        found.append(Import(whole, None, alias.asname or alias.name) if is_module else Import(base, *_pair(alias)))
    return found


def modules_from(roots: Iterable[str]) -> dict[str, str]:
    """The source of the modules `roots` and of all modules of this package that they import, by module."""
    found: dict[str, str] = {}
    queue = list(roots)
    while queue:
        module = queue.pop()
        if module in found:
            continue
        path = file_of(module)
        if path is None:
            raise ValueError(f"{module} is no module of {PACKAGE}")
        found[module] = path.read_text(encoding="utf-8")
        package = package_of(module)
        for node in statements(found[module]):
            queue += [brought.module for brought in imports_of(node, package)]
    return dict(sorted(found.items()))


def package_of(module: str) -> str:
    """What a leading dot stands for in a module of this package."""
    return module if file_of(module).name == "__init__.py" else module.rpartition(".")[0]


def flat_name(module: str, taken: Iterable[str], prefix: str = "") -> str:
    """A file name (without .py) that is not `taken`: `hf_linattn.ops.chunk` becomes `ops_chunk`."""
    name = prefix + module.removeprefix(f"{PACKAGE}.").replace(".", "_")
    while name in taken:
        name += "_"
    return name


def rewritten(source: str, package: str, write: Callable[[list[Import]], list[str]]) -> str:
    """`source`, where `write` gives the lines that stand for each import from this package."""
    lines = source.encode().splitlines(keepends=True)  # ast counts bytes
    for node in reversed(statements(source)):
        brought = imports_of(node, package)
        if not brought:
            continue
        first, last = node.lineno - 1, node.end_lineno - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        indent = re.match(rb"\s*", before).group().decode()
        text = f"\n{indent}".join(write(brought))
        lines[first : last + 1] = [before + text.encode() + after]
    return b"".join(lines).decode()


def flat_import(brought: list[Import], flat: dict[str, str]) -> list[str]:
    """The import of a flat folder, in the form that transformers finds."""
    lines = []
    for module in dict.fromkeys(item.module for item in brought):
        items = [item for item in brought if item.module == module]
        names = ", ".join(_text(item) for item in items if item.name is not None)
        if names:
            lines.append(f"from .{flat[module]} import {names}")
        for item in items:
            if item.name is None:  # `from . import module` alone would not make transformers copy its file
                lines.append(f"from .{flat[module]} import __name__ as _")
                lines.append(f"from . import {flat[module]} as {item.alias}")
    return lines


def _pair(alias: ast.alias) -> tuple[str, str | None]:
    return alias.name, alias.asname


def _text(item: Import) -> str:
    return item.name if item.alias is None else f"{item.name} as {item.alias}"
