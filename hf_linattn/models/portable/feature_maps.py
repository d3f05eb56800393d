"""The feature map that a user registered: its module travels with the checkpoint."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import sys

from transformers import PreTrainedModel

from ...ops import FEATURE_MAPS, FeatureMap
from .rewrite import PACKAGE, Import, file_of, flat_import, imports_of, rewritten, statements


def users_maps(model: PreTrainedModel) -> dict[str, type[FeatureMap]]:
    """The maps of the model that are not this package's, by the name they are registered under."""
    used = {type(module) for module in model.modules() if isinstance(module, FeatureMap)}
    return {
        name: cls
        for name, cls in sorted(FEATURE_MAPS.items())
        if (cls in used or name == model.config.feature_map) and cls.__module__.split(".")[0] != PACKAGE
    }


def source_of(name: str, cls: type[FeatureMap]) -> str:
    """The source of the module that defines the map `name`, whose imports from this package are plain names.

    Raises:
        ValueError: it has no file, would run a script, or needs modules that are nowhere but here.
    """
    if cls.__module__ == "__main__":
        raise ValueError(
            f"feature_map={name!r}: {cls.__qualname__} is defined in the script or session that runs (__main__), which "
            "a checkpoint cannot carry; move it into a module file and import it"
        )
    module = sys.modules.get(cls.__module__)
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        source = None
    if source is None or getattr(module, cls.__qualname__, None) is not cls:
        raise ValueError(
            f"feature_map={name!r}: the source of {cls.__module__}.{cls.__qualname__} cannot be found, so a checkpoint "
            "cannot carry it; define the class at the top level of a module file"
        )
    where = f"feature_map={name!r}: its module {cls.__module__}"
    local = _local_modules(source)
    if local:
        raise ValueError(
            f"{where} imports {', '.join(local)}, which no installed package provides; put all of it into one module"
        )
    for node in statements(source):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == PACKAGE for alias in node.names):
            raise ValueError(f"{where} has `{ast.unparse(node)}`; write `from {PACKAGE} import ...`, the names it uses")
        for brought in imports_of(node, ""):
            if brought.name is None or brought.name == "*":
                raise ValueError(f"{where} has `{ast.unparse(node)}`; import the names it uses")
    return source


def parts_used(source: str) -> list[str]:
    """The modules of this package that define what `source` imports from it."""
    return sorted({_defining(brought).module for node in statements(source) for brought in imports_of(node, "")})


def flat_source(source: str, flat: dict[str, str], choice: str, version: str) -> str:
    """`source` for the flat folder: names of this package come from its installed copy, or else from beside.

    Args:
        flat: the file of every module of this package.
        choice: the file of `installed_package`.
    """

    def write(brought: list[Import]) -> list[str]:
        lines = [f"from .{choice} import installed_package", f'if installed_package("{version}") is None:']
        lines += [f"    {line}" for line in flat_import([_defining(item) for item in brought], flat)]
        lines += ["else:", "    from importlib import import_module"]
        for item in brought:
            lines.append(f'    {item.alias or item.name} = import_module("{item.module}").{item.name}')
        return lines

    return rewritten(source, "", write)


def _defining(brought: Import) -> Import:
    """The same name where it is defined, if it was taken from the package itself, whose public names stay behind."""
    if brought.module != PACKAGE:
        return brought
    for node in statements(file_of(PACKAGE).read_text(encoding="utf-8")):
        for item in imports_of(node, PACKAGE):
            if (item.alias or item.name) == brought.name:
                return Import(item.module, item.name, brought.alias or brought.name)
    raise ValueError(f"from {PACKAGE} import {brought.name}: there is no such name")


def _local_modules(source: str) -> list[str]:
    """What the source imports that neither Python nor an installed distribution provides."""
    found = set()
    for node in statements(source):
        if isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
        else:
            found |= {alias.name for alias in node.names}
    installed = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), PACKAGE}
    return sorted(name for name in found if name.split(".")[0] not in installed)
