"""What a card may use: the result files of a folder, and nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..benchmark.record import read_json

RESULTS = "results.json"
BESIDE = ("generation.json", "batching.json", "modes.json", "throughput.json", "benchmark*.json")


class BadResult(ValueError):
    """A result file that a card cannot be written from; the message names it."""


class Fields(dict):
    """An object of a result file. Asked for a field that it lacks, it says which and where."""

    def __init__(self, items: Any, where: str):
        super().__init__(items)
        self.where = where

    def __missing__(self, name: str) -> Any:
        raise BadResult(f"{self.where}{name} is missing")


def named(value: Any, file: str, path: str = "") -> Any:
    """`value` with every object in it as `Fields`."""
    if isinstance(value, dict):
        where = f"{file}: the field {path}"
        return Fields({name: named(each, file, f"{path}{name}.") for name, each in value.items()}, where)
    if isinstance(value, list):
        return [named(each, file, f"{path}{i}.") for i, each in enumerate(value)]
    return value


@dataclass(frozen=True)
class Part:
    """A result of one kind, and the name of the file that holds it."""

    file: str
    fields: Fields


@dataclass(frozen=True)
class Evidence:
    """The result files of a folder by name."""

    folder: Path
    files: dict[str, Fields]

    @cached_property
    def parts(self) -> list[Part]:
        """Each file, and each result inside a file of several."""
        found = []
        for file, whole in self.files.items():
            inside = (value for value in whole.values() if isinstance(value, dict) and "kind" in value)
            found += [Part(file, fields) for fields in (whole, *inside)]
        return found

    @contextmanager
    def reading(self, part: Part) -> Iterator[None]:
        """Names the file where a field is there but is not what it should be."""
        try:
            yield
        except BadResult:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            path, kind = self.folder / part.file, part.fields["kind"]
            raise BadResult(f"{path}: a field of kind {kind!r} is not as it should be: {error}") from error

    def of_kind(self, kind: str) -> list[Part]:
        return [part for part in self.parts if part.fields["kind"] == kind]

    def records(self) -> list[tuple[str, Fields]]:
        """(file, record) of every run, the first made first; parts that a run measured together are one."""
        runs = {}
        for file, whole in self.files.items():
            for fields in walk(whole):
                if "record" in fields:
                    record = fields["record"]
                    runs.setdefault((file, record["command"], record["commit"]), (file, record))
        return sorted(runs.values(), key=lambda run: run[1]["date"])

    def devices(self) -> set[str]:
        """Where anything was measured; a training run, which does not say, counts by the GPUs that it had."""
        named = {fields["device"] for whole in self.files.values() for fields in walk(whole) if "device" in fields}
        trained = (part.fields["record"]["hardware"]["gpus"] for part in self.of_kind("train"))
        return {device.split(":")[0] for device in named} | ({"cuda"} if any(trained) else set())


def walk(fields: Fields) -> Iterator[Fields]:
    """The object and all objects inside it, but for those in lists: rows have no record."""
    yield fields
    for value in fields.values():
        if isinstance(value, dict):
            yield from walk(value)


def read_evidence(folder: Path) -> Evidence:
    """All result files of the folder that a card tells of; ValueError of one line if one is no good."""
    if not folder.is_dir():
        raise BadResult(f"{folder}: there is no such folder")
    if not (folder / RESULTS).is_file():
        raise BadResult(f"{folder}: there is no {RESULTS} in it; training/demo.py writes one")
    paths = [folder / RESULTS, *(path for pattern in BESIDE for path in sorted(folder.glob(pattern)))]
    files = {path.name: named(read_json(path), str(path)) for path in paths}
    for path in paths:
        if not isinstance(files[path.name].get("kind"), str):
            raise BadResult(f"{path}: no result of this package, which says its kind in a field 'kind'")
    return Evidence(folder, files)
