"""What the training scripts share: a start, an optimizer, the loop over steps, and every way in which it ends.

A step is some forward passes, one backward each, and an update. Its loss is the mean over all that it predicts, over
micro-batches and processes, so that accumulation and data parallelism change nothing but the speed.
"""

import contextlib
import itertools
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from safetensors.torch import save_file
from torch.utils.data import default_collate
from tqdm.auto import tqdm
from transformers import get_scheduler

from checkpoints import TrainingStopped, find_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from config import ConfigError, RunConfig
from data import IGNORE
from hf_linattn.benchmark.record import cores

Batch = dict[str, torch.Tensor]


@dataclass
class Run:
    """All that the loop works on.

    Fields:
        batches: micro-batches without end, on the device; `labels` holds IGNORE where nothing is predicted.
        loss_of: (model, batch, count) -> the sum of the losses of a batch over `count`.
        evaluate: () -> figures by name, the one that matters first.
        state: what a checkpoint keeps beside the weights; see `new_state`.
    """

    accelerator: Accelerator
    config: RunConfig
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    batches: Iterator[Batch]
    loss_of: Callable[[torch.nn.Module, Batch, torch.Tensor], torch.Tensor]
    evaluate: Callable[[], dict[str, float]]
    state: dict[str, Any]


# ---- before the first step ----


def run_script(name: str, main: Callable[[list[str]], None]) -> None:
    """Run a script on the command line's arguments; what stops it is one line and an exit code."""
    try:
        main(sys.argv[1:])
    except (ConfigError, TrainingStopped) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))


def start_accelerator(config: RunConfig) -> Accelerator:
    check_precision(config.mixed_precision)
    if config.tracker != "none" and find_spec(config.tracker) is None:
        raise ConfigError(f"{config.tracker} is not installed: pip install {config.tracker}, or set tracker: none")
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        step_scheduler_with_optimizer=False,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False),
        log_with=None if config.tracker == "none" else config.tracker,
        project_dir=config.output_dir,
    )
    set_threads(accelerator, config.cpu_threads)
    accelerator.init_trackers("log" if config.tracker == "tensorboard" else Path(config.output_dir).name)
    return accelerator


def check_precision(mixed_precision: str) -> None:
    if mixed_precision == "fp16" and not torch.cuda.is_available():
        raise ConfigError("mixed_precision fp16 needs a GPU; choose bf16 or no")


