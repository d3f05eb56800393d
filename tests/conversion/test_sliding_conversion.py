"""Layers of a window and a linear state, converted and imported."""

import pytest
import torch
from helpers import FULL, random_ids
from reference import assert_close
from softmax_models import make_source

from hf_linattn import linearize
from hf_linattn.cli import main
from hf_linattn.conversion import new_parameters
from hf_linattn.conversion.imports import import_lolcats

SLIDING = "kernel_linear_attention_sliding"
HEADS, SIZE = 4, 4


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_window_of_all_keys_is_softmax_attention(name):
    source, ids = make_source(name), random_ids(2, 11)
    model = linearize(source, window=11, keep_layers=[1])
    assert model.config.layer_types == [SLIDING, FULL, SLIDING]
    assert model.config.sliding_window == 11
    assert {key.split(".")[4] for key in new_parameters(model)} == {"feature_map", "window_mix"}
    assert_close(model(ids).logits, source(ids).logits, 1e-5)
    narrow = linearize(source, window=3, keep_layers=[1])
    assert (narrow(ids).logits - source(ids).logits).abs().max() > 1e-2


def test_the_command_writes_windows(tmp_path, capsys):
    make_source("llama").save_pretrained(tmp_path / "source")
    main(["linearize", str(tmp_path / "source"), str(tmp_path / "out"), "--window", "8", "--keep-layers", "0"])
    assert "2 kernel_linear_attention_sliding" in capsys.readouterr().out


def draw(*shape, seed):
    return 0.7 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("affine", [False, True])
def test_lolcats_with_windows(affine):
    """The layer of LoLCATs with a window that slides by token, in float64."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    window, source, state = 3, make_source("llama"), {}
    for index in range(3):
        name = f"model.layers.{index}.self_attn."
        for side in "qk":
            state[f"{name}feature_map_{side}.mlp.layer"] = draw(HEADS, SIZE, 5, seed=10 * index + (side == "k"))
        state[f"{name}window_factors"] = draw(1, HEADS, 1, 1, seed=50 + index)
    model = import_lolcats(source, state, window=window, affine=affine, expand_key_heads=True).double()
    hidden = draw(2, 9, 16, seed=5).double()
    positions = torch.arange(9)[None]
    softmax = lambda x: torch.cat([x.softmax(-1), (-x).softmax(-1)], -1).clamp(min=1e-12)  # noqa: E731
    for index in range(3):
        theirs, name = source.model.layers[index].self_attn, f"model.layers.{index}.self_attn."
        q, k, v = (
            (hidden @ theirs.get_submodule(f"{x}_proj").weight.double().T).unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for x in "qkv"
        )
        cos, sin = (x.double() for x in source.model.rotary_emb(hidden.float(), positions))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        f_q, f_k = (
            softmax(torch.einsum("hdf,bhld->bhlf", state[f"{name}feature_map_{side}.mlp.layer"].double(), x))
            for side, x in (("q", q), ("k", k))
        )
        older = torch.ones(9, 9).tril(-window).bool()
        near = torch.ones(9, 9).tril().bool() & ~older
        factor = state[f"{name}window_factors"].double().sigmoid()
        scores = (q @ k.transpose(-1, -2) * SIZE**-0.5).masked_fill(~near, -1e8)
        inside = factor * (scores - scores.amax(-1, keepdim=True)).exp() * near
        outside = (1 - factor if affine else 1) * (f_q @ f_k.transpose(-1, -2)) * older
        out = (inside + outside) / (inside + outside).sum(-1, keepdim=True) @ v
        expected = out.transpose(1, 2).flatten(2) @ theirs.o_proj.weight.double().T
        layer = model.model.layers[index].self_attn
        assert_close(layer(hidden, model.model.rotary_emb(hidden, positions))[0], expected, 1e-6)
