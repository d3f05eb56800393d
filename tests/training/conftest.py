"""A text to train on, a recipe for it, and a clean accelerate for every run inside one process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import pretrain
from recipes import small_run, write_corpus


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl")


@pytest.fixture
def arguments(tmp_path: Path, corpus_file: Path):
    """Command-line arguments of a small run; keywords replace or add fields."""
    return lambda output_dir=tmp_path / "run", **changes: small_run(corpus_file, output_dir, **changes)


@pytest.fixture(autouse=True)
def keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def fresh_accelerate() -> None:
    """accelerate's state is global: forget that of an earlier run in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run(arguments: list[str], main: Callable[[list[str]], None] = pretrain.main) -> dict:
    """Trains in this process, as a process of its own would. Returns the results."""
    fresh_accelerate()
    main(arguments)
    return json.loads((Path(arguments[arguments.index("--output_dir") + 1]) / "train_results.json").read_text())
