import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import pretrain
from checkpoints import TrainingStopped, list_checkpoints
from config import ConfigError, read_config
from data import load_corpus
from loop import parameter_groups
from recipes import TINY

from .conftest import run

MODELS = {
    "llama": {"model_type": "llama", "attention_dropout": 0.1},  # dropout: resuming must restore random numbers too
    "linattn": {"model_type": "linattn", "conv_kernel_size": 4},
}
TRAINING = Path(pretrain.__file__).parent


@pytest.mark.parametrize("model_type", MODELS)
def test_a_killed_run_resumes_as_if_it_had_not_been(arguments, tmp_path, model_type):
    common = {
        "model_config": TINY | MODELS[model_type],
        "max_steps": 13,
        "save_steps": 4,
        "eval_steps": 3,
        "gradient_accumulation_steps": 2,
        "seed": 7,
    }
    whole = run(arguments(**common, output_dir=tmp_path / "whole"))
    # The second checkpoint is written, but the process dies before it is in its place.
    script = (
        "import os, signal, sys; from accelerate import Accelerator; import pretrain\n"
        "save, calls = Accelerator.save_state, []\n"
        "def save_and_die(self, *args, **kwargs):\n"
        "    save(self, *args, **kwargs); calls.append(1)\n"
        "    if len(calls) == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Accelerator.save_state = save_and_die\n"
        "pretrain.main(sys.argv[1:])\n"
    )
    killed = arguments(**common, output_dir=tmp_path / "killed")
    process = subprocess.run(
        [sys.executable, "-c", script, *killed],
        cwd=TRAINING,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    folder = tmp_path / "killed" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "unfinished-step-00000008"]

    resumed = run(killed)
    assert [step for step, _ in whole["losses"]] == list(range(1, 14))
    assert resumed["losses"] == whole["losses"]
    assert resumed["evaluations"] == whole["evaluations"]
    assert resumed["tokens_seen"] == whole["tokens_seen"]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000012", "step-00000013"]  # the last two are kept


@pytest.mark.parametrize("model_type", MODELS)
def test_what_comes_out_loads_and_continues(arguments, tmp_path, model_type):
    first = run(arguments(model_config=TINY | MODELS[model_type], max_steps=25, eval_steps=10, baselines=True))
    folder = tmp_path / "run"
    before, after = first["bits_per_byte"]["before"], first["bits_per_byte"]["after"]
    assert after < 0.7 * before
    assert [step for step, _ in first["evaluations"]] == [0, 10, 20, 25]
    assert first["record"]["seed"] == 0
    assert first["record"]["command"].startswith("accelerate launch ")
    assert first["record"]["versions"]["torch"] == torch.__version__
    assert first["baselines"]["gzip"]["bits_per_byte"] > 1

    # The stored model is the trained one: its loss over the held-out text is the reported one.
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == first["model"]["class"]
    corpus = load_corpus(read_config(arguments()), tokenizer, progress=False)
    nats = 0.0
    for text in corpus.held_out_texts:
        ids = torch.tensor([[256, *text.encode(), 257]])
        pieces = (ids[:, i : i + 48] for i in range(0, ids.shape[1], 47))
        assert ids.shape[1] < 96  # two blocks see less context than one
        nats += sum(
            model(p, labels=p, use_cache=False).loss.item() * (p.shape[1] - 1) for p in pieces if p.shape[1] > 1
        )
    alone = nats / math.log(2) / corpus.summary["held_out_bytes"]
    assert alone == pytest.approx(after, rel=0.05)  # blocks are cut elsewhere, so contexts differ a little

    second = run(arguments(model_config=None, model_name_or_path=folder, output_dir=tmp_path / "more", max_steps=2))
    assert second["bits_per_byte"]["before"] == pytest.approx(after, rel=1e-5)


def test_held_out_bits_are_those_of_each_document(arguments, tmp_path):
    """With blocks that hold a document each, the packed evaluation is the sum over documents, to rounding."""
    (tmp_path / "held.txt").write_text("a short text, 終わり")
    result = run(arguments(eval_dataset=tmp_path / "held.txt", max_steps=3))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    data = (tmp_path / "held.txt").read_bytes()
    ids = torch.tensor([[256, *data, 257]])
    nats = model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
    assert result["bits_per_byte"]["after"] == pytest.approx(nats / math.log(2) / len(data), rel=1e-5)
    assert result["data"]["held_out_bytes"] == len(data)


