"""Two ranks that share the heads of a model compute what one process computes, each with half of the state."""

import pytest
import torch
from helpers import EXACT, HYBRID, make_config
from transformers import AutoModelForCausalLM

import hf_linattn
from hf_linattn import FeatureMap, LinAttnForCausalLM
from hf_linattn.models.linattn.parallel import check_tensor_parallel

from .ranks import launch
from .tensor_parallel_cases import CASES, measure, model_of

# Sums over heads are taken in another order; norms round to float32 in a float64 model too.
TOLERANCE = {torch.float32: 1e-5, torch.float64: EXACT}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for case in ("favor", "all"):
        model_of(case).save_pretrained(folder / case)
    return folder


@pytest.fixture(scope="module")
def ranks(checkpoint):
    return launch("tensor_parallel_ranks", 2, checkpoint)


def assert_close(actual, expected, what=""):
    error = (actual - expected).norm() / expected.norm()
    assert error <= TOLERANCE[expected.dtype], f"{what}: {error}"


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(ranks, case):
    alone = measure(model_of(case))
    for rank in ranks:
        here = rank["in memory"][case]
        assert_close(here["logits"], alone["logits"], "logits")
        assert here["gradients"].keys() == alone["gradients"].keys()
        for name, gradient in alone["gradients"].items():
            assert gradient.norm() > 0, name
            assert_close(here["gradients"][name], gradient, name)
        assert torch.equal(here["tokens"], alone["tokens"])
        for step, (score, expected) in enumerate(zip(here["scores"], alone["scores"], strict=True)):
            assert_close(score, expected, f"scores of step {step}")
        assert here["nbytes"] * 2 == alone["nbytes"]


def test_ranks_agree_to_the_bit(ranks):
    """Otherwise they would drift apart: logits and the gradients of what every rank holds whole."""
    first, second = (rank["in memory"] for rank in ranks)
    for case in CASES:
        assert torch.equal(first[case]["logits"], second[case]["logits"])
        assert all(torch.equal(g, second[case]["gradients"][name]) for name, g in first[case]["gradients"].items())


def test_a_checkpoint_is_read_by_parts_and_written_whole(ranks, checkpoint):
    for case in ("favor", "all"):
        alone = measure(model_of(case))
        for rank in ranks:
            here = rank["loaded"][case]
            assert_close(here["logits"], alone["logits"])
            for name, gradient in alone["gradients"].items():
                assert_close(here["gradients"][name], gradient, name)
            assert torch.equal(here["tokens"], alone["tokens"])
    saved, again = (AutoModelForCausalLM.from_pretrained(checkpoint / name).state_dict() for name in ("all", "again"))
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in saved)


def test_parameters_that_a_checkpoint_lacks_start_as_in_one_process(ranks, checkpoint):
    model = LinAttnForCausalLM.from_pretrained(
        checkpoint / "all", feature_map="hedgehog", conv_kernel_size=3, ignore_mismatched_sizes=True
    )
    attention = model.model.layers[0].self_attn
    expected = [p for part in (attention.feature_map, attention.q_conv) for p in part.parameters()]
    for rank in ranks:
        assert len(rank["started"]) == len(expected) == 3
        assert all(torch.equal(*pair) for pair in zip(rank["started"], expected))
        parts = (attention.q_proj, attention.k_conv, attention.o_proj)
        halves = [list(part.weight.shape) for part in parts]
        halves[0][0] //= 2
        halves[1][0] //= 2
        halves[2][1] //= 2
        assert [list(shape) for shape in rank["parts"]] == halves


def test_what_ranks_cannot_share_is_refused_in_one_line(ranks):
    for rank in ranks:
        said = rank["messages"]
        heads = "tensor parallel size 2 does not divide num_key_value_heads=3; choose one of [1, 3]"
        assert said["three heads"] == said["three heads, loaded"] == heads
        assert said["a llama"] == "parallelize shards models of model_type 'linattn', not 'llama'"
        assert said["two dimensions"] == "mesh has 2 dimensions; pass the one of tensor parallelism, as mesh['tp']"
        for name in ("save", "save, with its model", "load"):
            assert said[name].startswith("a state is saved from and loaded for a whole model"), said[name]
        assert not any("\n" in text for text in said.values())


def test_a_map_without_heads_is_refused(monkeypatch):
    class Tempered(FeatureMap):
        is_learnable = True

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.temperature = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            return (x * self.temperature).exp()

    monkeypatch.setitem(hf_linattn.FEATURE_MAPS, "tempered", Tempered)
    model = LinAttnForCausalLM(make_config("linear", feature_map="tempered"))
    with pytest.raises(ValueError, match=r"'tempered' cannot be sharded by head: its parameter 'temperature' has sha"):
        check_tensor_parallel(model, 2)


def test_the_plan_names_only_what_a_model_has(caplog):
    """A rule for a module that is not there would be a warning at every load."""
    for case in CASES:
        model = model_of(case)
        names = {name.replace(f".{index}.", ".*.") for index in range(3) for name, _ in model.named_modules()}
        assert set(model.tp_plan) <= names
        assert ("model.layers.*.self_attn.feature_map" in model.tp_plan) == ("hedgehog" in case or case == "all")
    assert "base_model_tp_plan" not in make_config("conv", **HYBRID).to_dict()
