"""Trains a causal language model from text, from scratch or from a checkpoint.

    accelerate launch training/pretrain.py training/recipes/demo.yaml [--field value ...]

config.py lists the fields. What comes out, in output_dir: the model and its tokenizer for AutoModelForCausalLM and
AutoTokenizer, train_results.json, a TensorBoard log, and checkpoints from which `resume: auto` goes on as if the run
had never stopped.
"""

import itertools
import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_scheduler,
)

import hf_linattn  # noqa: F401  registers the models
from baselines import measure_baselines
from checkpoints import find_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from config import ConfigError, TrainConfig, read_config
from data import IGNORE, BlockStream, Corpus, PackedTokens, byte_tokenizer, load_corpus
from hf_linattn.benchmark.record import record, write_json


class TrainingStopped(RuntimeError):
    """Training cannot go on; one line says why."""


def main(argv: list[str]) -> None:
    # 1. The recipe, the device, the seed.
    config = read_config(argv)
    output_dir = Path(config.output_dir)
    accelerator = start_accelerator(config)
    say = accelerator.print
    set_seed(config.seed)

    # 2. Tokenizer, model, data.
    tokenizer = load_tokenizer(config)
    model = load_model(config, tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{type(model).__name__}: {parameters:,} parameters on {accelerator.device}")
    corpus = load_corpus(config, tokenizer, progress=accelerator.is_main_process)
    say(f"data: {', '.join(f'{value:,} {name}' for name, value in corpus.summary.items() if name != 'dataset')}")

    # 3. Optimizer and schedule.
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        fused=accelerator.device.type in ("cpu", "cuda"),
    )
    scheduler = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.max_steps,
        scheduler_specific_kwargs={"min_lr_rate": config.min_learning_rate_ratio},
    )
    if config.torch_compile:
        model.compile()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    # 4. Where an earlier run stopped, if one did.
    state: dict[str, Any] = {
        "step": 0,
        "config": asdict(config),
        "losses": [],
        "evaluations": [],
        "tokens": 0,
        "seconds": 0.0,
    }
    with accelerator.main_process_first():
        checkpoint = find_checkpoint(config, accelerator.is_main_process)
    if checkpoint is not None:
        state = load_checkpoint(accelerator, asdict(config), checkpoint)
        say(f"resuming from {checkpoint}")
    if state["step"] > config.max_steps:
        raise ConfigError(f"{checkpoint} is past max_steps ({config.max_steps}); use resume: restart to train anew")

    # 5. Train.
    blocks_a_step = config.batch_size * config.gradient_accumulation_steps * accelerator.num_processes
    blocks = BlockStream(corpus.shards, config.seed, skip=state["step"] * blocks_a_step)
    # A generator of its own: the loader draws a number when it starts, which must not come out of dropout's stream.
    loader = accelerator.prepare(DataLoader(blocks, config.batch_size, generator=torch.Generator()))
    if not state["evaluations"]:
        state["evaluations"].append([0, evaluate(accelerator, model, corpus, config)])
        say(f"held-out bits per byte before training: {state['evaluations'][0][1]:.3f}")
    train(accelerator, config, model, optimizer, scheduler, iter(loader), corpus, state)

    # 6. What came of it.
    accelerator.unwrap_model(model).save_pretrained(
        output_dir, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(output_dir)
        (_, before), (_, after) = state["evaluations"][0], state["evaluations"][-1]
        baselines = measure_baselines(corpus.train_texts(), corpus.held_out_texts) if config.baselines else None
        results = {
            "kind": "train",
            "record": record(config.seed, launcher="accelerate launch"),
            "model": {"class": type(accelerator.unwrap_model(model)).__name__, "parameters": parameters},
            "config": asdict(config),
            "data": corpus.summary,
            "tokens_seen": state["tokens"],
            "seconds": state["seconds"],
            "bits_per_byte": {"before": before, "after": after},
            "baselines": baselines,
            "losses": state["losses"],
            "evaluations": state["evaluations"],
        }
        write_json(output_dir / "train_results.json", results)
        say(f"held-out bits per byte: {before:.3f} before, {after:.3f} after {state['tokens']:,} tokens")
        say(f"wrote model, tokenizer and train_results.json to {output_dir}")
    accelerator.end_training()


def train(accelerator, config: TrainConfig, model, optimizer, scheduler, batches, corpus: Corpus, state: dict) -> None:
    """Steps from `state["step"]` to `max_steps`; keeps `state` up to date."""
    model.train()
    bar = tqdm(total=config.max_steps, initial=state["step"], desc="train", disable=not accelerator.is_main_process)
    started, earlier = time.perf_counter(), state["seconds"]
    window = (started, state["tokens"])
    for step in range(state["step"] + 1, config.max_steps + 1):
        micro_batches = list(itertools.islice(batches, config.gradient_accumulation_steps))
        loss, tokens = forward_backward(accelerator, model, micro_batches)
        norm = accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        # fp16 gradients overflow now and then: the loss scaler skips that step and halves its scale.
        if not math.isfinite(loss) or (config.mixed_precision != "fp16" and not math.isfinite(norm)):
            what = "loss" if not math.isfinite(loss) else "gradient norm"
            kept = list_checkpoints(Path(config.output_dir))
            raise TrainingStopped(
                f"step {step}: the {what} is not finite; last good checkpoint: {kept[-1] if kept else None}"
            )
        optimizer.step()
        if not accelerator.optimizer_step_was_skipped:
            scheduler.step()
        optimizer.zero_grad()

        now = time.perf_counter()
        state |= {"step": step, "tokens": state["tokens"] + tokens, "seconds": earlier + now - started}
        bar.update()
        last_step = step == config.max_steps
        if step % config.logging_steps == 0 or last_step:
            speed = (state["tokens"] - window[1]) / (now - window[0])
            window = (now, state["tokens"])
            state["losses"].append([step, loss])
            bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
            accelerator.log(
                {
                    "loss": loss,
                    "gradient_norm": float(norm),
                    "learning_rate": scheduler.get_last_lr()[0],
                    "tokens_per_second": speed,
                },
                step=step,
            )
        if step % config.eval_steps == 0 or last_step:
            bits_per_byte = evaluate(accelerator, model, corpus, config)
            state["evaluations"].append([step, bits_per_byte])
            accelerator.log({"held_out_bits_per_byte": bits_per_byte}, step=step)
            if accelerator.is_main_process:
                tqdm.write(f"step {step}: held-out bits per byte {bits_per_byte:.3f}")
        if step % config.save_steps == 0 or last_step:
            save_checkpoint(accelerator, config, state)
    bar.close()


def forward_backward(
    accelerator: Accelerator, model, micro_batches: list[dict[str, torch.Tensor]]
) -> tuple[float, int]:
    """Gradients of the mean loss over all predicted tokens of a step; that loss, and how many tokens there were.

    Dividing by the tokens of the whole step, over micro-batches and processes, makes accumulation exact: padding and
    document starts leave the micro-batches with different numbers of them.
    """
    count = sum((batch["labels"] != IGNORE).sum() for batch in micro_batches)
    count = accelerator.reduce(count, "sum")
    total = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(micro_batches, start=1):
        with accelerator.no_sync(model) if number < len(micro_batches) else nullcontext():
            loss = model(**batch, use_cache=False, num_items_in_batch=count).loss
            accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged over processes
        total += loss.detach()
    return accelerator.reduce(total, "sum").item(), int(count)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model, corpus: Corpus, config: TrainConfig) -> float:
    """Bits per byte of the held-out text: what predicting all its tokens and ends costs, over its length in UTF-8."""
    blocks: PackedTokens = corpus.held_out
    stride = config.eval_batch_size * accelerator.num_processes
    first = config.eval_batch_size * accelerator.process_index
    nats = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    model.eval()
    for start in tqdm(range(0, len(blocks), stride), "evaluate", leave=False, disable=not accelerator.is_main_process):
        mine = [min(start + first + i, len(blocks) - 1) for i in range(config.eval_batch_size)]
        batch = torch.utils.data.default_collate([blocks[i] for i in mine])
        beyond = torch.tensor([start + first + i >= len(blocks) for i in range(config.eval_batch_size)])
        batch["labels"][beyond] = IGNORE  # every process runs the same number of full batches
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        nats += model(**batch, use_cache=False, num_items_in_batch=torch.ones(())).loss
    model.train()
    return accelerator.reduce(nats, "sum").item() / math.log(2) / corpus.summary["held_out_bytes"]


