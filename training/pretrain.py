"""Trains a causal language model from text, from scratch or from a checkpoint.

    accelerate launch training/pretrain.py training/recipes/demo.yaml [--field value ...]

config.py lists the fields. What comes out, in output_dir: the model and its tokenizer for AutoModelForCausalLM and
AutoTokenizer, train_results.json, a log of the curves, and checkpoints from which `resume: auto` goes on as if the run
had never stopped.
"""

import math
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from baselines import measure_baselines
from checkpoints import merged_weights, whole_or_absent
from config import PretrainConfig, read_config
from data import BlockStream, load_corpus
from hf_linattn.benchmark.record import record, write_json
from loop import (
    Run,
    begin_or_resume,
    causal_loss,
    evaluate,
    held_out_nats,
    make_optimizer,
    make_schedule,
    run_script,
    start_accelerator,
    train,
)
from models import load_model, load_tokenizer, new_model
from sources import origin_of
from strategy import report


def main(argv: list[str]) -> None:
    # 1. The recipe, the device, the seed.
    config = read_config(argv, PretrainConfig)
    accelerator = start_accelerator(config)
    say = accelerator.print
    set_seed(config.seed)

    # 2. Tokenizer, model, data.
    tokenizer = load_tokenizer(config.tokenizer_name_or_path or config.model_name_or_path)
    if config.model_name_or_path is None:
        model = new_model(config.model_config, tokenizer)
    else:
        model = load_model(config.model_name_or_path, tokenizer)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{type(model).__name__}: {parameters:,} parameters on {accelerator.device}")
    corpus = load_corpus(config, tokenizer, progress=accelerator.is_main_process)
    origin = origin_of(config.dataset)  # asked now: files may be gone when the run ends
    say(f"data: {', '.join(f'{value:,} {name}' for name, value in corpus.summary.items() if name != 'dataset')}")

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
    blocks_a_step = config.batch_size * config.gradient_accumulation_steps * accelerator.num_processes
    blocks = BlockStream(corpus.shards, config.seed, skip=state["step"] * blocks_a_step)
    # A generator of its own: the loader draws a number when it starts, which must not come out of dropout's stream.
    loader = accelerator.prepare(DataLoader(blocks, config.batch_size, generator=torch.Generator()))

    def bits_per_byte() -> dict[str, float]:
        """What predicting all held-out tokens and ends costs, over the length of the text in UTF-8."""
        nats = held_out_nats(accelerator, model, corpus.held_out, config.eval_batch_size)
        return {"bits_per_byte": nats / math.log(2) / corpus.summary["held_out_bytes"]}

    run = Run(accelerator, config, model, optimizer, scheduler, iter(loader), causal_loss, bits_per_byte, state)
    if not state["evaluations"]:
        evaluate(run)
    train(run)

    # 6. What came of it.
    weights = merged_weights(accelerator, model)
    with whole_or_absent(config, "the model"):
        accelerator.unwrap_model(model).save_pretrained(
            config.output_dir, is_main_process=accelerator.is_main_process, state_dict=weights
        )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(config.output_dir)
        evaluations = [[step, figures["bits_per_byte"]] for step, figures in state["evaluations"]]
        before, after = evaluations[0][1], evaluations[-1][1]
        baselines = measure_baselines(corpus.train_texts(), corpus.held_out_texts) if config.baselines else None
        results = {
            "kind": "train",
            "record": record(config.seed, launcher="accelerate launch"),
            "model": {"class": type(accelerator.unwrap_model(model)).__name__, "parameters": parameters},
            "config": asdict(config),
            "data": {**corpus.summary, "origin": origin},
            "tokens_seen": state["tokens"],
            "seconds": state["seconds"],
            "bits_per_byte": {"before": before, "after": after},
            "baselines": baselines,
            "losses": state["losses"],
            "evaluations": evaluations,
        }
        write_json(Path(config.output_dir) / "train_results.json", results)
        say(f"held-out bits per byte: {before:.3f} before, {after:.3f} after {state['tokens']:,} tokens")
        say(f"wrote model, tokenizer and train_results.json to {config.output_dir}")
    accelerator.end_training()


if __name__ == "__main__":
    run_script("pretrain", main)
