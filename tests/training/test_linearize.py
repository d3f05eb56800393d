"""The stages of recovery run from a small student and teacher: what is learned, written, gone on with, and refused."""

import copy
import math
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import linearize as script
from config import ConfigError, LinearizeConfig, read_config
from data import byte_tokenizer
from hf_linattn import LinAttnForCausalLM
from hf_linattn import linearize as linearize_model
from hf_linattn.benchmark.record import read_json
from recipes import TINY, small_run

from .conftest import run

FOLDER = Path(__file__).parents[2] / "training" / "recipes" / "linearize"
RECIPES = sorted(FOLDER.glob("*.yaml"))
SIZES = TINY | {"num_hidden_layers": 4, "initializer_range": 0.3}


@pytest.fixture
def pair(tmp_path):
    """A teacher, and a student with its weights and untrained feature maps, as folders."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    teacher = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZES, **ids))
    student = linearize_model(copy.deepcopy(teacher))
    for name, model in (("teacher", teacher), ("student", student)):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


@pytest.fixture
def recover(pair, corpus_file):
    """Runs linearize.py with keywords over the options of a small run; returns its results."""

    def make(**changes):
        paths = {"model_name_or_path": pair / "student", "teacher_name_or_path": pair / "teacher"}
        fields = {"model_config": None, **paths} | changes
        return run(small_run(corpus_file, fields.pop("output_dir", pair / "run"), **fields), script.main)

    return make


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("loss", ["attention", "output", "hidden"])
def test_transfer_trains_the_maps_alone(recover, pair, loss):
    result = recover(stage="transfer", transfer_loss=loss, max_steps=40, learning_rate=0.02)
    assert (result["kind"], result["stage"]) == ("linearize", "transfer")
    before, after = result["held_out"]["before"], result["held_out"]["after"]
    assert after[f"{loss}_loss"] < 0.9 * before[f"{loss}_loss"]
    assert set(result["loss_by_layer"]) == {"0", "1", "2", "3"}
    assert math.isclose(sum(result["loss_by_layer"].values()) / 4, after[f"{loss}_loss"], rel_tol=1e-6)
    old, new = weights(pair / "student"), weights(pair / "run")
    assert {name for name in old if not old[name].equal(new[name])} == {name for name in old if "feature_map" in name}


def test_transfer_goes_on_where_it_was_stopped(recover, pair):
    whole = recover(stage="transfer", max_steps=8, save_steps=4, output_dir=pair / "whole")
    recover(stage="transfer", max_steps=8, save_steps=4, output_dir=pair / "halves")
    for checkpoint in (pair / "halves" / "checkpoints").glob("step-00000008"):
        checkpoint.rename(pair / "gone")
    again = recover(stage="transfer", max_steps=8, save_steps=4, output_dir=pair / "halves")
    assert again["losses"] == whole["losses"]
    old, new = weights(pair / "whole"), weights(pair / "halves")
    assert all(old[name].equal(new[name]) for name in old)
    with pytest.raises(ConfigError, match="made by another recipe"):
        recover(stage="transfer", max_steps=8, transfer_loss="output", output_dir=pair / "halves")


@pytest.mark.parametrize("objective", ["kl", "cross_entropy"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_distillation(recover, pair, objective, lora_rank):
    result = recover(stage="distill", objective=objective, lora_rank=lora_rank, max_steps=30)
    bits = [result["held_out"][when]["bits_per_token"] for when in ("before", "after")]
    assert bits[1] < bits[0] if objective == "cross_entropy" else result["losses"][-1][1] < result["losses"][0][1]
    model = AutoModelForCausalLM.from_pretrained(pair / "run")  # merged: no adapter is needed
    assert type(model) is LinAttnForCausalLM
    assert (pair / "run" / "adapter" / "adapter_config.json").exists() is (lora_rank > 0)
    assert set(weights(pair / "run")) == set(weights(pair / "student"))


def test_a_student_that_is_its_teacher_has_nothing_to_learn(recover, pair):
    """KL of a model to itself is 0; a Llama may be trained too, as the fair reference."""
    result = recover(stage="distill", model_name_or_path=pair / "teacher", max_steps=1)
    assert abs(result["losses"][0][1]) < 1e-5


def test_rank_restores_what_is_missed_most(recover, pair):
    result = recover(stage="rank", keep_fraction=0.5)
    gains = [row["gain"] for row in result["ranking"]]
    assert gains == sorted(gains, reverse=True)
    assert {row["layer"] for row in result["ranking"]} == {0, 1, 2, 3}
    assert result["restored"] == sorted(row["layer"] for row in result["ranking"][:2])
    assert result["distance"]["after"] < result["distance"]["before"]
    assert read_json(pair / "run" / "ranking.json")["ranking"] == result["ranking"]
    model = AutoModelForCausalLM.from_pretrained(pair / "run")
    full = [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    assert full == result["restored"]
    everything = recover(stage="rank", keep_fraction=1.0, output_dir=pair / "all")
    assert abs(everything["distance"]["after"]) < 1e-5


def test_refusals(recover, pair, tmp_path):
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **SIZES)).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"other'?: vocab_size is 259 in the student and 300 in the teacher"):
        recover(stage="transfer", teacher_name_or_path=tmp_path / "other")
    with pytest.raises(ConfigError, match="no linear layer"):
        recover(stage="transfer", model_name_or_path=pair / "teacher")
    with pytest.raises(ConfigError, match="give teacher_name_or_path"):
        recover(stage="distill", teacher_name_or_path=None)
    with pytest.raises(ConfigError, match="window_dropout is 1.5; it must lie between 0 and 1"):
        recover(stage="distill", window_dropout=1.5)
    short = tmp_path / "short.txt"
    short.write_text("x")
    with pytest.raises(ConfigError, match="empty|shorter"):
        recover(stage="transfer", dataset=short)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes(path):
    recipe = yaml.safe_load(path.read_text())
    config = read_config([str(path), "--model_name_or_path", "x", "--teacher_name_or_path", "y"], LinearizeConfig)
    assert {name: getattr(config, name) for name in recipe} == recipe


def test_budgets_of_the_recipes_for_a_gpu():
    for name in ("transfer", "distill"):
        recipe = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
        tokens = (
            recipe["max_steps"] * recipe["batch_size"] * recipe["gradient_accumulation_steps"] * recipe["block_size"]
        )
        assert abs(tokens / 20e6 - 1) < 0.01
