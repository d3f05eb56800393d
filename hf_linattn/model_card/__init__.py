"""Model cards: what a folder of result files says of a model, as the README.md that the hub shows.

`sections` says what a card tells, in which order, and which function writes each kind of result; `limits` and
`metadata` likewise. A new kind of result is a function in each of them that has something to say of it.
"""

import argparse
import os
from pathlib import Path

from huggingface_hub import ModelCard

from ..benchmark.record import write_whole
from .evidence import read_evidence
from .metadata import metadata
from .sections import write_sections

__all__ = ["add_arguments", "render_card", "write_card"]

NAME = "README.md"


def render_card(folder: str | os.PathLike) -> ModelCard:
    """The card of the model that the result files in `folder` measured; every number in it is theirs.

    The same files give the same card, byte for byte. Links to files and figures are relative to `folder`; a figure that
    is not there is not linked.

    Args:
        folder: holds `results.json` as training/demo.py writes it; other results beside it (`generation.json`,
            `batching.json`, `modes.json`, `throughput.json`, `benchmark*.json`) are told as well.

    Returns:
        A `huggingface_hub.ModelCard`: `str(card)` is the file, `card.data` its metadata; `card.push_to_hub(id)` sends
        it to the hub, which validates it first.

    Raises:
        ValueError: one line that names the file, if there is no `results.json`, a file is not a whole result of this
            schema version or lacks a field, or no model is described.
    """
    evidence = read_evidence(Path(folder))
    text = write_sections(evidence)
    return ModelCard(f"---\n{metadata(evidence).to_yaml()}\n---\n\n{text}\n")


def write_card(folder: str | os.PathLike, out: str | os.PathLike | None = None) -> Path:
    """Writes `render_card(folder)`, whole or not at all; returns where.

    Args:
        folder: as for `render_card`.
        out: the file to write; by default README.md in `folder`.

    Raises:
        ValueError: one line, as for `render_card` or if `out` cannot be written.
    """
    path = Path(folder) / NAME if out is None else Path(out)
    card = render_card(folder)
    try:
        write_whole(path, str(card))
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def check_card(folder: Path, path: Path) -> None:
    """A ValueError of one line unless the file at `path` is the card of `folder`, byte for byte."""
    card = str(render_card(folder)).encode()
    try:
        current = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if current != card:
        raise ValueError(f"{path} is not what the result files say: run this without --check")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a folder with results.json, as training/demo.py writes it")
    parser.add_argument("--out", type=Path, help=f"file to write (default: {NAME} in FOLDER, where its links hold)")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the card is not its files'")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """The command: write the card, or say whether it is up to date."""
    if arguments.check:
        path = arguments.out or arguments.folder / NAME
        check_card(arguments.folder, path)
        print(f"{path} is up to date")
    else:
        print(f"wrote {write_card(arguments.folder, arguments.out)}")
