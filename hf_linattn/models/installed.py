"""Which copy of this code runs: that of an installed package, or one that a portable checkpoint carries."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from types import ModuleType

from packaging.version import Version

PACKAGE = "hf_linattn"


def is_carried() -> bool:
    """Whether this code was read from a checkpoint."""
    return __name__.partition(".")[0] != PACKAGE


@functools.cache
def installed_package(version: str) -> ModuleType | None:
    """The installed package, imported, where there is one of at least `version`; `None` where there is not.

    It serves a portable checkpoint better than the code that the checkpoint carries: it has the kernels, and a process
    keeps one copy of every class. Its version is asked of its metadata first, so that an older one is not imported.
    """
    try:
        if Version(importlib.metadata.version(PACKAGE)) < Version(version):
            return None
        return importlib.import_module(PACKAGE)
    except ImportError:  # which is also what the metadata of no package raises
        return None


__all__ = ["installed_package", "is_carried"]