def test_accumulation_is_exact_where_token_counts_differ(arguments, tmp_path, monkeypatch):
    """One batch of six blocks, or six of one: the same losses, though padding makes the blocks unequal."""
    monkeypatch.setattr("data.SHARD_CHARACTERS", 90)  # streamed shards end in padding
    common = {"streaming": True, "max_steps": 4}
    once = run(arguments(**common, batch_size=6, output_dir=tmp_path / "once"))
    six = run(arguments(**common, batch_size=1, gradient_accumulation_steps=6, output_dir=tmp_path / "six"))
    assert once["tokens_seen"] == six["tokens_seen"]
    assert once["tokens_seen"] < 4 * 6 * 47 * 0.95
    assert [loss for _, loss in six["losses"]] == pytest.approx([loss for _, loss in once["losses"]], rel=1e-5)


def test_weights_that_blow_up_are_not_saved(arguments, tmp_path):
    with pytest.raises(TrainingStopped, match=r"^step \d+: the (loss|gradient norm) is not finite"):
        run(arguments(save_steps=1, learning_rate=1e30, max_grad_norm=1e30, warmup_steps=3, max_steps=20))
    for path in list_checkpoints(tmp_path / "run"):
        assert all(tensor.isfinite().all() for tensor in load_file(path / "model.safetensors").values())


def test_bf16_keeps_float32_weights(arguments, tmp_path):
    full = run(arguments(output_dir=tmp_path / "full"))
    half = run(arguments(mixed_precision="bf16", output_dir=tmp_path / "half"))
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.float32}
    assert half["losses"] != full["losses"]
    assert half["losses"][-1][1] == pytest.approx(full["losses"][-1][1], rel=0.02)


def test_resume_refuses_another_recipe_and_goes_further_with_the_same(arguments, tmp_path):
    run(arguments(max_steps=3))
    with pytest.raises(ConfigError, match=r"made by another recipe \(batch_size 2 -> 3\); use resume: restart"):
        run(arguments(max_steps=3, batch_size=3))
    further = run(arguments(max_steps=5))
    assert [step for step, _ in further["losses"]] == [1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match="step-00000005 is past max_steps"):
        run(arguments(max_steps=4))
    again = run(arguments(max_steps=4, resume="restart"))
    assert [step for step, _ in again["losses"]] == [1, 2, 3, 4]
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000004"]
    with pytest.raises(ConfigError, match="choose auto, restart, or a folder"):
        run(arguments(resume="sometimes"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": 200}, "the tokenizer has 259 tokens, the model's vocab_size is 200"),
        ({"hiden_size": 8}, "llama has no field 'hiden_size'. Allowed: .*hidden_size"),
        ({"model_type": "nosuch"}, "nosuch"),
    ],
)
def test_models_that_cannot_be_built(arguments, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        run(arguments(model_config={"model_type": "llama", **TINY} | changes))
    assert "\n" not in str(caught.value)


def test_fp16_needs_a_gpu(arguments):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="fp16 needs a GPU"):
        run(arguments(mixed_precision="fp16"))


def test_vectors_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Embedding(5, 4))
    decayed, spared = parameter_groups(model, 0.1)
    assert {p.shape for p in decayed["params"]} == {(4, 3), (5, 4)}
    assert len(spared["params"]) == 3
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)


def test_a_run_logs_to_tensorboard_when_asked(arguments, tmp_path):
    run(arguments(tracker="none"))
    assert not list((tmp_path / "run").rglob("events.out.tfevents.*"))
    run(arguments(tracker="tensorboard", resume="restart"))
    assert list((tmp_path / "run" / "log").glob("events.out.tfevents.*"))


def test_the_script_says_what_is_wrong_in_one_line():
    command = [sys.executable, str(TRAINING / "pretrain.py"), "--max_step", "3"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 1
    *noise, line = process.stderr.splitlines()
    assert line.startswith("pretrain: command line: unknown key 'max_step'; did you mean 'max_steps'?")
    assert not [other for other in noise if "Traceback" in other or "pretrain" in other]  # other packages may speak


def test_a_run_logs_to_trackio_when_asked(arguments, tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "tracked"))
    command = [sys.executable, str(TRAINING / "pretrain.py"), *arguments(tracker="trackio", max_steps=3)]
    process = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert process.returncode == 0, process.stderr
    with sqlite3.connect(tmp_path / "tracked" / "run.db") as database:
        rows = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by step")]
    losses = json.loads((tmp_path / "run" / "train_results.json").read_text())["losses"]
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx([loss for _, loss in losses])
    assert any("held_out_bits_per_byte" in row for row in rows)
