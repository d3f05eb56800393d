"""What every measurement says about itself: how it was run, on what code, on what machine."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

SCHEMA_VERSION = 1  # of result files; a change that old readers would misread makes it one more
PACKAGES = (
    "hf-linattn",
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "safetensors",
    "numpy",
    "triton",
    "fla-core",
)


def record(seed: int | None = None, launcher: str = "python") -> dict[str, Any]:
    """The record that goes into a result file: command, commit, versions, hardware, seed and date.

    Args:
        seed: the seed of the run.
        launcher: what started the script, where it was not plain `python`.
    """
    return {
        "command": command(launcher),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
        "seed": seed,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def command(launcher: str = "python") -> str:
    """The command line that runs this again, with the script relative to the working directory."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        program = ["-m", spec.name.removesuffix(".__main__")]
    else:
        script = Path(sys.argv[0]).resolve()
        program = [str(script.relative_to(Path.cwd())) if script.is_relative_to(Path.cwd()) else script.name]
        if script.suffix != ".py" and sys.argv[0] != "-c":  # an installed command starts by its own name
            return shlex.join([script.name, *map(portable, sys.argv[1:])])
    return f"{launcher} {shlex.join([*program, *map(portable, sys.argv[1:])])}"


def portable(argument: str) -> str:
    """An argument as it would be given elsewhere: a path outside of the working directory loses its folders."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def commit() -> str | None:
    """The git commit of this package's source, `-dirty` if tracked files differ; None where it is not in git."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # installed inside somebody else's repository?
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": memory_gib(),
        "gpus": gpus,
    }


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None


def write_json(path: str | os.PathLike, result: dict[str, Any]) -> None:
    """Writes a result file with its schema version, making its folder; see `write_whole`."""
    write_whole(path, json.dumps({"schema_version": SCHEMA_VERSION} | result, indent=1) + "\n")


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """The result that `write_json` was given.

    Raises:
        ValueError: one line that names the file, if it is not a whole JSON object or is of another schema version.
    """
    path = Path(path)
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one too
        raise ValueError(f"{path}: not a whole JSON file ({error})") from None
    if not isinstance(result, dict):
        raise ValueError(f"{path}: holds a {type(result).__name__}; a result is a JSON object")
    version = result.pop("schema_version", 1)  # the first files did not say it
    if version != SCHEMA_VERSION:
        raise ValueError(f"{path}: schema_version is {version!r}; this release reads {SCHEMA_VERSION}")
    return result


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Writes a file, making its folder; an interrupt or an error leaves the old file or the new one, whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