def set_threads(accelerator: Accelerator, cpu_threads: int) -> None:
    """On a CPU, share out the cores: accelerate launch leaves one thread unless told otherwise."""
    if accelerator.device.type == "cpu":
        torch.set_num_threads(cpu_threads or max(1, cores() // accelerator.num_processes))


def make_optimizer(model: torch.nn.Module, config: RunConfig, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        fused=device.type in ("cpu", "cuda"),
    )


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and other vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_schedule(optimizer: torch.optim.Optimizer, config: RunConfig):
    """The learning rate of every step, after a linear warm-up."""
    least = config.min_learning_rate_ratio
    decay_steps = math.ceil(config.decay_fraction * config.max_steps)
    name, options = {
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": least}),
        "wsd": ("warmup_stable_decay", {"num_decay_steps": decay_steps, "min_lr_ratio": least}),
        "constant": ("constant_with_warmup", None),
    }[config.schedule]
    return get_scheduler(
        name,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.max_steps,
        scheduler_specific_kwargs=options,
    )


def new_state(config: RunConfig) -> dict[str, Any]:
    return {"step": 0, "config": asdict(config), "losses": [], "evaluations": [], "tokens": 0, "seconds": 0.0}


def begin_or_resume(accelerator: Accelerator, config: RunConfig) -> dict[str, Any]:
    """The state of a new run, or that of the checkpoint which `resume` means, with weights and random numbers."""
    with accelerator.main_process_first():
        checkpoint = find_checkpoint(config, accelerator.is_main_process)
    if checkpoint is None:
        return new_state(config)
    state = load_checkpoint(accelerator, asdict(config), checkpoint)
    accelerator.print(f"resuming from {checkpoint}")
    if state["step"] > config.max_steps:
        raise ConfigError(f"{checkpoint} is past max_steps ({config.max_steps}); use resume: restart to train anew")
    return state


# ---- the loop ----


def train(run: Run) -> None:
    """Steps from `state["step"]` to `max_steps`; keeps `state` up to date.

    Raises:
        TrainingStopped: a loss or gradient that is not finite, a checkpoint that could not be written, SIGTERM or
            SIGINT. What is on disk is whole, and a run that is started again goes on from it.
    """
    accelerator, config, state, model = run.accelerator, run.config, run.state, run.model
    model.train()
    bar = tqdm(total=config.max_steps, initial=state["step"], desc="train", disable=not accelerator.is_main_process)
    started, earlier = time.perf_counter(), state["seconds"]
    window = (started, state["tokens"])
    with bar, Asked() as asked:
        for step in range(state["step"] + 1, config.max_steps + 1):
            micro_batches = list(itertools.islice(run.batches, config.gradient_accumulation_steps))
            count, is_asked = agree(accelerator, micro_batches, asked)
            if is_asked:
                stop_as_asked(run, asked)
            losses = forward_backward(run, micro_batches, count)
            loss = accelerator.reduce(losses.sum(), "sum").item()
            norm = accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            # fp16 gradients overflow now and then: the loss scaler skips that step and halves its scale.
            if not math.isfinite(loss) or (config.mixed_precision != "fp16" and not math.isfinite(norm)):
                raise TrainingStopped(explain(run, step, micro_batches, losses, math.isfinite(loss)))
            run.optimizer.step()
            if not accelerator.optimizer_step_was_skipped:
                run.scheduler.step()
            run.optimizer.zero_grad()

            now = time.perf_counter()
            state |= {"step": step, "tokens": state["tokens"] + int(count), "seconds": earlier + now - started}
            bar.update()
            last_step = step == config.max_steps
            if step % config.logging_steps == 0 or last_step:
                speed = (state["tokens"] - window[1]) / (now - window[0])
                window = (now, state["tokens"])
                state["losses"].append([step, loss])
                bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
                rate = run.scheduler.get_last_lr()[0]
                figures = {
                    "loss": loss,
                    "gradient_norm": float(norm),
                    "learning_rate": rate,
                    "tokens_per_second": speed,
                }
                accelerator.log(figures, step=step)
            if step % config.eval_steps == 0 or last_step:
                evaluate(run)
            if step % config.save_steps == 0 or last_step:
                save_checkpoint(accelerator, config, state)


def agree(accelerator: Accelerator, micro_batches: list[Batch], asked: "Asked") -> tuple[torch.Tensor, bool]:
    """How much a step predicts, over all micro-batches and processes, and whether one of them was asked to stop."""
    count = sum((batch["labels"] != IGNORE).sum() for batch in micro_batches)
    count, stops = accelerator.reduce(torch.stack([count, count.new_tensor(int(asked.signal is not None))]), "sum")
    return count, bool(stops)


def forward_backward(run: Run, micro_batches: list[Batch], count: torch.Tensor) -> torch.Tensor:
    """Adds the gradients of the mean loss over the whole step; this process's part of it, for each micro-batch.

    Dividing by the count of the whole step, over micro-batches and processes, makes accumulation exact: padding and
    document starts leave the micro-batches with different numbers of tokens.
    """
    losses = []
    for number, batch in enumerate(micro_batches, start=1):
        accumulating = number < len(micro_batches)
        with run.accelerator.no_sync(run.model) if accumulating else contextlib.nullcontext():
            loss = run.loss_of(run.model, batch, count)
            run.accelerator.backward(loss * run.accelerator.num_processes)  # gradients are averaged over processes
        losses.append(loss.detach().float())
    return torch.stack(losses)


def evaluate(run: Run) -> None:
    """Evaluate, and note it in the state, the log and on the screen."""
    run.model.eval()
    figures = run.evaluate()
    run.model.train()
    step = run.state["step"]
    run.state["evaluations"].append([step, figures])
    run.accelerator.log({f"held_out_{name}": value for name, value in figures.items()}, step=step)
    if run.accelerator.is_main_process and figures:
        listed = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())
        tqdm.write(f"step {step}: held-out {listed}")


def held_out_batches(
    accelerator: Accelerator, items: Sequence, batch_size: int, collate: Callable[[list], Batch] = default_collate
) -> Iterator[Batch]:
    """This process's batches of `items`, on its device. All processes have equally many, all full: what stands in for
    items beyond the last has no labels."""
    stride, first = batch_size * accelerator.num_processes, batch_size * accelerator.process_index
    for start in tqdm(range(0, len(items), stride), "evaluate", leave=False, disable=not accelerator.is_main_process):
        mine = [start + first + i for i in range(batch_size)]
        batch = collate([items[min(i, len(items) - 1)] for i in mine])
        batch["labels"][[i >= len(items) for i in mine]] = IGNORE
        yield {name: tensor.to(accelerator.device) for name, tensor in batch.items()}


def causal_loss(model: torch.nn.Module, batch: Batch, count: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of a causal language model over `count`."""
    return model(**batch, use_cache=False, num_items_in_batch=count).loss


@torch.no_grad()
def held_out_nats(accelerator: Accelerator, model: torch.nn.Module, blocks, batch_size: int) -> float:
    """What predicting all the labels of `blocks` costs, in nats."""
    nats = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    for batch in held_out_batches(accelerator, blocks, batch_size):
        nats += causal_loss(model, batch, torch.ones(()))
    return accelerator.reduce(nats, "sum").item()


# ---- how it ends ----


class Asked:
    """Whether SIGTERM or SIGINT has asked the run to stop; a second one ends it at once."""

    signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self):
        self.signal: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self):
        with contextlib.suppress(ValueError):  # only the main thread may listen
            self.before = {number: signal.signal(number, self.note) for number in self.signals}
        return self

    def note(self, number: int, frame: Any) -> None:
        self.signal = number
        self.restore()

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def __exit__(self, *_):
        self.restore()


def stop_as_asked(run: Run, asked: Asked) -> None:
    """Checkpoint what the last step left, and raise. The batches of the next are drawn again when the run goes on."""
    save_checkpoint(run.accelerator, run.config, run.state)
    name = signal.Signals(asked.signal).name if asked.signal is not None else "a signal to another process"
    at = list_checkpoints(Path(run.config.output_dir))[-1]
    raise TrainingStopped(
        f"{name} after step {run.state['step']}: go on from {at} with resume: auto", 128 + (asked.signal or 15)
    )


def explain(run: Run, step: int, micro_batches: list[Batch], losses: torch.Tensor, is_finite: bool) -> str:
    """Which batch gave a loss or gradient that is not finite; the batches of this process that did are kept."""
    config, accelerator = run.config, run.accelerator
    by_process = accelerator.gather(losses.unsqueeze(0))  # [processes, micro-batches]
    bad = [(int(p), int(m)) for p, m in (~by_process.isfinite()).nonzero()]
    where = []
    for process, micro in bad[:3]:
        of_step = accelerator.num_processes * config.gradient_accumulation_steps * config.batch_size
        first = (step - 1) * of_step + (micro * accelerator.num_processes + process) * config.batch_size
        where.append(f"process {process}, micro-batch {micro + 1}, blocks {first} to {first + config.batch_size - 1}")
    mine = [m for p, m in bad if p == accelerator.process_index] or (range(len(micro_batches)) if not bad else [])
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    for micro in mine:
        path = (
            Path(config.output_dir)
            / f"not_finite-step-{step}-process-{accelerator.process_index}-{micro + 1}.safetensors"
        )
        save_file({name: tensor.cpu().contiguous() for name, tensor in micro_batches[micro].items()}, path)
    what = "gradient norm" if is_finite else "loss"
    kept = list_checkpoints(Path(config.output_dir))
    place = f" ({'; '.join(where)})" if where else ""
    kept_batches = f"its batches are in {config.output_dir}/not_finite-step-{step}-*"
    last = f"last good checkpoint: {kept[-1] if kept else None}"
    return f"step {step}: the {what} is not finite{place}; {kept_batches}; {last}"
