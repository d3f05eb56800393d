"""int8 weights on the CPU: projections are rounded and nothing else, and the model is that of the rounded weights."""

import pytest
import torch
from helpers import assert_same_bits, random_ids
from reference import assert_close
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPTIONS = {"conv_kernel_size": 3, "feature_map": "hedgehog", "qk_norm": True}
IDS = random_ids(2, 9)
FLOAT32 = 1e-5


@pytest.fixture
def models(make, tmp_path):
    """A float32 model and the same loaded with int8 projections."""
    make(**OPTIONS).save_pretrained(tmp_path)
    config = TorchAoConfig(Int8WeightOnlyConfig())
    return make(**OPTIONS), AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)


def rounded(model):
    """The int8 weights, by name."""
    return {name: weight for name, weight in model.named_parameters() if hasattr(weight, "qdata")}


def half_steps(weight):
    """The most that rounding to the nearest of 255 even steps moves each number of a row."""
    return (weight.abs().amax(-1, keepdim=True) / 127 / 2).expand_as(weight)


def test_only_projections_are_rounded_and_by_half_a_step(models):
    plain, quantized = models
    weights = rounded(quantized)
    assert len(weights) == 2 * len(PROJECTIONS)
    assert all(weight.qdata.dtype == torch.int8 for weight in weights.values())
    for name, original in plain.named_parameters():
        if name in weights:
            moved = (weights[name].dequantize() - original).abs()
            assert (moved <= half_steps(original) * (1 + FLOAT32)).all(), name
            assert moved.max() > 0
        else:  # feature maps, convolutions, norms, embeddings
            assert_same_bits([quantized.get_parameter(name)], [original], name)


def test_logits_are_those_of_the_rounded_weights(models):
    plain, quantized = models
    with torch.no_grad():
        found = quantized(IDS).logits
        for name, weight in rounded(quantized).items():
            plain.get_parameter(name).copy_(weight.dequantize())
        assert_close(found, plain(IDS).logits, FLOAT32)


def test_logits_are_as_near_as_the_rounding_allows(models):
    """|logit - logit of int8| <= sum over weights of |d logit / d weight| half a step, the derivative taken half way.

    Half way, because the mean of a derivative over the way is that in the middle up to the third power of the way.
    """
    plain, quantized = models
    weights = rounded(quantized)
    with torch.no_grad():
        moved = quantized(IDS).logits - plain(IDS).logits
        steps = {name: half_steps(plain.get_parameter(name)).clone() for name in weights}
        for name, weight in weights.items():
            plain.get_parameter(name).lerp_(weight.dequantize(), 0.5)
    logits = plain(IDS).logits
    for place in [(0, 0, 3), (0, 8, 5), (1, 4, 11), (1, 8, 20)]:
        names = list(steps)
        slopes = torch.autograd.grad(logits[place], [plain.get_parameter(name) for name in names], retain_graph=True)
        most = sum((slope.abs() * steps[name]).sum() for name, slope in zip(names, slopes))
        assert 0 < moved[place].abs() < most


def test_generating_from_int8_weights(models):
    _, quantized = models
    mask = torch.tensor([[0, 0, 0] + [1] * 6, [1] * 9])
    options = {"do_sample": False, "max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    said = quantized.generate(IDS, attention_mask=mask, **options)
    with torch.no_grad():
        whole = quantized(said.sequences, attention_mask=torch.nn.functional.pad(mask, (0, 6), value=1)).logits
    assert_close(torch.stack(said.logits, 1), whole[:, 8:-1], FLOAT32)
