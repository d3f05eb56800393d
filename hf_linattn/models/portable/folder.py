"""Files that take their place in a folder together, or not at all."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GENERATED = "# Generated from hf_linattn "  # how a line of every file of code begins
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@contextmanager
def staged(directory: str | os.PathLike) -> Iterator[Path]:
    """An empty folder, whose files move into `directory` when the block ends without an error.

    Other files of `directory` stay, but for those of an earlier save: its weights would be read in place of new ones
    that are cut into other parts, and code that nothing imports any more only misleads.
    """
    directory = Path(directory).resolve()
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"save_directory={str(directory)!r} is a file; choose a folder")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # on the file system of the folder, which may be a mount of its own
    near = directory if directory.exists() else directory.parent
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=near) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        old.mkdir()
        yield new
        if directory.exists():
            _replace(directory, new, old)
        else:
            os.replace(new, directory)


def _replace(directory: Path, new: Path, old: Path) -> None:
    """Move the files of `new` into `directory`, and what they replace into `old`; back again at an error."""
    names = sorted(os.listdir(new))
    stale = [path.name for path in directory.iterdir() if path.name not in names and _is_saved(path)]
    placed = []
    try:
        for name in [*stale, *names]:
            if (directory / name).exists():
                os.replace(directory / name, old / name)
        for name in names:
            os.replace(new / name, directory / name)
            placed.append(name)
    except BaseException:
        for name in placed:
            (directory / name).unlink()
        for name in os.listdir(old):
            os.replace(old / name, directory / name)
        raise


def _is_saved(path: Path) -> bool:
    if path.suffix == ".py":
        return any(line.startswith(GENERATED) for line in path.read_text(errors="ignore").splitlines()[:10])
    return WEIGHTS.fullmatch(path.name) is not None
