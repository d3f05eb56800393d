"""Where data comes from: rows and documents of local files, of hub datasets, and of Python's own library."""

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import ConfigError, TextConfig

# Not library source: installed packages, bundled wheels, and the test suites that many distributions leave out.
NOT_STDLIB = {"site-packages", "dist-packages", "ensurepip", "__pycache__", "test", "tests", "idle_test"}
SUFFIXES = (".txt", ".jsonl", ".parquet")
Row = dict[str, Any]
WHOLE_FILE = ""  # the column of a text file: no real one has this name


@dataclass(frozen=True)
class Document:
    """A text and the name that decides on which side of the split it falls."""

    name: str
    text: str


def read_documents(source: str, config: TextConfig) -> Iterator[Document]:
    """The documents of `python_stdlib`, of local files (path, folder, glob) or of a hub dataset, in a fixed order."""
    if source == "python_stdlib":
        return stdlib_documents()
    return row_documents(source, read_rows(source, config), config.text_column)


def stdlib_documents() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_STDLIB.isdisjoint(name.parts) and (text := path.read_bytes().decode("utf-8", "replace")):
            yield Document(name.as_posix(), text)


def read_rows(source: str, config: TextConfig) -> Iterator[tuple[str, Row]]:
    """(name, row) of local files or of a hub dataset, in a fixed order; a text file is one row, without a column."""
    if paths := local_files(source):
        return file_rows(paths)
    if glob.has_magic(source) or Path(source).is_dir() or source.startswith((".", "/", "~")):
        raise ConfigError(f"dataset {source!r}: no txt, jsonl or parquet file there")
    return hub_rows(source, config)


def local_files(source: str) -> list[Path]:
    if Path(source).is_dir():
        return sorted(p for p in Path(source).rglob("*") if p.suffix in SUFFIXES)
    return [Path(source)] if Path(source).is_file() else sorted(map(Path, glob.glob(source, recursive=True)))


def origin_of(source: str) -> str:
    """Whose a dataset is, for results to say: `python` (its library), `files` of one's own, or the `hub`."""
    if source == "python_stdlib":
        return "python"
    return "files" if local_files(source) else "hub"


def file_rows(paths: list[Path]) -> Iterator[tuple[str, Row]]:
    for path in paths:
        if path.suffix not in (".jsonl", ".parquet"):
            yield path.name, {WHOLE_FILE: path.read_bytes().decode("utf-8", "replace")}
            continue
        rows = jsonl_rows(path) if path.suffix == ".jsonl" else parquet_rows(path)
        for number, row in enumerate(rows):
            yield f"{path.name}:{number}", row


def jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number}: not JSON ({error.msg})") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, line {number}: a {type(row).__name__}, not an object with columns")
            yield row


def parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    for batch in ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def hub_rows(source: str, config: TextConfig) -> Iterator[tuple[str, Row]]:
    from datasets import load_dataset

    streaming = getattr(config, "streaming", False)
    try:
        rows = load_dataset(source, config.dataset_config, split=config.dataset_split, streaming=streaming)
    except Exception as error:  # datasets raises a different class for every way to fail
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"dataset {source!r} is neither a file here nor a dataset I can load: {first_line}"
        ) from error
    for number, row in enumerate(rows):
        yield f"{source}:{number}", row


def row_documents(source: str, rows: Iterable[tuple[str, Row]], text_column: str) -> Iterator[Document]:
    for name, row in rows:
        text = row[WHOLE_FILE] if WHOLE_FILE in row else column(source, row, text_column)
        if not isinstance(text, str | None):
            raise ConfigError(f"dataset {source!r}: column {text_column!r} holds {type(text).__name__}, not text")
        if text:
            yield Document(name, text.encode("utf-8", "replace").decode())  # no lone surrogates


def column(source: str, row: Row, name: str) -> Any:
    if name not in row:
        raise ConfigError(f"dataset {source!r} has no column {name!r}; its columns: {', '.join(row)}")
    return row[name]


def is_held_out(name: str, config: TextConfig) -> bool:
    """Whether a row or document of `dataset` is kept from training; none is where `eval_dataset` is given."""
    return config.eval_dataset is None and split_hash(name) < config.held_out_fraction


def split_hash(name: str) -> float:
    """A number in [0, 1) that depends on the name alone: the same on every machine, in every run."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
