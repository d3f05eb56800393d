import statistics

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_linattn.benchmark.compare import Decoder, cache_nbytes, compare, main, matching_llama
from hf_linattn.benchmark.record import read_json
from hf_linattn.models.linattn.presets import PRESETS

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def build(model_type: str, **changes):
    torch.manual_seed(0)
    fields = PRESETS["seed"] if model_type == "linattn" else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields | SIZES | changes)).eval()


@pytest.mark.parametrize("model_type", ["linattn", "llama"])
@torch.no_grad()
def test_decoder_generates_what_a_full_forward_would(model_type):
    model = build(model_type)
    text = torch.randint(0, 61, (1, 20))
    decoder = Decoder(model, text)
    for _ in range(12):
        text = torch.cat([text, decoder.token], dim=1)
        assert decoder.step() > 0
        logits = model(text, use_cache=False).logits[0, -1]
        assert decoder.token.item() == logits.argmax()


@torch.no_grad()
def test_cache_bytes_are_those_of_its_tensors():
    llama = build("llama")
    decoder = Decoder(llama, torch.zeros(1, 100, dtype=torch.long))
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head size, bytes of a float32
    assert decoder.context_bytes == 100 * per_token
    decoder.step()
    assert cache_nbytes(decoder.cache) == 101 * per_token


@torch.no_grad()
def test_cache_of_linear_attention_does_not_grow():
    model = build("linattn")
    sizes = {Decoder(model, torch.zeros(1, n, dtype=torch.long)).context_bytes for n in (3, 50, 333)}
    state = 2 * 2 * (8 * 8 + 8) * 4  # layers, heads, mu and nu, bytes of a float32
    assert len(sizes) == 1
    assert state <= sizes.pop() <= state + 64  # and a few counters


def test_llama_has_the_same_size():
    model = build("linattn", conv_kernel_size=0)
    llama = matching_llama(model.config, 4096)
    count = sum(p.numel() for p in llama.parameters())
    assert count == sum(p.numel() for p in model.parameters())
    assert llama.config.max_position_embeddings == 4096


def test_result_holds_the_raw_samples_and_their_medians():
    result = compare(build("linattn"), contexts=(8, 64), tokens=3, rounds=4, seed=1, progress=lambda x, _: x)
    assert [row["context"] for row in result["rows"]] == [8, 64]
    assert result["models"]["llama"]["class"] == "LlamaForCausalLM"
    assert result["record"]["seed"] == 1
    for row in result["rows"]:
        medians = {}
        for name in ("model", "llama"):
            samples = row[name]["samples_ms"]
            assert [len(turn) for turn in samples] == [3] * 4
            medians[name] = [statistics.median(turn) for turn in samples]
            assert row[name]["ms_per_token"] == statistics.median(medians[name])
        ratios = [b / a for a, b in zip(medians["model"], medians["llama"], strict=True)]
        assert row["llama_over_model"]["ms_per_token"] == statistics.median(ratios)
    grown = [row["llama_over_model"]["cache_bytes"] for row in result["rows"]]
    assert grown[1] == pytest.approx(8 * grown[0])


def test_turns_are_interleaved(monkeypatch):
    turns = []
    monkeypatch.setattr(Decoder, "step", lambda self: turns.append(type(self.model).__name__) or 1.0)
    compare(build("linattn"), contexts=(8,), tokens=2, rounds=2, progress=lambda x, _: x)
    assert turns == (["LinAttnForCausalLM"] * 2 + ["LlamaForCausalLM"] * 2) * 3


def test_command_line_writes_json(tmp_path):
    build("linattn").save_pretrained(tmp_path / "model")
    common = ["--contexts", "16", "--tokens", "2", "--rounds", "2", "--device", "cpu"]
    main(["--model", str(tmp_path / "model"), *common, "--out", str(tmp_path / "a.json")])
    fresh = ["--hidden_size", "32", "--num_hidden_layers", "1", "--num_attention_heads", "2", "--vocab_size", "50"]
    main([*fresh, *common, "--dtype", "bfloat16", "--out", str(tmp_path / "b.json")])
    loaded, made = read_json(tmp_path / "a.json"), read_json(tmp_path / "b.json")
    assert loaded["kind"] == made["kind"] == "compare"
    assert (loaded["dtype"], made["dtype"]) == ("float32", "bfloat16")
    assert loaded["models"]["model"]["parameters"] == sum(p.numel() for p in build("linattn").parameters())
