"""A text to train on and a small recipe for it."""

import json
from pathlib import Path

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


def write_corpus(path: Path) -> Path:
    """120 short documents of different lengths, a few of them not ASCII."""
    with path.open("w") as file:
        for i in range(120):
            text = f"line {i}: " + "abc déf " * (1 + i % 7) + ("終わり" if i % 5 == 0 else "end")
            file.write(json.dumps({"text": text, "number": i}) + "\n")
    return path


def small_run(corpus: Path, output_dir: Path, **changes) -> list[str]:
    """Command-line arguments of a small run; keywords replace or add fields."""
    fields = {
        "model_config": {"model_type": "llama", **TINY},
        "dataset": corpus,
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
        "output_dir": output_dir,
    } | changes
    given = {k: json.dumps(v) if isinstance(v, dict) else str(v) for k, v in fields.items() if v is not None}
    return [part for name, value in given.items() for part in (f"--{name}", value)]
