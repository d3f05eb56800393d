"""Runs that end before their last step: nothing is lost, and one line says why."""

import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

import loop
import pretrain
from checkpoints import TrainingStopped, list_checkpoints
from recipes import TINY

from .conftest import run

TRAINING = Path(pretrain.__file__).parent


def same_run(one: dict, other: dict, folders: tuple[Path, Path]) -> None:
    assert one["losses"] == other["losses"]
    assert one["evaluations"] == other["evaluations"]
    assert one["tokens_seen"] == other["tokens_seen"]
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def call_at_step(monkeypatch, step: int, action) -> None:
    """`action` happens in the middle of a step: after its gradients, before the update."""
    real, calls = loop.forward_backward, []

    def wrapped(*given):
        losses = real(*given)
        calls.append(1)
        return action(losses) if len(calls) == step else losses

    monkeypatch.setattr(loop, "forward_backward", wrapped)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_and_the_run_goes_on_as_if_it_had_not_been(arguments, tmp_path, monkeypatch, number):
    common = {"max_steps": 7, "eval_steps": 3, "gradient_accumulation_steps": 2}
    common["model_config"] = TINY | {"model_type": "llama", "attention_dropout": 0.1}
    whole = run(arguments(**common, output_dir=tmp_path / "whole"))
    with monkeypatch.context() as patch:
        call_at_step(patch, 4, lambda losses: os.kill(os.getpid(), number) or losses)
        before = signal.getsignal(number)
        with pytest.raises(
            TrainingStopped, match=rf"^{number.name} after step 4: go on from .*step-00000004"
        ) as stopped:
            run(arguments(**common, output_dir=tmp_path / "stopped"))
    assert stopped.value.exit_code == 128 + number
    assert signal.getsignal(number) is before
    resumed = run(arguments(**common, output_dir=tmp_path / "stopped"))
    same_run(whole, resumed, (tmp_path / "whole", tmp_path / "stopped"))


def test_a_second_interrupt_ends_the_run_at_once(arguments, tmp_path, monkeypatch):
    def twice(losses):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return losses

    call_at_step(monkeypatch, 2, twice)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test runner may have chosen to ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(arguments())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list_checkpoints(tmp_path / "run")


def test_the_script_says_how_it_was_stopped_and_exits_as_signals_do(arguments, tmp_path):
    script = (
        "import os, signal, loop, pretrain\n"
        "real = loop.forward_backward\n"
        "loop.forward_backward = lambda *x: (os.kill(os.getpid(), signal.SIGTERM), real(*x))[1]\n"
        "loop.run_script('pretrain', pretrain.main)\n"
    )
    command = [sys.executable, "-c", script, *arguments()]
    process = subprocess.run(
        command, cwd=TRAINING, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert process.returncode == 143, process.stderr
    assert process.stderr.splitlines()[-1].startswith("pretrain: SIGTERM after step 1: go on from ")


def test_killed_in_the_middle_of_any_step(arguments, tmp_path):
    step = random.SystemRandom().randint(3, 8)
    common = {"max_steps": 9, "save_steps": 2, "eval_steps": 4}
    whole = run(arguments(**common, output_dir=tmp_path / "whole"))
    script = (
        "import os, signal, sys, loop, pretrain\n"
        "real, calls = loop.forward_backward, []\n"
        "def dying(*given):\n"
        "    result = real(*given); calls.append(1)\n"
        f"    if len(calls) == {step}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return result\n"
        "loop.forward_backward = dying\n"
        "pretrain.main(sys.argv[1:])\n"
    )
    killed = arguments(**common, output_dir=tmp_path / "killed")
    process = subprocess.run(
        [sys.executable, "-c", script, *killed], cwd=TRAINING, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
    )  # fmt: skip
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert list_checkpoints(tmp_path / "killed")[-1].name == f"step-{(step - 1) // 2 * 2:08d}"
    same_run(whole, run(killed), (tmp_path / "whole", tmp_path / "killed"))


def test_a_full_disk_keeps_the_last_good_checkpoint(arguments, tmp_path, monkeypatch):
    common = {"max_steps": 6, "save_steps": 2, "keep_checkpoints": 1}
    whole = run(arguments(**common, output_dir=tmp_path / "whole"))
    save, calls = Accelerator.save_state, []

    def full(self, folder, **options):
        calls.append(folder)
        if len(calls) == 1:
            return save(self, folder, **options)
        Path(folder).mkdir(parents=True)
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "save_state", full)
        message = r"^step 4: the checkpoint could not be written \(.*No space left on device; [\d,]+ MiB are free"
        with pytest.raises(TrainingStopped, match=message + ".*step-00000002$"):
            run(arguments(**common))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    same_run(whole, run(arguments(**common)), (tmp_path / "whole", tmp_path / "run"))


