"""Launched by test_data_parallel.py: pretrain.py, and what each process holds when it has trained."""

import sys
from pathlib import Path

import torch

import pretrain
from strategy import report

train = pretrain.train


def train_and_keep(run) -> None:
    train(run)
    whole = run.accelerator.unwrap_model(run.model)
    held = {
        "parameters": {name: p.detach().clone() for name, p in whole.named_parameters()},
        "strategy": report(run.accelerator, run.model),
    }
    torch.save(held, Path(run.config.output_dir) / f"rank{run.accelerator.process_index}.pt")


pretrain.train = train_and_keep
pretrain.main(sys.argv[1:])
