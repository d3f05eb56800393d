"""Recovers what a converted model lost, in stages that each write a whole checkpoint.

    hf-linattn linearize TEACHER runs/student --feature-map hedgehog --window 64
    accelerate launch training/linearize.py training/recipes/linearize/transfer.yaml \
        --model_name_or_path runs/student --teacher_name_or_path TEACHER --output_dir runs/transferred
    accelerate launch training/linearize.py training/recipes/linearize/distill.yaml \
        --model_name_or_path runs/transferred --teacher_name_or_path TEACHER --output_dir runs/distilled

    transfer   feature maps learn the teacher's attention, layer by layer; all else is frozen
    rank       finds the layers whose softmax attention is missed most, and restores some (ranking.json)
    distill    the whole student, or LoRA adapters, learn the teacher's predictions, or the text; with longer blocks
               this is the long-context stage

config.py lists the fields. What comes out, in output_dir: the model and its tokenizer, train_results.json, a log of the
curves, and checkpoints from which `resume: auto` goes on as if the run had never stopped.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from config import ConfigError, LinearizeConfig, read_config
from data import IGNORE, BlockStream, Corpus, load_corpus
from hf_linattn import LinAttnForCausalLM
from hf_linattn.benchmark.record import record, write_json
from hf_linattn.conversion.distillation import distillation_loss
from hf_linattn.conversion.ranking import rank_layers, restore
from hf_linattn.conversion.transfer import AttentionTransfer, check_pair
from hf_linattn.layers import SlidingLinearAttention
from loop import (
    Batch,
    Run,
    begin_or_resume,
    evaluate,
    held_out_batches,
    held_out_nats,
    make_optimizer,
    make_schedule,
    run_script,
    start_accelerator,
    train,
)
from lora import save_model, with_lora
from models import load_model, load_tokenizer
from strategy import report


class Distillation(nn.Module):
    """A student with the loss that it is trained by; the teacher is no part of it, so that no checkpoint holds it."""

    def __init__(self, student: nn.Module, teacher: PreTrainedModel | None, window_dropout: float):
        super().__init__()
        self.student, self.window_dropout = student, window_dropout
        self.teachers = () if teacher is None else (teacher.eval().requires_grad_(False),)

    @property
    def base(self) -> PreTrainedModel:
        """The model itself, whose projections LoRA adapters may have been put into."""
        return getattr(self.student, "get_base_model", lambda: self.student)()

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """The loss, summed over what is predicted."""
        model = self.base
        drop_windows(model, self.window_dropout if self.training else 0.0)
        if not self.teachers:
            return model(**inputs, labels=labels, use_cache=False, num_items_in_batch=torch.ones(())).loss
        counted = torch.zeros_like(labels, dtype=torch.bool)
        counted[:, :-1] = labels[:, 1:] != IGNORE
        with torch.no_grad():
            wanted = self.teachers[0].model(**inputs, use_cache=False).last_hidden_state
        hidden = model.model(**inputs, use_cache=False).last_hidden_state
        return distillation_loss(model, hidden, self.teachers[0], wanted, counted)


def drop_windows(model: PreTrainedModel, part: float) -> None:
    """Turn the window of each layer that has one off for this pass, with this probability."""
    for layer in model.model.layers:
        if isinstance(layer.self_attn, SlidingLinearAttention):
            layer.self_attn.only = "linear" if part > 0 and torch.rand(()) < part else None


def main(argv: list[str]) -> None:
    # 1. The recipe, the device, the seed.
    config = read_config(argv, LinearizeConfig)
    accelerator = start_accelerator(config)
    set_seed(config.seed)

    # 2. Student, teacher, text.
    tokenizer = load_tokenizer(config.model_name_or_path)
    student = load_model(config.model_name_or_path, tokenizer).to(accelerator.device)
    teacher = load_teacher(config, tokenizer, student, accelerator)
    corpus = load_corpus(config, tokenizer, progress=accelerator.is_main_process)
    listed = (f"{value:,} {name}" for name, value in corpus.summary.items() if name != "dataset")
    accelerator.print(f"data: {', '.join(listed)}")

    stage = {"transfer": run_transfer, "distill": run_distill, "rank": run_rank}[config.stage]
    results = stage(config, accelerator, tokenizer, student, teacher, corpus)
    if accelerator.is_main_process:
        results = {
            "kind": "linearize",
            "record": record(config.seed, launcher="accelerate launch"),
            "stage": config.stage,
            "config": asdict(config),
            "data": corpus.summary,
            **results,
        }
        write_json(Path(config.output_dir) / "train_results.json", results)
        accelerator.print(f"wrote model, tokenizer and train_results.json to {config.output_dir}")
    accelerator.end_training()


def load_teacher(
    config: LinearizeConfig, tokenizer: PreTrainedTokenizerBase, student: PreTrainedModel, accelerator: Accelerator
) -> PreTrainedModel | None:
    if config.teacher_name_or_path is None:
        return None
    teacher = load_model(config.teacher_name_or_path, tokenizer, AutoModelForCausalLM)
    try:
        check_pair(student, teacher)
    except ValueError as error:
        raise ConfigError(f"teacher_name_or_path {config.teacher_name_or_path!r}: {error}") from error
    return teacher.to(accelerator.device).eval()


def bits_per_token(accelerator: Accelerator, model: PreTrainedModel, corpus: Corpus, batch_size: int) -> float:
    """What predicting the held-out text costs."""
    counted = sum((block["labels"] != IGNORE).sum().item() for block in corpus.held_out)
    return held_out_nats(accelerator, model, corpus.held_out, batch_size) / counted / math.log(2)


def fit(
    config: LinearizeConfig,
    accelerator: Accelerator,
    corpus: Corpus,
    module: nn.Module,
    loss_of: Callable[[nn.Module, Batch, torch.Tensor], torch.Tensor],
    figures: Callable[[nn.Module], dict[str, float]],
) -> tuple[nn.Module, dict[str, Any]]:
    """Train what of `module` takes gradients; the prepared module, and what a run has to say of itself."""
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    accelerator.print(f"{config.stage}: {trained:,} parameters are trained on {accelerator.device}")
    optimizer = make_optimizer(module, config, accelerator.device)
    scheduler = make_schedule(optimizer, config)
    if config.torch_compile:
        module.compile()
    module, optimizer, scheduler = accelerator.prepare(module, optimizer, scheduler)
    accelerator.print(report(accelerator, module))
    state = begin_or_resume(accelerator, config)
    blocks_a_step = config.batch_size * config.gradient_accumulation_steps * accelerator.num_processes
    blocks = BlockStream(corpus.shards, config.seed, skip=state["step"] * blocks_a_step)
    loader = accelerator.prepare(DataLoader(blocks, config.batch_size, generator=torch.Generator()))
    run = Run(accelerator, config, module, optimizer, scheduler, iter(loader), loss_of, lambda: figures(module), state)
    if not state["evaluations"]:
        evaluate(run)
    train(run)
    (_, before), (_, after) = state["evaluations"][0], state["evaluations"][-1]
    return module, {
        "trained_parameters": trained,
        "tokens_seen": state["tokens"],
        "seconds": state["seconds"],
        "held_out": {"before": before, "after": after},
        "losses": state["losses"],
        "evaluations": state["evaluations"],
    }


def run_transfer(config, accelerator, tokenizer, student, teacher, corpus) -> dict[str, Any]:
    try:
        module = AttentionTransfer(student, teacher, config.transfer_loss)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    by_layer: dict[int, float] = {}

    def figures(module: nn.Module) -> dict[str, float]:
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in held_out_batches(accelerator, corpus.held_out, config.eval_batch_size):
                count = count + (batch["labels"] != IGNORE).sum()
                total = total + module(**batch).double()
        losses = accelerator.reduce(total, "sum") / accelerator.reduce(count, "sum")
        by_layer.update(zip(accelerator.unwrap_model(module).layers, losses.tolist()))
        bits = bits_per_token(accelerator, student, corpus, config.eval_batch_size)
        return {f"{config.transfer_loss}_loss": losses.mean().item(), "bits_per_token": bits}

    layers = len(module.layers)
    module, results = fit(
        config, accelerator, corpus, module, lambda m, batch, count: m(**batch).sum() / (layers * count), figures
    )
    student.requires_grad_(True)
    save_model(accelerator, student, tokenizer, config)
    return {**results, "loss_by_layer": by_layer}


def run_distill(config, accelerator, tokenizer, student, teacher, corpus) -> dict[str, Any]:
    if config.gradient_checkpointing:
        student.gradient_checkpointing_enable()
    model = with_lora(student, config, "CAUSAL_LM") if config.lora_rank else student
    module = Distillation(model, teacher if config.objective == "kl" else None, config.window_dropout)

    def figures(module: nn.Module) -> dict[str, float]:
        model = accelerator.unwrap_model(module).base
        drop_windows(model, 0.0)
        return {"bits_per_token": bits_per_token(accelerator, model, corpus, config.eval_batch_size)}

    module, results = fit(config, accelerator, corpus, module, lambda m, batch, count: m(**batch) / count, figures)
    save_model(accelerator, accelerator.unwrap_model(module).student, tokenizer, config)
    return results


def run_rank(config, accelerator, tokenizer, student, teacher, corpus) -> dict[str, Any]:
    if not isinstance(student, LinAttnForCausalLM):
        raise ConfigError(f"model_name_or_path {config.model_name_or_path!r} has no linear layers to rank")
    module = Distillation(student, teacher, 0.0).eval()

    @torch.no_grad()
    def distance() -> float:
        total, count = torch.zeros((), device=accelerator.device, dtype=torch.float64), 0
        for batch in held_out_batches(accelerator, corpus.held_out, config.eval_batch_size):
            total, count = total + module(**batch), count + (batch["labels"] != IGNORE).sum()
        return (accelerator.reduce(total, "sum") / accelerator.reduce(count, "sum")).item()

    now, ranking = rank_layers(student, distance, progress=accelerator.is_main_process)
    count = round(config.keep_fraction * student.config.num_hidden_layers)
    chosen = sorted(row["layer"] for row in ranking[:count])
    for index in chosen:
        restore(student, index)
    results = {"distance": {"before": now, "after": distance()}, "restored": chosen, "ranking": ranking}
    if accelerator.is_main_process:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        write_json(Path(config.output_dir) / "ranking.json", results)
    accelerator.print(
        f"restored softmax attention in layers {chosen}: KL {now:.4f} -> {results['distance']['after']:.4f}"
    )
    save_model(accelerator, student, tokenizer, config)
    return results


if __name__ == "__main__":
    run_script("linearize", main)
