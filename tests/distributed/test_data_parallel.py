"""pretrain.py under `accelerate launch`: the same global batch over 1, 2 and 4 processes trains the same model."""

import json
import os
import subprocess
import sys

import pytest
import torch

from recipes import TINY, small_run, write_corpus

from .ranks import ROOT, free_port

STEPS = 20
MODEL = {"model_type": "linattn", **TINY, "conv_kernel_size": 4, "feature_map": "hedgehog"}
# (batch_size, gradient_accumulation_steps) of so many processes: four blocks a step, always
SHARES = {1: (2, 2), 2: (2, 1), 4: (1, 1)}
# --multi_gpu starts processes on a CPU too, where --cpu would start one; FSDP2 does not run there, and must say so
KINDS = {1: [], 2: ["--use_fsdp", "--fsdp_version", "2"], 4: ["--multi_gpu"]}
LEARNING_RATE = 1e-3
# Sums over micro-batches and processes round otherwise. Adam moves a parameter by about the learning rate a step, and
# its first steps by the sign of a gradient: a thousandth of one such step is far below what another batch would make.
BOUND = LEARNING_RATE / 1000


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each number of processes leaves: train_results.json, and the file of every rank."""
    folder = tmp_path_factory.mktemp("data_parallel")
    corpus = write_corpus(folder / "corpus.jsonl")
    started = {}  # at once: starting Python and importing is most of the work, much of it on one core
    for processes, (batch, accumulation) in SHARES.items():
        arguments = small_run(
            corpus,
            folder / str(processes),
            model_config=MODEL,
            max_steps=STEPS,
            batch_size=batch,
            gradient_accumulation_steps=accumulation,
            learning_rate=LEARNING_RATE,
        )
        launch = ["--num_machines", "1", "--num_processes", str(processes), "--dynamo_backend", "no"]
        launch += ["--mixed_precision", "no", "--main_process_port", str(free_port()), *KINDS[processes]]
        script = [str(ROOT / "tests" / "distributed" / "pretrain_ranks.py"), *arguments]
        paths = os.pathsep.join(str(ROOT / part) for part in (".", "tests", "training"))
        started[processes] = subprocess.Popen(
            [sys.executable, "-m", "accelerate.commands.launch", *launch, *script],
            env=os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    said = {processes: process.communicate()[0] for processes, process in started.items()}
    assert not any(process.returncode for process in started.values()), said
    return {
        processes: {
            "results": json.loads((folder / str(processes) / "train_results.json").read_text()),
            "ranks": [torch.load(folder / str(processes) / f"rank{rank}.pt") for rank in range(processes)],
            "said": text,
        }
        for processes, text in said.items()
    }


@pytest.mark.parametrize("processes", [2, 4])
def test_losses_are_those_of_one_process(runs, processes):
    alone, shared = (runs[n]["results"] for n in (1, processes))
    assert [step for step, _ in shared["losses"]] == list(range(1, STEPS + 1))
    assert shared["tokens_seen"] == alone["tokens_seen"]
    losses = [loss for _, loss in alone["losses"]]
    assert losses[-1] < 0.9 * losses[0]
    assert [loss for _, loss in shared["losses"]] == pytest.approx(losses, rel=1e-5)
    assert shared["bits_per_byte"] == pytest.approx(alone["bits_per_byte"], rel=1e-5)


@pytest.mark.parametrize("processes", [2, 4])
def test_parameters_are_those_of_one_process(runs, processes):
    (alone,), (shared, *_) = (([rank["parameters"] for rank in runs[n]["ranks"]]) for n in (1, processes))
    assert alone.keys() == shared.keys()
    for name, parameter in alone.items():
        assert (shared[name] - parameter).abs().max() <= BOUND, name


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_hold_the_same_parameters_to_the_bit(runs, processes):
    first, *others = (rank["parameters"] for rank in runs[processes]["ranks"])
    assert len(others) == processes - 1
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_the_run_says_which_strategy_it_is(runs):
    assert runs[1]["ranks"][0]["strategy"] == "strategy: one process"
    assert {rank["strategy"] for rank in runs[4]["ranks"]} == {"strategy: DDP, 4 processes, gloo"}
    expected = (
        "strategy: DDP, 2 processes, gloo\nwarning: the configuration asks for FSDP2, which does not run; "
        "accelerate shards on accelerators only"
    )
    assert {rank["strategy"] for rank in runs[2]["ranks"]} == {expected}
    for run in runs.values():
        assert run["said"].count(run["ranks"][0]["strategy"]) == 1  # by the main process
