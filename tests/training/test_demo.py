import pytest
import torch
from transformers import AutoModelForCausalLM

import demo
from data import byte_tokenizer
from hf_linattn.benchmark.record import read_json
from hf_linattn.benchmark.tables import render
from hf_linattn.model_card import render_card
from recipes import TINY

from .conftest import run


def test_demo_reads_a_run_and_writes_what_it_measured(arguments, tmp_path, capsys):
    run(arguments(model_config=TINY | {"model_type": "linattn"}, max_steps=3, baselines=True))
    capsys.readouterr()
    sizes = ["--tokens", "40", "--contexts", "16", "64", "--rounds", "2"]
    demo.main([str(tmp_path / "run"), *sizes, "--out", str(tmp_path / "out")])
    out = tmp_path / "out"
    results = read_json(out / "results.json")
    assert results["train"] == read_json(tmp_path / "run" / "train_results.json")
    assert [row["context"] for row in results["compare"]["rows"]] == [16, 64]
    assert (out / "table.md").read_text() == render(results)
    assert {path.name for path in (out / "figures").iterdir()} == {"compare.png", "training.png"}
    card = (out / "README.md").read_text(encoding="utf-8")
    assert card == str(render_card(out))
    assert "(figures/compare.png)" in card
    assert "(figures/training.png)" in card
    assert f"{results['train']['tokens_seen']:,} tokens" in card
    assert str(tmp_path) not in card

    assert results["train"]["data"]["origin"] == "files"
    generated = results["generate"]
    assert generated["tokens"] == 40
    assert generated["text"].startswith(demo.PROMPT)
    assert generated["cache_bytes"] == results["compare"]["rows"][0]["model"]["cache_bytes"]
    shown = capsys.readouterr().out
    assert str(out / "README.md") in shown
    assert "40 tokens in" in shown
    for baseline in results["train"]["baselines"].values():
        assert f"{baseline['bits_per_byte']:.3f}" in shown


def test_streamer_counts_the_tokens_but_not_the_prompt():
    streamer = demo.ProgressStreamer(5)
    streamer.put(torch.tensor([[1, 2, 3]]))
    for token in range(5):
        streamer.put(torch.tensor([token]))
    assert streamer.bar.n == 5
    streamer.end()
    assert len(streamer.times) == 6


@pytest.mark.parametrize("seed", [0, 1])
def test_generation_is_as_long_as_asked_and_follows_the_seed(arguments, tmp_path, seed):
    run(arguments(max_steps=2))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    texts = [demo.generate(model, byte_tokenizer(), 30, s)["text"] for s in (seed, seed, seed + 1)]
    assert texts[0] == texts[1] != texts[2]


def test_times_keep_their_precision_on_a_machine_that_has_run_for_weeks(arguments, tmp_path, monkeypatch):
    """A clock that reads 5,000,000 s and advances by 0.25 ms a token, 0.5 ms in the second half."""
    run(arguments(max_steps=2))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    put = demo.ProgressStreamer.put

    def timed_put(self, value):
        put(self, value)
        n = len(self.times) - 1
        self.times[-1] = 5e6 + 2.5e-4 * n + 2.5e-4 * max(0, n - 10)

    monkeypatch.setattr(demo.ProgressStreamer, "put", timed_put)
    times = demo.generate(model, byte_tokenizer(), 20, 0)["ms_per_token"]
    assert times == pytest.approx({"first tenth": 0.25, "last tenth": 0.5}, rel=1e-4)