def start_accelerator(config: TrainConfig) -> Accelerator:
    if config.mixed_precision == "fp16" and not torch.cuda.is_available():
        raise ConfigError("mixed_precision fp16 needs a GPU; choose bf16 or no")
    if config.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("tensorboard is not installed: install it, or set tensorboard: false")
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        step_scheduler_with_optimizer=False,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False),
        log_with="tensorboard" if config.tensorboard else None,
        project_dir=config.output_dir,
    )
    if accelerator.device.type == "cpu":  # accelerate launch leaves one thread unless told otherwise
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(config.cpu_threads or max(1, cores // accelerator.num_processes))
    accelerator.init_trackers("log")
    return accelerator


def load_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase:
    name = config.tokenizer_name_or_path or config.model_name_or_path
    return byte_tokenizer() if name is None else AutoTokenizer.from_pretrained(name)


def load_model(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A new model from `model_config`, or the checkpoint `model_name_or_path`; weights in float32."""
    if config.model_name_or_path is not None:
        model = AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=torch.float32)
    else:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        given = {
            "vocab_size": len(tokenizer),
            **{name: getattr(tokenizer, name) for name in names},
            **config.model_config,
        }
        try:
            defaults = AutoConfig.for_model(given["model_type"])
            unknown = [name for name in given if not hasattr(defaults, name)]
            if unknown:
                allowed = ", ".join(sorted(defaults.to_dict()))
                raise ConfigError(
                    f"model_config: {given['model_type']} has no field {unknown[0]!r}. Allowed: {allowed}"
                )
            check_vocabulary(tokenizer, given["vocab_size"])
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given), dtype=torch.float32)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"model_config: {' '.join(str(error).split())}") from error
    check_vocabulary(tokenizer, model.get_input_embeddings().num_embeddings)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    if len(tokenizer) > rows:
        raise ConfigError(f"the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is {rows}: raise it")


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and other vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ConfigError, TrainingStopped) as error:
        sys.exit(f"pretrain: {error}")
