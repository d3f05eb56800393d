"""From rows to examples: what is learned, what is packed with what, and which rows are refused."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from config import ConfigError, FinetuneConfig
from data import IGNORE, byte_tokenizer
from examples import (
    Example,
    PackedExamples,
    chat_maker,
    collate,
    label_names,
    read_splits,
    sequence_maker,
    token_maker,
)
from hf_linattn import LinAttnConfig, LinAttnForCausalLM

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "wie heißt du?"},
    {"role": "assistant", "content": "終わり"},
    {"role": "user", "content": "and now"},
    {"role": "assistant", "content": "that is all"},
]


@pytest.fixture
def tokenizer():
    made = byte_tokenizer()
    made.chat_template = TEMPLATE
    return made


def config(**changes) -> FinetuneConfig:
    return FinetuneConfig(**{"model_name_or_path": "x", "block_size": 64, "held_out_fraction": 0.2} | changes)


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# ---- conversations ----


def test_only_the_assistants_words_and_their_end_are_learned(tokenizer):
    example = chat_maker(config(), tokenizer)("d", {"messages": CHAT})
    learned = [token for token, label in zip(example.ids, example.labels) if label != IGNORE]
    assert learned == [*"終わり".encode(), 257, *b"that is all", 257]
    assert all(label in (IGNORE, token) for token, label in zip(example.ids, example.labels))
    assert (
        example.ids
        == tokenizer(tokenizer.apply_chat_template(CHAT, tokenize=False), split_special_tokens=False)["input_ids"]
    )
    everything = chat_maker(config(completion_only=False), tokenizer)("d", {"messages": CHAT})
    assert everything.ids == example.ids
    assert everything.labels == [IGNORE, *example.ids[1:]]


def test_prompts_and_completions_need_no_template():
    tokenizer = byte_tokenizer()
    row = {"prompt": "ask ", "completion": "<|eos|>é"}  # text is text: no special token comes of it
    example = chat_maker(config(), tokenizer)("d", row)
    answer = [*"<|eos|>é".encode(), 257]
    assert example.ids == [256, *b"ask ", *answer]
    assert example.labels == [IGNORE] * 5 + answer
    assert chat_maker(config(completion_only=False), tokenizer)("d", row).labels == [IGNORE, *example.ids[1:]]


def test_a_template_may_come_from_a_file_and_stays_with_the_tokenizer(tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    tokenizer = byte_tokenizer()
    make = chat_maker(config(chat_template=str(tmp_path / "t.jinja")), tokenizer)
    assert bytes(make("d", {"messages": CHAT}).ids[:6]) == b"<user>"
    tokenizer.save_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE


@pytest.mark.parametrize(
    "template, row, message",
    [
        (None, {"messages": CHAT}, "the tokenizer has no chat template: give a file"),
        (TEMPLATE, {"text": "x", "n": 1}, "neither a column 'messages' nor 'prompt'; its columns: text, n"),
        (TEMPLATE, {"prompt": "x"}, "no column 'completion'; its columns: prompt"),
        (TEMPLATE, {"messages": "hello"}, "messages must be a list of {role, content}, got hello"),
        (TEMPLATE, {"messages": []}, "messages must be a list"),
        (TEMPLATE, {"messages": [{"content": "x"}]}, "messages must be a list"),
        (
            "{{ raise_exception('no system') }}",
            {"messages": CHAT},
            "the chat template refuses a conversation: no system",
        ),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            {"messages": CHAT},
            "otherwise than the whole",
        ),
        (TEMPLATE, {"prompt": [CHAT[0]], "completion": [CHAT[1]]}, "prompt and completion must be text"),
    ],
)
def test_rows_that_are_no_conversation(template, row, message):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=message) as caught:
        chat_maker(config(), tokenizer)("d", row)
    assert "\n" not in str(caught.value)


def test_long_conversations_lose_their_end_and_those_without_an_answer_are_dropped(tmp_path, tokenizer):
    rows = [{"messages": CHAT}] * 30 + [{"messages": CHAT[:1]}] * 30
    dataset = write(tmp_path / "a.jsonl", rows)
    splits = read_splits(config(dataset=dataset, block_size=45), chat_maker(config(), tokenizer))
    assert sum(split.counts["rows"] for split in splits) == 60
    assert sum(split.counts["shortened"] for split in splits) == 30
    assert sum(split.counts["dropped"] for split in splits) == 30
    for example in splits[0].examples:
        assert len(example.ids) == len(example.labels) == 45
        assert [x for x in example.labels if x != IGNORE] == [*"終わり".encode(), 257]
    with pytest.raises(ConfigError, match=r"the training split of .* is empty \(\d+ rows, none of them with anything"):
        read_splits(config(dataset=dataset, block_size=10), chat_maker(config(), tokenizer))


def test_held_out_rows_are_not_trained_on_and_can_be_given(tmp_path, tokenizer):
    rows = [{"prompt": f"{i}", "completion": "x"} for i in range(50)]
    dataset = write(tmp_path / "a.jsonl", rows)
    make = chat_maker(config(), tokenizer)
    train, held_out = read_splits(config(dataset=dataset), make)
    assert len(train.examples) + len(held_out.examples) == 50
    assert 0 < len(held_out.examples) < 25
    other = write(tmp_path / "b.jsonl", rows[:3])
    train, held_out = read_splits(config(dataset=dataset, eval_dataset=other), make)
    assert (len(train.examples), len(held_out.examples)) == (50, 3)
    (tmp_path / "c.txt").write_text("plain")
    with pytest.raises(ConfigError, match="c.txt is plain text; task chat needs columns"):
        read_splits(config(dataset=str(tmp_path / "c.txt")), make)


# ---- packing ----


@settings(deadline=None, max_examples=100)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_every_example_is_in_one_block_whole_and_alone(lengths):
    examples = [Example([i] * n, [IGNORE, *[i] * (n - 1)]) for i, n in enumerate(lengths)]
    packed = PackedExamples(examples, 20, pad=999)
    found = []
    for i in range(len(packed)):
        block = packed[i]
        starts = (block["position_ids"] == 0).nonzero().flatten().tolist() + [20]
        for start, stop in zip(starts, starts[1:]):
            ids, labels = block["input_ids"][start:stop].tolist(), block["labels"][start:stop].tolist()
            assert block["position_ids"][start:stop].tolist() == list(range(stop - start))
            if ids[0] == 999:
                assert set(labels) == {IGNORE}
            else:
                found.append((ids, labels))
    assert sorted(found) == sorted((example.ids, example.labels) for example in examples)
    assert len(packed) <= 2 * -(-sum(lengths) // 20)
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_packed_conversations_cost_what_they_cost_alone(tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LinAttnForCausalLM(LinAttnConfig(vocab_size=259, conv_kernel_size=4, initializer_range=0.3, **sizes)).eval()
    make = chat_maker(config(), tokenizer)
    examples = [make("d", {"prompt": "x" * n, "completion": "yes" * n}) for n in (1, 3, 5, 9, 2)]
    packed = PackedExamples(examples, 64, pad=258)
    assert len(packed) < len(examples)
    one = torch.ones(())
    with torch.no_grad():
        together = sum(
            model(**{k: v[None] for k, v in packed[i].items()}, num_items_in_batch=one).loss for i in range(len(packed))
        )
        alone = sum(
            model(torch.tensor([e.ids]), labels=torch.tensor([e.labels]), num_items_in_batch=one).loss for e in examples
        )
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0)


# ---- classes ----


def test_classes_are_numbered_by_name_or_by_themselves(tmp_path):
    names = label_names(
        config(
            task="sequence_classification", dataset=write(tmp_path / "a.jsonl", [{"label": x} for x in ("b", "a", "b")])
        )
    )
    assert (names.names, names("b"), len(names)) == (["a", "b"], 1, 2)
    names = label_names(
        config(task="sequence_classification", dataset=write(tmp_path / "b.jsonl", [{"label": x} for x in (2, 0)]))
    )
    assert (names.names, names(2)) == (["0", "1", "2"], 2)
    names = label_names(
        config(task="token_classification", dataset=write(tmp_path / "c.jsonl", [{"label": ["O", "B"]}]))
    )
    assert names.names == ["B", "O"]


@pytest.mark.parametrize(
    "task, rows, message",
    [
        ("sequence_classification", [{"label": 1.5}], "label 1.5 is neither text nor a whole number"),
        ("sequence_classification", [{"label": -1}, {"label": 2}], "label -1 is negative"),
        ("sequence_classification", [{"label": "a"}, {"label": "a"}], "has 1 class: need two"),
        ("sequence_classification", [{"label": ["a"]}], "must hold one label"),
        ("token_classification", [{"label": 3}], "must hold a list of labels"),
        ("sequence_classification", [{"klass": 3}], "no column 'label'; its columns: klass"),
    ],
)
def test_labels_that_are_none(tmp_path, task, rows, message):
    with pytest.raises(ConfigError, match=message):
        label_names(config(task=task, dataset=write(tmp_path / "a.jsonl", rows)))


def test_texts_and_pairs(tmp_path, tokenizer):
    chosen = config(task="sequence_classification", dataset=write(tmp_path / "a.jsonl", [{"label": x} for x in "ab"]))
    names = label_names(chosen)
    example = sequence_maker(chosen, tokenizer, names)("d", {"text": "hé", "label": "b"})
    assert (example.ids, example.labels) == ([256, *"hé".encode(), 257], 1)
    pairs = config(task="sequence_classification", text_pair_column="other")
    example = sequence_maker(pairs, tokenizer, names)("d", {"text": "x", "other": "y", "label": "a"})
    assert example.ids == [256, *b"x", 257, *b"y", 257]
    tokenizer.pad_token = tokenizer.eos_token  # then the head would skip an EOS at the end
    assert sequence_maker(chosen, tokenizer, names)("d", {"text": "h", "label": "b"}).ids == [256, *b"h"]
    with pytest.raises(ConfigError, match="column 'text' holds int, not text"):
        sequence_maker(chosen, tokenizer, names)("d", {"text": 3, "label": "b"})


def test_a_words_label_stands_where_it_has_been_read(tmp_path, tokenizer):
    chosen = config(task="token_classification", dataset=write(tmp_path / "a.jsonl", [{"label": ["O", "P"]}]))
    make = token_maker(chosen, tokenizer, label_names(chosen))
    example = make("d", {"tokens": ["to", "Zoë"], "label": ["O", "P"]})
    assert example.ids == [256, *"to Zoë".encode()]
    assert example.labels == [IGNORE, IGNORE, 0, IGNORE, IGNORE, IGNORE, IGNORE, 1]
    assert make("d", {"tokens": [], "label": []}) is None
    with pytest.raises(ConfigError, match="must be lists of one length"):
        make("d", {"tokens": ["a"], "label": ["O", "P"]})


def test_batches_are_padded_on_the_right():
    batch = collate([Example([1, 2, 3], 7), Example([4], 8)], pad=9)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [7, 8]
    words = collate([Example([1, 2], [IGNORE, 5]), Example([3], [6])], pad=9)
    assert words["labels"].tolist() == [[IGNORE, 5], [6, IGNORE]]
