"""`hf-linattn linearize` writes a whole folder or none, and says what it did."""

import json

import pytest
import torch
from helpers import LINEAR, assert_same_bits, random_ids, tokenizer_of
from softmax_models import make_source
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from hf_linattn import LinAttnForCausalLM, linearize
from hf_linattn.benchmark.text import bytes_text
from hf_linattn.cli import main

TEMPLATE = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
WORDS = "a tokenizer for every letter"


@pytest.fixture
def source(tmp_path):
    model = make_source("qwen3")
    model.generation_config = GenerationConfig(temperature=0.3, do_sample=True, top_k=7, eos_token_id=[4, 5])
    model.save_pretrained(tmp_path / "source")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of().backend_tokenizer, pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def convert(source, *options, out=None):
    out = out or source.parent / "out"
    main(["linearize", str(source), str(out), *options])
    return out


def refusal(source, *options, out=None) -> str:
    with pytest.raises(SystemExit) as error:
        convert(source, *options, out=out)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in source.parent.iterdir() if path != out) == ["source"]
    return str(error.value)


def test_the_folder_is_whole(source):
    out = convert(source, "--keep-layers", "1")
    model, ids = AutoModelForCausalLM.from_pretrained(out), random_ids(2, 9)
    assert type(model) is LinAttnForCausalLM
    assert model.config.layer_types == [LINEAR, "full_attention", LINEAR]
    assert_same_bits([model(ids).logits], [linearize(source, keep_layers=[1])(ids).logits])
    made = model.generation_config
    assert (made.temperature, made.do_sample, made.top_k, made.eos_token_id) == (0.3, True, 7, [4, 5])
    ours, theirs = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(source)
    assert ours(WORDS)["input_ids"] == theirs(WORDS)["input_ids"] != []
    assert ours.chat_template == theirs.chat_template == TEMPLATE
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    assert ours.pad_token_id == theirs.pad_token_id == 0
    assert [path.name for path in source.parent.iterdir() if path not in (out, source)] == []


def test_what_it_says(source, capsys):
    convert(source, "--keep-layers", "1", "--dtype", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(source.parent / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    config = model.config
    heads, size = config.num_key_value_heads, config.head_dim
    new = 2 * 2 * heads * size * size  # W of queries and of keys in two layers
    kept = 2 * heads * size * 32768 * 2  # keys and values of the layer that is kept, in bfloat16
    state = 2 * 4 * heads * 2 * size * (size + 1)  # mu and nu of two layers, F = 2 D, in float32
    assert capsys.readouterr().out.splitlines() == [
        f"{source.parent / 'out'}: 3 layers, 1 full_attention, 2 kernel_linear_attention (layers 1); "
        "feature map hedgehog",
        f"new: {new:,} parameters (feature_map.k_weight, feature_map.q_weight)",
        f"cache after 32,768 tokens: {bytes_text(kept + state)}; of full attention in every layer: "
        f"{bytes_text(3 * kept)}",
        "Layers that are no longer softmax attention compute something else: only training recovers the quality.",
    ]


def test_options_reach_the_model(source):
    options = {"projection_dim": 3}
    out = convert(
        source, "--feature-map", "hedgehog_joint", "--feature-map-kwargs", json.dumps(options), "--keep-layers", "0.34"
    )
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert (config.feature_map, config.feature_map_kwargs) == ("hedgehog_joint", options)
    assert config.layer_types == [LINEAR, "full_attention", LINEAR]


def test_with_all_layers_kept_nothing_is_lost(source, capsys):
    out = convert(source, "--keep-layers", "all")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1] == "new: 0 parameters (none)"
    ids = random_ids(1, 5)
    assert_same_bits(
        [AutoModelForCausalLM.from_pretrained(out)(ids).logits], [linearize(source, keep_layers="all")(ids).logits]
    )


def test_weights_are_cut_into_shards(source):
    out = convert(source, "--max-shard-size", "10KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert all((out / name).is_file() for name in files)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert set(index["weight_map"]) == set(model.state_dict())


def test_what_did_not_carry_is_said(source, capsys):
    model = make_source("mistral", sliding_window=8)
    model.save_pretrained(source.parent / "source")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).unlink()
    convert(source)
    lost = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not carried: ")]
    assert lost[0].startswith("not carried: 3 layers of the source see sliding_window=8 keys")
    assert lost[1:] == [f"not carried: {source} has no tokenizer"]


@pytest.mark.parametrize("there", [True, False])
def test_a_failure_leaves_nothing(there, source, monkeypatch):
    """The tokenizer is written last: weights are there when it fails."""
    out = source.parent / "out"
    if there:
        out.mkdir()

    def fail(self, folder, *args, **kwargs):
        assert (folder / "model.safetensors").is_file()
        raise OSError("disk full")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
    assert refusal(source, out=out) == "hf-linattn: disk full"
    assert out.exists() is there
    assert not there or not any(out.iterdir())


@pytest.mark.parametrize(
    "options, words",
    [
        (["--keep-layers", "7"], "keep_layers has 7, and the model has layers 0 to 2"),
        (["--keep-layers", "1.5"], "keep_layers=1.5 is no fraction"),
        (["--keep-layers", "auto:0.25"], "keep_layers='auto:0.25' needs a ranking of layers"),
        (["--feature-map", "softmin"], "feature_map='softmin' is unknown; choose one of"),
        (["--feature-map-kwargs", "{tied}"], "'{tied}' is no JSON"),
        (["--feature-map-kwargs", "[1]"], "'[1]' is no JSON object"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--gguf-file", "none.gguf"], "none.gguf"),
    ],
)
def test_bad_input_is_one_line(options, words, source):
    assert words in refusal(source, *options)


def test_a_folder_in_use_is_left_alone(source):
    out = source.parent / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert refusal(source, out=out) == f"hf-linattn: {out} is there already and not empty: choose another folder"
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    file = out / "notes.txt"
    with pytest.raises(SystemExit, match="notes.txt is a file: choose a folder"):
        main(["linearize", str(source), str(file)])


def test_a_tokenizer_that_cannot_be_read_stops_it(source):
    (source / "tokenizer.json").write_text("{")
    assert f"{source}: the tokenizer cannot be read (" in refusal(source)
