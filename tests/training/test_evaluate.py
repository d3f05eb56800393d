"""evaluate.py says of a checkpoint what pretrain.py said of it, and how its predictions depend on the context."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import pretrain
from config import ConfigError
from hf_linattn.benchmark.record import read_json

from .conftest import fresh_accelerate, run

# By its path: the name is also that of a package on the index.
spec = importlib.util.spec_from_file_location("evaluate_script", Path(pretrain.__file__).with_name("evaluate.py"))
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def evaluate(*arguments) -> dict:
    fresh_accelerate()
    script.main([str(part) for part in arguments])
    given = dict(zip(map(str, arguments[::2]), arguments[1::2]))
    return read_json(given.get("--out") or Path(given["--model_name_or_path"]) / "evaluation.json")


def test_bits_per_byte_are_those_of_the_training_run(arguments, tmp_path, corpus_file):
    trained = run(arguments(max_steps=5))
    common = ["--model_name_or_path", tmp_path / "run", "--dataset", corpus_file, "--held_out_fraction", 0.2]
    result = evaluate(*common, "--block_size", 48, "--cpu_threads", 1)
    assert result["kind"] == "evaluate"
    assert result["bits_per_byte"] == pytest.approx(trained["bits_per_byte"]["after"], rel=1e-5)
    assert result["bytes"] == trained["data"]["held_out_bytes"]
    assert result["perplexity"] == pytest.approx(2 ** result["bits_per_token"], rel=1e-9)
    assert result["bits_per_token"] * result["tokens"] == pytest.approx(result["bits_per_byte"] * result["bytes"])
    rows = result["by_context"]
    assert sum(row["tokens"] for row in rows) == result["tokens"]
    total = sum(row["tokens"] * row["bits_per_token"] for row in rows)
    assert total == pytest.approx(result["bits_per_token"] * result["tokens"])
    assert [(row["from"], row["to"]) for row in rows] == [(1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 47)]


def test_context_is_counted_within_a_document(arguments, tmp_path):
    """One document in one block: the token after n others is in the row of n."""
    run(arguments(max_steps=2))
    (tmp_path / "one.txt").write_text("abcdef")
    common = ["--model_name_or_path", tmp_path / "run", "--eval_dataset", tmp_path / "one.txt", "--block_size", 48]
    result = evaluate(*common, "--out", tmp_path / "out.json")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    ids = torch.tensor([[256, *b"abcdef", 257]])
    with torch.no_grad():
        bits = -model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).flatten() / math.log(2)
    expected = [bits[0], bits[1:3].mean(), bits[3:7].mean()]
    assert [row["bits_per_token"] for row in result["by_context"]] == pytest.approx(
        [x.item() for x in expected], rel=1e-5
    )


def test_all_of_a_text_and_its_baselines(arguments, tmp_path, corpus_file):
    run(arguments(max_steps=2))
    common = ["--model_name_or_path", tmp_path / "run", "--dataset", corpus_file, "--block_size", 48]
    part = evaluate(*common, "--held_out_fraction", 0.2, "--baselines", True)
    whole = evaluate(*common, "--whole", True)
    assert whole["documents"] == 120 > part["documents"]
    assert set(part["baselines"]) == {"gzip", "6-gram"}
    with pytest.raises(ConfigError, match="baselines with whole: true"):
        evaluate(*common, "--whole", True, "--baselines", True)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model_name_or_path", "/nowhere"], "no tokenizer in '/nowhere'"),
        (["--model_name_or_path", "x", "--mixed_precision", "fp16"], "fp16 needs a GPU"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    if "fp16" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=message):
        evaluate(*arguments)
