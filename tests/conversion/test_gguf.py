"""GGUF files: real ones, written here tensor by tensor as llama.cpp names and orders them."""

import re

import pytest
from helpers import FULL, LETTERS, LINEAR, random_ids
from reference import assert_close
from softmax_models import make_source
from transformers.utils import is_gguf_available

from hf_linattn import linearize
from hf_linattn.conversion import loading

NAMES = {
    r"^model\.layers\.(\d+)\.": r"blk.\1.",
    r"^model\.embed_tokens": "token_embd",
    r"^model\.norm": "output_norm",
    r"^lm_head": "output",
    r"input_layernorm": "attn_norm",
    r"post_attention_layernorm": "ffn_norm",
    r"self_attn\.o_proj": "attn_output",
    r"self_attn\.([qkv])_proj": r"attn_\1",
    r"self_attn\.([qk])_norm": r"attn_\1_norm",
    r"mlp\.(gate|up|down)_proj": r"ffn_\1",
}


def gguf_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = re.sub(theirs, ours, name)
    return name


def write_gguf(path, model) -> None:
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<pad>", *LETTERS])
    writer.add_token_merges([])
    writer.add_eos_token_id(4)
    for name, weight in model.state_dict().items():
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            # llama.cpp rotates neighbouring pairs: it keeps the rows of the two halves in turns
            weight = weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(gguf_name(name), weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# What the file does not say, or transformers does not read from it, is what their released checkpoints have.
@pytest.mark.parametrize(
    "name, fields", [("llama", {}), ("qwen2", {"hidden_act": "silu"}), ("qwen3", {"head_dim": 128})]
)
def test_a_gguf_file_is_its_source(name, fields, tmp_path):
    source, ids = make_source(name, **fields), random_ids(2, 11)
    write_gguf(tmp_path / "model.gguf", source)
    model = linearize(tmp_path, gguf_file="model.gguf", keep_layers="all")
    assert model.config.layer_types == [FULL] * 3
    assert_close(model(ids).logits, source(ids).logits, 1e-5)
    linear = linearize(tmp_path, gguf_file="model.gguf", dtype="bfloat16")
    assert linear.config.layer_types == [LINEAR] * 3
    assert str(linear.dtype) == "torch.bfloat16"
    assert linear(ids).logits.isfinite().all()


def test_a_file_that_transformers_reads_wrongly_is_refused(tmp_path):
    write_gguf(tmp_path / "model.gguf", make_source("qwen3"))  # heads of another size than the released ones
    with pytest.raises(
        ValueError, match=f"^{tmp_path}/model.gguf has tensors of another shape: model.layers.0.self_attn"
    ):
        linearize(tmp_path, gguf_file="model.gguf")


def test_without_the_package_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "is_gguf_available", lambda: False)
    with pytest.raises(ValueError, match=r"^gguf_file='model.gguf' needs the package gguf: pip install gguf$"):
        linearize(tmp_path, gguf_file="model.gguf")


@pytest.mark.skipif(not is_gguf_available(), reason="needs the package gguf")
def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="no config that transformers can read") as error:
        linearize(tmp_path, gguf_file="model.gguf")
    assert "\n" not in str(error.value)
