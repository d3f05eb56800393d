"""Launch configurations load in accelerate, and the recipes for many GPUs are what their comments say."""

import json
import re
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from transformers import AutoConfig, AutoModelForCausalLM

import hf_linattn  # noqa: F401  registers the models
from config import PretrainConfig, read_config
from hf_linattn.benchmark.plan import plan

TRAINING = Path(__file__).parents[2] / "training"
LAUNCH = TRAINING / "launch"
KINDS = {
    "one_gpu": (DistributedType.NO, 1),
    "ddp_8": (DistributedType.MULTI_GPU, 8),
    "fsdp2_8": (DistributedType.FSDP, 8),
    "fsdp2_64": (DistributedType.FSDP, 64),
    "tensor_parallel_8": (DistributedType.MULTI_GPU, 8),
    "deepspeed": (DistributedType.DEEPSPEED, 8),
}
PROCESSES = {"gpu_125m": 1, "gpu_8": 8, "gpu_64": 64}
GIB = 2**30


def launch_config(name: str):
    return load_config_from_file(str(LAUNCH / f"{name}.yaml"))


def test_every_launch_configuration_is_tested():
    assert {path.stem for path in LAUNCH.glob("*.yaml")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_launch_configurations_load(name):
    config = launch_config(name)
    assert (config.distributed_type, config.num_processes) == KINDS[name]
    assert config.num_processes == 8 * config.num_machines or name == "one_gpu"
    assert config.use_cpu is False
    if config.distributed_type == DistributedType.FSDP:
        assert config.fsdp_config["fsdp_version"] == 2


def test_deepspeed_takes_the_steps_that_the_recipe_describes():
    settings = launch_config("deepspeed").deepspeed_config
    path = TRAINING.parent / settings["deepspeed_config_file"]
    deepspeed = json.loads(path.read_text())
    recipe = read_config([str(TRAINING / "recipes" / "gpu_8.yaml"), "--gradient_accumulation_steps", "1"])
    assert deepspeed["zero_optimization"]["stage"] == 2
    assert deepspeed["train_micro_batch_size_per_gpu"] == recipe.batch_size
    assert deepspeed["gradient_accumulation_steps"] == recipe.gradient_accumulation_steps
    assert deepspeed["gradient_clipping"] == recipe.max_grad_norm
    assert deepspeed["bf16"]["enabled"] == (recipe.mixed_precision == "bf16")


def stated(name: str, pattern: str) -> float:
    """The number that the recipe's comment says."""
    comment = "".join(
        line for line in (TRAINING / "recipes" / f"{name}.yaml").read_text().splitlines(True) if line[0] == "#"
    )
    (number,) = re.findall(pattern, comment)
    return float(number.replace(",", ""))


def tokens_a_step(config: PretrainConfig, processes: int) -> int:
    return config.batch_size * config.gradient_accumulation_steps * processes * config.block_size


@pytest.mark.parametrize("name", PROCESSES)
def test_recipes_are_what_they_say(name):
    config = read_config([str(TRAINING / "recipes" / f"{name}.yaml")])
    model_config = AutoConfig.for_model(**config.model_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert stated(name, r"model of ([\d,]+) parameters") == parameters
    step = tokens_a_step(config, PROCESSES[name])
    assert stated(name, r"A step reads ([\d,]+) tokens") == step
    assert stated(name, r"the run ([\d,]+)\.") == step * config.max_steps
    assert stated(name, r"for (\d+) GPU") == PROCESSES[name]
    (row,) = plan(model_config, [config.block_size], config.batch_size, "bfloat16", device="cuda")["rows"]
    assert stated(name, r"peaks at ([\d.]+) GiB") == round(row["linear"]["attention_bytes"] / GIB, 2)
    # the launch configuration of the comment has that many processes
    (launch,) = re.findall(r"training/launch/(\w+)\.yaml", (TRAINING / "recipes" / f"{name}.yaml").read_text())
    assert launch_config(launch).num_processes == PROCESSES[name]
    if name != "gpu_125m":  # which has 12 heads
        assert model_config.num_key_value_heads % launch_config("tensor_parallel_8").num_processes == 0
