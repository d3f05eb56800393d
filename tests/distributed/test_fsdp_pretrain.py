"""pretrain.py under FSDP2 trains as one process does, resumes, and saves one merged model."""

import json
import os
import subprocess
import sys

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import pretrain
from recipes import TINY, small_run, write_corpus

from .ranks import ROOT, free_port

MODEL = {"model_type": "linattn", **TINY, "conv_kernel_size": 4, "feature_map": "hedgehog"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One process in `alone`; two in `whole`, whose continuation from step 3 is in `run`."""
    folder = tmp_path_factory.mktemp("fsdp_pretrain")
    corpus = write_corpus(folder / "corpus.jsonl")
    common = {"model_config": MODEL, "max_steps": 6, "save_steps": 3, "learning_rate": 1e-3}
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    threads = torch.get_num_threads()
    pretrain.main(small_run(corpus, folder / "alone", **common, batch_size=2))
    torch.set_num_threads(threads)
    launch = ["--num_machines", "1", "--num_processes", "2", "--dynamo_backend", "no", "--mixed_precision", "no"]
    launch += ["--main_process_port", str(free_port()), "--use_fsdp", "--fsdp_version", "2"]
    launch += ["--fsdp_state_dict_type", "SHARDED_STATE_DICT", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    script = [str(ROOT / "tests" / "distributed" / "fsdp_pretrain_ranks.py")]
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "tests", "training"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", *launch, *script),
            *small_run(corpus, folder / "run", **common, batch_size=1),
        ],
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("strategy: FSDP2, 2 processes\n") == 2
    assert "step-00000003" in done.stdout  # resumed from
    return folder


def results(folder, name: str) -> dict:
    return json.loads((folder / name / "train_results.json").read_text())


def test_losses_are_those_of_one_process(folder):
    alone, whole = results(folder, "alone"), results(folder, "whole")
    assert [loss for _, loss in whole["losses"]] == pytest.approx([loss for _, loss in alone["losses"]], rel=1e-5)
    assert whole["tokens_seen"] == alone["tokens_seen"]
    assert whole["bits_per_byte"] == pytest.approx(alone["bits_per_byte"], rel=1e-5)


def test_it_resumes_to_the_bit(folder):
    whole, resumed = results(folder, "whole"), results(folder, "run")
    assert resumed["losses"] == whole["losses"]
    assert resumed["evaluations"] == whole["evaluations"]


def test_the_merged_model_is_that_of_one_process(folder):
    alone, whole, resumed = (load_file(folder / n / "model.safetensors") for n in ("alone", "whole", "run"))
    assert alone.keys() == whole.keys() == resumed.keys()
    for name, parameter in alone.items():
        assert (whole[name] - parameter).abs().max() <= 1e-6, name  # a thousandth of one step of Adam
        assert torch.equal(whole[name], resumed[name])
    assert AutoModelForCausalLM.from_pretrained(folder / "whole").config.tie_word_embeddings
