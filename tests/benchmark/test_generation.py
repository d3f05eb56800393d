import statistics

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_linattn import LinAttnConfig
from hf_linattn.benchmark import generation
from hf_linattn.benchmark.record import read_json
from hf_linattn.benchmark.tables import render

FEW = {"near": 20, "far": 120, "chunk": 16, "rounds": 2, "tokens": 8}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LinAttnConfig.from_preset("seed", **generation.SMALL))
    model.save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def run(checkpoint, out, *more):
    options = [text for key, value in FEW.items() for text in (f"--{key}", str(value))]
    generation.main(["--model", str(checkpoint), "--out", str(out), "--device", "cpu", *options, *more])
    return read_json(out)


def test_every_part_is_measured_and_rendered(checkpoint, tmp_path):
    result = run(checkpoint, tmp_path / "out.json")
    assert set(generation.PARTS) <= set(result)
    cases = result["positions"]["cases"]
    assert set(cases) == {"batch 1", "batch 8", "batch 1, padded", "batch 8, padded", "repetition penalty"}
    for row in cases.values():
        near, far = row["samples_us"]["near"], row["samples_us"]["far"]
        assert len(near) == len(far) == FEW["rounds"]
        assert row["ratio"] == statistics.median(b / a for a, b in zip(near, far))
    loop = result["loop"]
    gains = [
        (ours - bare) / (stock - bare)
        for bare, ours, stock in zip(*(loop["samples_us"][name] for name in ("bare", "ours", "stock")))
    ]
    assert loop["ratio"] == pytest.approx(statistics.median(gains))
    memory = result["memory"]
    assert memory["ids_bytes"] == (FEW["far"] + 1) * 8
    seen = memory["resident_bytes"]
    assert memory["growth_without_ids_bytes"] == seen[str(FEW["far"])] - seen[str(FEW["near"])] - memory["ids_bytes"]
    texts = result["prompt lookup"]["texts"]
    assert set(texts) == set(generation.REPETITIVE)
    assert all(text["same_tokens"] and text["tokens_per_call"] >= 1 for text in texts.values())
    assert result["prompt lookup"]["ratio"] == statistics.median(text["ratio"] for text in texts.values())
    assert len(result["positions"]["prefill"]["seconds"]) == -(-(FEW["far"] - 1) // FEW["chunk"])
    table = render(result)
    assert table.count("\n") == 2 + len(cases) + 4
    assert all(f"at most {bound:.2f}x" in table for bound in (1.15, 1.25, 0.5, 1.1))


def test_a_part_is_measured_alone_and_the_others_stay(checkpoint, tmp_path):
    out = tmp_path / "out.json"
    first = run(checkpoint, out, "--parts", "prompt lookup")
    assert set(generation.PARTS) & set(first) == {"prompt lookup"}
    both = run(checkpoint, out, "--parts", "loop")
    assert both["prompt lookup"] == first["prompt lookup"]
    assert both["loop"]["record"]["command"]


def test_the_stock_side_is_the_stock_loop(checkpoint, monkeypatch):
    """Otherwise a loop would be compared with itself."""
    calls = []
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    stock = generation.GenerationMixin._sample
    monkeypatch.setattr(
        generation.GenerationMixin, "_sample", lambda self, *a, **k: calls.append(1) or stock(self, *a, **k)
    )
    with torch.no_grad():
        generation.loop_cost(model, near=10, rounds=2, tokens=8, seed=0)
    assert len(calls) == 3


def test_turns_start_at_their_place(checkpoint, monkeypatch):
    lengths = []
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()

    def watched(model, ids, mask, cache, tokens, **options):
        lengths.append((ids.shape[0], ids.shape[1], cache.get_seq_length(), mask is not None, bool(options)))
        return 1.0

    monkeypatch.setattr(generation, "continue_from", watched)
    with torch.no_grad():
        generation.by_position(model, near=10, far=30, chunk=8, rounds=1, tokens=4, seed=0)
    places = {(length, read) for _, length, read, _, _ in lengths}
    assert places == {(10, 9), (30, 29)}
    assert {(rows, padded, option) for rows, _, _, padded, option in lengths} == {
        (1, False, False), (8, False, False), (1, True, False), (8, True, False), (1, False, True),
    }  # fmt: skip
