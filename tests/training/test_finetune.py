"""Fine-tuning runs from a small checkpoint: what is learned, what is written, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
)

import finetune
from config import ConfigError
from data import byte_tokenizer
from hf_linattn import LinAttnConfig, LinAttnForCausalLM
from hf_linattn.benchmark.record import read_json
from hf_linattn.models.linattn.modeling_linattn import LinAttnPreTrainedModel
from recipes import TINY

from .conftest import run

COLOURS = ("red", "blue", "green")


@pytest.fixture
def checkpoint(tmp_path):
    """A small random linattn with the tokenizer of bytes and a chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    torch.manual_seed(0)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    LinAttnForCausalLM(LinAttnConfig(vocab_size=len(tokenizer), conv_kernel_size=4, **TINY, **ids)).save_pretrained(
        tmp_path / "base"
    )
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def rows(tmp_path):
    """120 rows that serve every task: the answer, and the class, is the colour that is named."""
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for i in range(120):
            colour = COLOURS[i % 3]
            words = ["it", "is", colour, "number", str(i)]
            messages = [
                {"role": "user", "content": f"which of {i}? {colour}!"},
                {"role": "assistant", "content": colour},
            ]
            row = {"messages": messages, "text": " ".join(words), "label": colour, "tokens": words}
            file.write(json.dumps(row | {"tags": ["O", "O", "COLOUR", "O", "O"]}) + "\n")
    return path


@pytest.fixture
def tune(checkpoint, rows, tmp_path):
    """Runs finetune.py with keywords over the options of a small run; returns its results."""

    def make(**changes):
        fields = {
            "model_name_or_path": checkpoint, "dataset": rows, "held_out_fraction": 0.2, "block_size": 64,
            "batch_size": 4, "max_steps": 6, "warmup_steps": 2, "learning_rate": 0.01, "cpu_threads": 1,
            "logging_steps": 1, "eval_steps": 100, "save_steps": 100, "tracker": "none", "output_dir": tmp_path / "run",
        } | changes  # fmt: skip
        arguments = [part for name, value in fields.items() for part in (f"--{name}", str(value))]
        return run(arguments, finetune.main)

    return make