def test_a_loss_that_is_not_finite_names_its_batch(arguments, tmp_path, monkeypatch):
    """A byte whose embedding is not a number: the blocks that hold it give no loss, and are what is kept."""
    (tmp_path / "held.txt").write_text("nothing special")
    lines = [{"text": f"line {i:02} of the text, as long as the others"} for i in range(40)]
    for number in (7, 23):
        lines[number]["text"] = lines[number]["text"].replace("text", "te~t")
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    real = pretrain.new_model

    def poisoned(*given):
        model = real(*given)
        with torch.no_grad():
            model.get_input_embeddings().weight[ord("~")] = math.nan
        return model

    monkeypatch.setattr(pretrain, "new_model", poisoned)
    options = {"eval_dataset": tmp_path / "held.txt", "save_steps": 1, "batch_size": 1, "max_steps": 40}
    options |= {"gradient_accumulation_steps": 3, "block_size": 45, "isolate_documents": True}
    options["model_config"] = TINY | {"model_type": "linattn", "tie_word_embeddings": False}
    with pytest.raises(TrainingStopped) as stopped:
        run(arguments(**options))
    message = str(stopped.value)
    step = int(message.split()[1].rstrip(":"))
    assert f"step {step}: the loss is not finite (process 0, micro-batch " in message
    kept = sorted((tmp_path / "run").glob(f"not_finite-step-{step}-process-0-*.safetensors"))
    assert kept
    for path in kept:
        micro = int(path.stem.split("-")[-1])
        block = (step - 1) * 3 + micro - 1
        assert f"process 0, micro-batch {micro}, blocks {block} to {block}" in message
        assert (load_file(path)["input_ids"] == ord("~")).any()
    assert message.endswith(f"last good checkpoint: {(list_checkpoints(tmp_path / 'run') or [None])[-1]}")
    for checkpoint in list_checkpoints(tmp_path / "run"):
        weights = load_file(checkpoint / "model.safetensors")
        weights["model.embed_tokens.weight"][ord("~")] = 0
        assert all(tensor.isfinite().all() for tensor in weights.values())
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_loss_that_is_not_finite_is_never_stepped_on(arguments, tmp_path, monkeypatch):
    call_at_step(monkeypatch, 5, lambda losses: losses * math.nan)
    with pytest.raises(TrainingStopped, match=r"^step 5: the loss is not finite.*step-00000004$"):
        run(arguments(save_steps=2))
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("schedule, rates", [
    ("cosine", [0.5, 1.0, 0.9397, 0.7750, 0.5500, 0.3250, 0.1603, 0.1]),
    ("wsd", [0.55, 1.0, 1.0, 1.0, 1.0, 1.0, 0.55, 0.1]),
    ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
])  # fmt: skip
def test_schedules(arguments, schedule, rates):
    """The rate of each of eight steps and of the one after, as parts of the peak: two of warm-up, then the schedule.
    (The warm-up of wsd, as transformers has it, begins where the decay ends.)"""
    config = loop_config(
        arguments(schedule=schedule, max_steps=8, warmup_steps=2, decay_fraction=0.25, learning_rate=2.0)
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = loop.make_schedule(optimizer, config)
    found = []
    for _ in range(8):
        optimizer.step()
        scheduler.step()
        found.append(scheduler.get_last_lr()[0] / 2)
    assert found == pytest.approx(rates, abs=1e-4)


def loop_config(arguments):
    from config import read_config

    return read_config(arguments)
