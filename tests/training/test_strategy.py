"""The strategy is read from the model: eight ranks are played by one process, whose collectives do nothing."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import hf_linattn
from hf_linattn import LinAttnConfig, LinAttnForCausalLM
from recipes import TINY
from strategy import report

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.fixture
def mesh(monkeypatch):
    """Makes a mesh of eight ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield lambda *sizes, names=None: dist.init_device_mesh("cpu", sizes, mesh_dim_names=names)
    dist.destroy_process_group()


@pytest.fixture
def model():
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4, "vocab_size": 64}
    return LinAttnForCausalLM(LinAttnConfig(**TINY | heads))


def accelerator(processes=8, tensor_parallel=1):
    parallelism = SimpleNamespace(tp_size=tensor_parallel)
    return SimpleNamespace(num_processes=processes, parallelism_config=parallelism, device=torch.device("cpu"))


def shard(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_one_process(model):
    assert report(accelerator(1), model) == "strategy: one process"


def test_copies(model, mesh):
    copies = torch.nn.parallel.DistributedDataParallel(model)
    assert report(accelerator(), copies) == "strategy: DDP, 8 processes, fake"
    assert report(accelerator(), torch.compile(copies)) == "strategy: DDP, 8 processes, fake"


def test_processes_that_share_nothing(model, mesh):
    assert report(accelerator(), model) == "warning: 8 processes share nothing: each trains a model of its own"


def test_sharded_parameters(model, mesh, monkeypatch):
    for name, value in FSDP.items():
        monkeypatch.setenv(name, value)
    assert report(accelerator(), shard(model, mesh(8))) == "strategy: FSDP2, 8 processes"


def test_shared_heads(model, mesh):
    model = hf_linattn.parallelize(model, mesh(8))
    assert report(accelerator(tensor_parallel=8), model) == "strategy: tensor parallel 8"


def test_both(model, mesh):
    grid = mesh(2, 4, names=("dp_shard_cp", "tp"))
    model = shard(hf_linattn.parallelize(model, grid["tp"]), grid["dp_shard_cp"])
    assert sorted(report(accelerator(), model).removeprefix("strategy: ").split(" and ")) == [
        "FSDP2, 2 processes",
        "tensor parallel 4",
    ]


def test_what_was_asked_for_and_does_not_run(model, mesh, monkeypatch):
    copies = torch.nn.parallel.DistributedDataParallel(model)
    for name, value in FSDP.items():
        monkeypatch.setenv(name, value)
    line, warning = report(accelerator(tensor_parallel=2), copies).splitlines()
    assert line == "strategy: DDP, 8 processes, fake"
    assert warning.startswith("warning: the configuration asks for FSDP2 and tensor parallel 2, which does not run")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert "asks for DeepSpeed and FSDP2" in report(accelerator(), copies)


def test_deepspeed(monkeypatch):
    engine = type("DeepSpeedEngine", (torch.nn.Module,), {"zero_optimization_stage": lambda self: 2})
    engine.__module__ = "deepspeed.runtime.engine"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert report(accelerator(), engine()) == "strategy: DeepSpeed ZeRO-2, 8 processes"