def test_a_chat_model_learns_to_answer(tune, tmp_path):
    result = tune(max_steps=150)
    assert result["kind"] == "finetune"
    assert result["data"]["train"]["rows"] + result["data"]["held_out"]["rows"] == 120
    assert result["held_out"]["after"]["loss"] < 0.2 * result["held_out"]["before"]["loss"]
    model, tokenizer = (auto.from_pretrained(tmp_path / "run") for auto in (AutoModelForCausalLM, AutoTokenizer))
    for colour in COLOURS:
        asked = [{"role": "user", "content": f"which of 7? {colour}!"}]
        ids = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", tokenize=True, return_dict=True
        )
        said = model.generate(**ids, max_new_tokens=10, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(said, skip_special_tokens=True) == colour


def test_the_held_out_loss_is_that_of_each_conversation(tune, checkpoint, rows, tmp_path):
    from config import FinetuneConfig
    from examples import chat_maker, read_splits

    result = tune(max_steps=1)
    config = FinetuneConfig(model_name_or_path="x", dataset=str(rows), held_out_fraction=0.2, block_size=64)
    _, held_out = read_splits(config, chat_maker(config, AutoTokenizer.from_pretrained(checkpoint)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    one = torch.ones(())
    with torch.no_grad():
        nats = sum(
            model(torch.tensor([e.ids]), labels=torch.tensor([e.labels]), num_items_in_batch=one).loss
            for e in held_out.examples
        )
    count = sum(label != -100 for e in held_out.examples for label in e.labels)
    assert result["held_out"]["after"]["loss"] == pytest.approx(nats.item() / count, rel=1e-5)


@pytest.mark.parametrize("task", ["chat", "sequence_classification"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tune, tmp_path, task):
    common = {"task": task, "gradient_accumulation_steps": 2}
    whole = tune(**common, max_steps=7, output_dir=tmp_path / "whole", schedule="constant")
    tune(**common, max_steps=4, schedule="constant")
    resumed = tune(**common, max_steps=7, schedule="constant")
    assert resumed["losses"] == whole["losses"]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("task", ["chat", "sequence_classification"])
def test_accumulation_is_exact_where_counts_differ(tune, tmp_path, task):
    once = tune(task=task, batch_size=6, output_dir=tmp_path / "once")
    six = tune(task=task, batch_size=1, gradient_accumulation_steps=6, output_dir=tmp_path / "six")
    assert [loss for _, loss in six["losses"]] == pytest.approx([loss for _, loss in once["losses"]], rel=1e-5)


def test_lora_trains_adapters_alone_and_merges_them(tune, checkpoint, tmp_path):
    from peft import PeftModel

    result = tune(lora_rank=4, lora_alpha=8.0, max_steps=60)
    assert result["held_out"]["after"]["loss"] < 0.7 * result["held_out"]["before"]["loss"]
    assert result["model"]["trained_parameters"] < 0.5 * result["model"]["parameters"]
    base, merged = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (checkpoint, tmp_path / "run"))
    moved = {
        name.rsplit(".", 2)[-2]
        for name, tensor in base.state_dict().items()
        if not torch.equal(tensor, merged.state_dict()[name])
    }
    assert moved == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    adapted = PeftModel.from_pretrained(base, tmp_path / "run" / "adapter").eval()
    ids = torch.randint(0, 256, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)


def test_texts_are_classified(tune, tmp_path):
    result = tune(task="sequence_classification", max_steps=120)
    assert result["held_out"]["after"]["accuracy"] > 0.9 > 0.6 > result["held_out"]["before"]["accuracy"]
    folder = tmp_path / "run"
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    assert list(model.config.id2label.values()) == sorted(COLOURS)
    ids = torch.tensor([[256, *b"it is green number 5", 257]])
    assert model.config.id2label[model(ids).logits.argmax().item()] == "green"
    assert tokenizer.pad_token_id == model.config.pad_token_id


def test_words_are_classified(tune, tmp_path):
    result = tune(task="token_classification", label_column="tags", max_steps=60)
    assert result["held_out"]["after"]["macro_f1"] > 0.95
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "run")
    assert model.config.label2id == {"COLOUR": 0, "O": 1}


def test_figures_of_classes_are_those_of_every_example(checkpoint):
    from accelerate import Accelerator

    from examples import Example

    class Fixed(torch.nn.Module):
        """Guesses the class that the first token names, with a known certainty."""

        def forward(self, input_ids, attention_mask, use_cache):
            logits = torch.nn.functional.one_hot(input_ids[:, 0], 3).float() * 2
            return type("Output", (), {"logits": logits})

    examples = [Example([guess, 9], true) for true, guess in ((0, 0), (0, 1), (1, 1), (1, 1), (0, 0))]
    figures = finetune.class_figures(Accelerator(cpu=True), Fixed(), examples, 3, pad=0, batch_size=2)
    right, wrong = (-torch.tensor(2.0 * hit).sub(torch.tensor([2.0, 0, 0]).logsumexp(0)).item() for hit in (1, 0))
    assert figures["loss"] == pytest.approx((4 * right + wrong) / 5, rel=1e-5)
    assert figures["accuracy"] == pytest.approx(0.8)
    assert figures["macro_f1"] == pytest.approx((0.8 + 0.8) / 2)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_gradient_checkpointing_changes_nothing(tune, tmp_path, lora_rank):
    plain, saving = (
        tune(lora_rank=lora_rank, gradient_checkpointing=on, output_dir=tmp_path / str(on)) for on in (False, True)
    )
    assert [x for _, x in saving["losses"]] == pytest.approx([x for _, x in plain["losses"]], rel=1e-6)


def test_checkpoints_of_another_architecture(tune, checkpoint, tmp_path):
    bert = tmp_path / "bert"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(vocab_size=259, **sizes)).save_pretrained(bert)
    byte_tokenizer().save_pretrained(bert)
    config = read_json(checkpoint / "config.json")
    (bert / "config.json").write_text(json.dumps(config))  # the name of one, the weights of another
    with pytest.raises(ConfigError, match=r"lacks \d+ of the weights of LinAttnForCausalLM \(.*another architecture"):
        tune(model_name_or_path=bert)
    for task in ("sequence_classification", "token_classification"):
        with pytest.raises(ConfigError, match=r"lacks \d+ of the weights of LinAttnFor"):
            tune(model_name_or_path=bert, task=task, label_column="label" if task[0] == "s" else "tags")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_name_or_path": "/nowhere/model"}, "no tokenizer in '/nowhere/model'"),
        ({"dataset": "/nowhere/*.jsonl"}, "no txt, jsonl or parquet file there"),
        ({"messages_column": "chat"}, "neither a column 'chat' nor 'prompt'"),
        ({"task": "sequence_classification", "text_column": "body"}, "no column 'body'; its columns: messages, text"),
        ({"task": "token_classification"}, "column 'label' must hold a list of labels"),
        ({"block_size": 12}, "the training split of .* is empty"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_trained(tune, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        tune(**changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_tokenizer_that_does_not_fit(tune, checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens(["more", "words"])
    tokenizer.save_pretrained(checkpoint)
    with pytest.raises(ConfigError, match="the tokenizer has 261 tokens, the model's vocab_size is 259: raise it"):
        tune()


def test_the_new_heads_are_all_that_a_checkpoint_may_lack():
    for task, prefixes in finetune.HEADS.items():
        auto = {"sequence_classification": AutoModelForSequenceClassification}.get(
            task, AutoModelForTokenClassification
        )
        config = LinAttnConfig(vocab_size=16, **TINY)
        added = {name for name, _ in auto.from_config(config).named_parameters()}
        added -= {name for name, _ in LinAttnForCausalLM(config).named_parameters()}
        assert added
        assert all(name.startswith(prefixes) for name in added), added
    assert issubclass(LinAttnForCausalLM, LinAttnPreTrainedModel)
