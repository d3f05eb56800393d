"""Launched by test_data_parallel.py: pretrain.py, and what each process holds when it has trained."""

import sys
from pathlib import Path

import torch

import pretrain
from strategy import report

train = pretrain.train


def train_and_keep(accelerator, config, model, *rest) -> None:
    train(accelerator, config, model, *rest)
    held = {
        "parameters": {name: p.detach().clone() for name, p in accelerator.unwrap_model(model).named_parameters()},
        "strategy": report(accelerator, model),
    }
    torch.save(held, Path(config.output_dir) / f"rank{accelerator.process_index}.pt")


pretrain.train = train_and_keep
pretrain.main(sys.argv[1:])
