"""A text to train on, a recipe for it, and a clean accelerate for every run inside one process."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

import pretrain

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    """120 short documents of different lengths, a few of them not ASCII."""
    path = tmp_path / "corpus.jsonl"
    with path.open("w") as file:
        for i in range(120):
            text = f"line {i}: " + "abc déf " * (1 + i % 7) + ("終わり" if i % 5 == 0 else "end")
            file.write(json.dumps({"text": text, "number": i}) + "\n")
    return path


@pytest.fixture
def arguments(tmp_path: Path, corpus_file: Path):
    """Command-line arguments of a small run; keywords replace or add fields."""

    def make(**changes) -> list[str]:
        fields = {
            "model_config": {"model_type": "llama", **TINY},
            "dataset": corpus_file,
            "held_out_fraction": 0.2,
            "block_size": 48,
            "batch_size": 2,
            "max_steps": 6,
            "warmup_steps": 2,
            "learning_rate": 0.01,
            "cpu_threads": 1,
            "logging_steps": 1,
            "eval_steps": 100,
            "save_steps": 100,
            "tracker": "none",
            "output_dir": tmp_path / "run",
        } | changes
        given = {k: json.dumps(v) if isinstance(v, dict) else str(v) for k, v in fields.items() if v is not None}
        return [part for name, value in given.items() for part in (f"--{name}", value)]

    return make


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
