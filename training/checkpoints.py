"""Checkpoints that are either whole or absent: written beside their place, then renamed into it."""

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError

from config import ConfigError, RunConfig

STATE = "training_state.json"
# Tied weights are stored once; accelerate reports that as a warning at every checkpoint.
logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
# What may change between a run and its continuation; anything else would make it another run.
FREE = {
    "max_steps",
    "resume",
    "output_dir",
    "save_steps",
    "keep_checkpoints",
    "eval_steps",
    "eval_batch_size",
    "logging_steps",
}
FREE |= {"tracker", "baselines", "cpu_threads", "merge_lora"}


class TrainingStopped(RuntimeError):
    """Training cannot or shall not go on; one line says why."""

    def __init__(self, why: str, exit_code: int = 1):
        super().__init__(why)
        self.exit_code = exit_code


def list_checkpoints(output_dir: Path) -> list[Path]:
    """The complete ones, oldest first."""
    return sorted(path.parent for path in (output_dir / "checkpoints").glob(f"step-*/{STATE}"))


def find_checkpoint(config: RunConfig, is_main: bool) -> Path | None:
    """The checkpoint that `resume` means, if there is one."""
    output_dir = Path(config.output_dir)
    if is_main:  # what a killed run left half-written
        for leftover in (output_dir / "checkpoints").glob("unfinished-*"):
            shutil.rmtree(leftover)
    if config.resume == "restart":
        if is_main:
            shutil.rmtree(output_dir / "checkpoints", ignore_errors=True)
        return None
    if config.resume == "auto":
        return next(reversed(list_checkpoints(output_dir)), None)
    path = Path(config.resume)
    if not (path / STATE).is_file():
        raise ConfigError(f"resume is {config.resume!r}; choose auto, restart, or a folder that holds {STATE}")
    return path


def save_checkpoint(accelerator: Accelerator, config: RunConfig, state: dict[str, Any]) -> None:
    """Writes everything that the next step depends on; drops all but the last `keep_checkpoints`.

    Raises:
        TrainingStopped: the disk is full, or cannot be written; the checkpoints before are as they were.
    """
    folder = Path(config.output_dir) / "checkpoints"
    name = f"step-{state['step']:08d}"
    temporary = folder / f"unfinished-{name}"
    with whole_or_absent(config, f"step {state['step']}: the checkpoint", temporary):
        accelerator.save_state(str(temporary), safe_serialization=True)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (temporary / STATE).write_text(json.dumps(state))
    if accelerator.is_main_process:
        discard(folder / name)
        temporary.rename(folder / name)
        for old in list_checkpoints(Path(config.output_dir))[: -config.keep_checkpoints]:
            discard(old)
    accelerator.wait_for_everyone()


@contextmanager
def whole_or_absent(config: RunConfig, what: str, temporary: Path | None = None) -> Iterator[None]:
    """Says in one line that something could not be written, and removes what there is of it in `temporary`."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(config.output_dir).free / 2**20
        kept = list_checkpoints(Path(config.output_dir))
        why = " ".join(str(error).split())[:200]
        raise TrainingStopped(
            f"{what} could not be written ({why}; {free:,.0f} MiB are free in {config.output_dir}); "
            f"last good checkpoint: {kept[-1] if kept else None}"
        ) from error


def discard(checkpoint: Path) -> None:
    """Renames before deleting, so that a kill in between leaves no checkpoint that only looks whole."""
    if checkpoint.exists():
        shutil.rmtree(checkpoint.rename(checkpoint.with_name(f"unfinished-deletion-{checkpoint.name}")))


def load_checkpoint(accelerator: Accelerator, config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Restores model, optimizer, schedule and random numbers; refuses a checkpoint of another recipe."""
    state = json.loads((path / STATE).read_text())
    changed = {
        k: (state["config"].get(k), v) for k, v in config.items() if k not in FREE and state["config"].get(k) != v
    }
    if changed:
        listed = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())
        raise ConfigError(f"{path} was made by another recipe ({listed}); use resume: restart, or another output_dir")
    accelerator.load_state(str(path))
    return state


def merged_weights(accelerator: Accelerator, model) -> dict[str, Any]:
    """The weights of all processes as one state dict (on the main process), tied ones once.

    Merging shards gives each name a tensor of its own, so that they no longer look tied.
    """
    tied = accelerator.unwrap_model(model).all_tied_weights_keys
    return {name: weight for name, weight in accelerator.get_state_dict(model).items() if name not in tied}
