"""Fine-tunes a checkpoint on conversations, on classified texts or on classified words: all weights, or LoRA adapters.

    accelerate launch training/finetune.py training/recipes/chat.yaml --dataset 'chats/*.jsonl' [--field value ...]

config.py lists the fields. What comes out, in output_dir: the model and its tokenizer for the Auto class of the task
(with LoRA the merged model, and its adapter in output_dir/adapter), train_results.json, a log of the curves, and
checkpoints from which `resume: auto` goes on as if the run had never stopped. For running text use pretrain.py.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from config import FinetuneConfig, read_config
from data import IGNORE, BlockStream, pad_token
from examples import (
    Example,
    PackedExamples,
    Split,
    chat_maker,
    collate,
    label_names,
    read_splits,
    sequence_maker,
    token_maker,
)
from hf_linattn.benchmark.record import record, write_json
from loop import (
    Batch,
    Run,
    begin_or_resume,
    causal_loss,
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

HEADS = {"sequence_classification": ("score.",), "token_classification": ("score.",)}  # what a checkpoint may lack
PEFT_TASKS = {"chat": "CAUSAL_LM", "sequence_classification": "SEQ_CLS", "token_classification": "TOKEN_CLS"}


@dataclass
class Task:
    """What differs between the tasks: the model, and what is made of the examples.

    Fields:
        stream: the training examples, or blocks of them, by number.
        collate: makes a micro-batch of some.
        loss_of: (model, batch, count) -> the sum of the losses over `count`.
        figures: model -> held-out figures by name.
    """

    model: PreTrainedModel
    splits: tuple[Split, Split]
    stream: Any
    collate: Callable | None
    loss_of: Callable
    figures: Callable[[torch.nn.Module], dict[str, float]]


def main(argv: list[str]) -> None:
    # 1. The recipe, the device, the seed.
    config = read_config(argv, FinetuneConfig)
    accelerator = start_accelerator(config)
    say = accelerator.print
    set_seed(config.seed)

    # 2. Tokenizer, data, model.
    tokenizer = load_tokenizer(config.model_name_or_path)
    task = (chat_task if config.task == "chat" else class_task)(config, tokenizer, accelerator)
    model = task.model
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if config.lora_rank:
        model = with_lora(model, config, PEFT_TASKS[config.task])
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f"{type(task.model).__name__}: {trained:,} of {parameters:,} parameters are trained on {accelerator.device}")
    for name, split in zip(("training", "held-out"), task.splits):
        counts = ", ".join(f"{number:,} {what}" for what, number in split.counts.items())
        say(f"{name} data: {len(split.examples):,} examples ({counts})")

    # 3. Optimizer and schedule.
    optimizer = make_optimizer(model, config, accelerator.device)
    scheduler = make_schedule(optimizer, config)
    if config.torch_compile:
        model.compile()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    say(report(accelerator, model))

    # 4. Where an earlier run stopped, if one did.
    state = begin_or_resume(accelerator, config)

    # 5. Train.
    drawn_a_step = config.batch_size * config.gradient_accumulation_steps * accelerator.num_processes
    stream = BlockStream(lambda: [task.stream], config.seed, skip=state["step"] * drawn_a_step)
    # A generator of its own: the loader draws a number when it starts, which must not come out of dropout's stream.
    loader = DataLoader(stream, config.batch_size, generator=torch.Generator(), collate_fn=task.collate)
    batches = iter(accelerator.prepare(loader))
    run = Run(
        accelerator, config, model, optimizer, scheduler, batches, task.loss_of, lambda: task.figures(model), state
    )
    if not state["evaluations"]:
        evaluate(run)
    train(run)

    # 6. What came of it.
    save_model(accelerator, model, tokenizer, config)
    if accelerator.is_main_process:
        (_, before), (_, after) = state["evaluations"][0], state["evaluations"][-1]
        results = {
            "kind": "finetune",
            "record": record(config.seed, launcher="accelerate launch"),
            "model": {"class": type(task.model).__name__, "parameters": parameters, "trained_parameters": trained},
            "config": asdict(config),
            "data": {name: split.counts for name, split in zip(("train", "held_out"), task.splits)},
            "tokens_seen": state["tokens"],
            "seconds": state["seconds"],
            "held_out": {"before": before, "after": after},
            "losses": state["losses"],
            "evaluations": state["evaluations"],
        }
        write_json(Path(config.output_dir) / "train_results.json", results)
        say(
            "; ".join(
                f"held-out {name.replace('_', ' ')}: {before[name]:.4g} before, {after[name]:.4g} after"
                for name in after
            )
        )
        say(f"wrote model, tokenizer and train_results.json to {config.output_dir}")
    accelerator.end_training()


# ---- tasks ----


def chat_task(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator) -> Task:
    """Conversations, or prompts and completions: whole examples packed into blocks."""
    model = load_model(config.model_name_or_path, tokenizer)
    splits = read_splits(config, chat_maker(config, tokenizer))
    train_blocks, held_out = (
        PackedExamples(split.examples, config.block_size, pad_token(tokenizer)) for split in splits
    )
    learned = sum(label != IGNORE for example in splits[1].examples for label in example.labels)

    def figures(model) -> dict[str, float]:
        return {"loss": held_out_nats(accelerator, model, held_out, config.eval_batch_size) / learned}

    return Task(model, splits, train_blocks, None, causal_loss, figures)


def class_task(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator) -> Task:
    """Texts, or words, with a class each."""
    names = label_names(config)
    of_words = config.task == "token_classification"
    splits = read_splits(config, (token_maker if of_words else sequence_maker)(config, tokenizer, names))
    auto_class = AutoModelForTokenClassification if of_words else AutoModelForSequenceClassification
    model = load_model(
        config.model_name_or_path, tokenizer, auto_class, HEADS[config.task], num_labels=len(names),
        id2label=dict(enumerate(names.names)), label2id=names.numbers, ignore_mismatched_sizes=True,
    )  # fmt: skip
    pad = model.config.get_text_config().pad_token_id = pad_token(tokenizer)

    def loss_of(model, batch: Batch, count: torch.Tensor) -> torch.Tensor:
        return summed_loss(model, batch)[0] / count

    def figures(model) -> dict[str, float]:
        return class_figures(accelerator, model, splits[1].examples, len(names), pad, config.eval_batch_size)

    return Task(model, splits, splits[0].examples, lambda examples: collate(examples, pad), loss_of, figures)


def summed_loss(model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the cross-entropies of a batch, and the logits; `labels` [B], or [B, T]."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits.float()
    flat = logits.flatten(0, -2), batch["labels"].flatten()
    return cross_entropy(*flat, reduction="sum", ignore_index=IGNORE), logits


@torch.no_grad()
def class_figures(
    accelerator: Accelerator, model, examples: list[Example], classes: int, pad: int, batch_size: int
) -> dict[str, float]:
    """Mean cross-entropy, accuracy, and the F1 of the classes that occur, averaged."""
    nats = torch.zeros((), device=accelerator.device)
    confusion = torch.zeros(classes, classes, dtype=torch.long, device=accelerator.device)  # [true, guessed]
    for batch in held_out_batches(accelerator, examples, batch_size, lambda mine: collate(mine, pad)):
        loss, logits = summed_loss(model, batch)
        nats += loss
        there = batch["labels"] != IGNORE
        pairs = batch["labels"][there] * classes + logits.argmax(-1)[there]
        confusion += torch.bincount(pairs, minlength=classes**2).view(classes, classes)
    nats, confusion = accelerator.reduce(nats, "sum"), accelerator.reduce(confusion, "sum").double()
    right, true, guessed = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    f1 = 2 * right / (true + guessed).clamp(min=1)
    total = confusion.sum()
    return {
        "loss": (nats / total).item(),
        "accuracy": (right.sum() / total).item(),
        "macro_f1": f1[true > 0].mean().item(),
    }


if __name__ == "__main__":
    run_script("finetune", main)
