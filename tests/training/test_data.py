import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from config import ConfigError, read_config
from data import IGNORE, BlockStream, PackedTokens, byte_tokenizer, load_corpus, take_bytes
from sources import origin_of, read_documents, split_hash


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    # A checkpoint has a config.json beside it, of a model whose own tokenizer is another one.
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return AutoTokenizer.from_pretrained(folder)


# ---- tokenizer ----


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=60))
def test_tokens_are_utf8_bytes_and_decode_to_the_same_text(reloaded, text):
    ids = reloaded(text)["input_ids"]
    assert bytes(ids) == text.encode()
    assert reloaded.decode(ids) == text
    assert reloaded.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "text",
    [
        "<|eos|>",
        "a <|bos|>b",
        "  two  spaces , kept . ",
        "\r\n\t\x00\x7f",
        "e\u0301 é",
        "\ufeffBOM",
        "👩‍👩‍👧 終",
        "Ġ Ċ ĉ",
    ],
)
def test_awkward_texts_survive(reloaded, text):
    ids = reloaded(text)["input_ids"]
    assert bytes(ids) == text.encode()
    assert reloaded.decode(ids, skip_special_tokens=True) == text


def test_every_byte_has_its_own_number_as_id(reloaded):
    every = "".join(map(chr, range(0x800))) + "\U000f4240"  # with these, all bytes that UTF-8 uses below 0xF5
    assert bytes(reloaded(every)["input_ids"]) == every.encode()
    assert len(reloaded) == 259
    assert (reloaded.bos_token_id, reloaded.eos_token_id, reloaded.pad_token_id) == (256, 257, 258)


# ---- documents and the split ----


def test_split_hash_is_the_same_everywhere_and_even():
    assert split_hash("json/decoder.py") == pytest.approx(0.23117427, abs=1e-8)
    values = np.array([split_hash(f"file{i}.py") for i in range(2000)])
    assert abs((values < 0.05).mean() - 0.05) < 0.015


def test_no_held_out_document_is_trained_on(arguments):
    config = read_config(arguments())
    corpus = load_corpus(config, byte_tokenizer(), progress=False)
    train = list(corpus.train_texts())
    assert len(train) + len(corpus.held_out_texts) == 120
    assert not set(train) & set(corpus.held_out_texts)
    assert corpus.summary["held_out_bytes"] == sum(len(t.encode()) for t in corpus.held_out_texts)
    (shard,) = corpus.shards()
    assert Counter(shard.ids[shard.ids < 256].tolist()) == Counter(b"".join(t.encode() for t in train))


def test_standard_library_leaves_out_packages_and_tests(arguments):
    config = read_config(arguments(dataset="python_stdlib"))
    names = [document.name for document in read_documents(config.dataset, config)]
    assert "json/decoder.py" in names
    assert len(names) > 400
    assert not [name for name in names if {"site-packages", "test", "ensurepip"} & set(name.split("/"))]
    assert names == sorted(names, key=lambda name: name.split("/"))


def test_files_of_every_kind_are_read(arguments, tmp_path):
    import pandas

    (tmp_path / "a.txt").write_bytes("eins\r\nzwei é".encode())
    (tmp_path / "b.jsonl").write_text('{"body": "drei"}\n{"body": ""}\n{"body": "\\ud800vier"}\n')
    pandas.DataFrame({"body": ["fünf", "sechs"]}).to_parquet(tmp_path / "c.parquet")
    (tmp_path / "corpus.jsonl").unlink()
    expected = ["eins\r\nzwei é", "drei", "?vier", "fünf", "sechs"]
    for source in (tmp_path, tmp_path / "*.*"):
        config = read_config(arguments(dataset=source, text_column="body"))
        assert [d.text for d in read_documents(str(source), config)] == expected


def test_missing_column_is_named_with_those_there_are(arguments):
    config = read_config(arguments(text_column="content"))
    with pytest.raises(ConfigError, match="no column 'content'; its columns: text, number"):
        load_corpus(config, byte_tokenizer(), progress=False)
    config = read_config(arguments(text_column="number"))
    with pytest.raises(ConfigError, match="'number' holds int, not text"):
        load_corpus(config, byte_tokenizer(), progress=False)


def test_empty_splits_are_errors(arguments, tmp_path):
    (tmp_path / "only.txt").write_text("one document")
    for fraction, split in ((1e-9, "held-out"), (1 - 1e-9, "training")):
        config = read_config(arguments(dataset=tmp_path / "only.txt", held_out_fraction=fraction))
        with pytest.raises(ConfigError, match=f"the {split} split of .*only.txt' is empty"):
            load_corpus(config, byte_tokenizer(), progress=False)
    with pytest.raises(ConfigError, match="no txt, jsonl or parquet file there"):
        read_documents(str(tmp_path / "*.nothing"), config)


def test_own_held_out_text(arguments, tmp_path):
    (tmp_path / "held.txt").write_text("kept apart")
    config = read_config(arguments(eval_dataset=tmp_path / "held.txt"))
    corpus = load_corpus(config, byte_tokenizer(), progress=False)
    assert corpus.held_out_texts == ["kept apart"]
    assert corpus.summary["train_documents"] == 120


def test_a_dataset_says_whose_it_is(corpus_file, tmp_path):
    sources = {str(corpus_file): "files", str(tmp_path): "files", str(tmp_path / "*.jsonl"): "files"}
    sources |= {"python_stdlib": "python", "someone/texts": "hub", "wikitext": "hub"}
    assert {source: origin_of(source) for source in sources} == sources


def test_streaming_sees_the_same_training_text(arguments, monkeypatch):
    monkeypatch.setattr("data.SHARD_CHARACTERS", 500)  # several shards
    config = read_config(arguments(streaming=True))
    streamed = load_corpus(config, byte_tokenizer(), progress=False)
    (whole,) = load_corpus(read_config(arguments()), byte_tokenizer(), progress=False).shards()
    for _ in range(2):  # a stream can be read again
        shards = list(streamed.shards())
        assert len(shards) > 2
        assert np.array_equal(np.concatenate([s.ids for s in shards]), whole.ids)


def test_take_bytes_cuts_between_characters(arguments):
    config = read_config(arguments())
    documents = list(take_bytes(read_documents(config.dataset, config), 100))
    total = sum(len(d.text.encode()) for d in documents)
    assert 97 <= total <= 100  # no character of the text has more than three bytes
    original = [d.text for d in read_documents(config.dataset, config)][: len(documents)]
    assert [d.text for d in documents[:-1]] == original[:-1]
    assert original[-1].startswith(documents[-1].text)


# ---- packing ----


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [7, 2, 30, 3, 3], [16, 16, 16], [15, 1, 40]])
def test_every_token_but_the_first_of_a_document_is_predicted_once(lengths):
    numbered = iter(range(10_000))
    documents = [[next(numbered) for _ in range(n)] for n in lengths]
    blocks = PackedTokens(documents, block_size=16, pad=-1)
    predicted = Counter()
    for block in (blocks[i] for i in range(len(blocks))):
        ids, labels = block["input_ids"], block["labels"]
        assert len(ids) == 16
        assert labels[0] == IGNORE
        kept = labels != IGNORE
        assert torch.equal(ids[kept], labels[kept])
        predicted.update(labels[kept].tolist())
    assert predicted == Counter(token for document in documents for token in document[1:])


def test_positions_restart_with_each_document():
    blocks = PackedTokens([[1, 2, 3], [4, 5], [6, 7, 8, 9]], block_size=8, pad=0)
    assert blocks[0]["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert blocks[0]["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert blocks[0]["labels"].tolist() == [IGNORE, 2, 3, IGNORE, 5, IGNORE, 7, 8]
    assert blocks[1]["input_ids"].tolist() == [8, 9, 0, 0, 0, 0, 0, 0]  # the last token again, as context
    assert blocks[1]["labels"].tolist() == [IGNORE, 9] + [IGNORE] * 6
    assert "position_ids" not in PackedTokens([[1, 2]], 8, 0, isolate=False)[0]
    with pytest.raises(IndexError):
        blocks[2]


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, initializer_range=0.3)).eval()


def test_packed_documents_cost_what_they_cost_alone():
    model = tiny_llama()
    documents = [torch.randint(1, 64, (n,)).tolist() for n in (5, 9, 3, 12)]

    def nats(blocks: PackedTokens) -> float:
        kwargs = {"use_cache": False, "num_items_in_batch": torch.ones(())}
        return sum(
            model(**{k: v[None] for k, v in blocks[i].items()}, **kwargs).loss.item() for i in range(len(blocks))
        )

    alone = sum(nats(PackedTokens([d], 32, pad=0)) for d in documents)
    assert nats(PackedTokens(documents, 32, pad=0)) == pytest.approx(alone, rel=1e-5)
    assert abs(nats(PackedTokens(documents, 32, pad=0, isolate=False)) - alone) > 0.1


# ---- order ----


def first(stream: BlockStream, count: int) -> list[int]:
    return [int(block["input_ids"][0]) for block, _ in zip(stream, range(count), strict=False)]


@pytest.mark.parametrize("skip", [1, 9, 10, 11, 37])
def test_a_stream_with_skip_is_the_rest_of_the_stream(skip):
    shards = [PackedTokens([list(range(a, a + 13))], block_size=4, pad=0) for a in (0, 100)]
    sizes = [len(shard) for shard in shards]
    assert sizes == [4, 4]
    whole = first(BlockStream(lambda: shards, seed=3), 60)
    assert first(BlockStream(lambda: shards, seed=3, skip=skip), 60 - skip) == whole[skip:]


def test_each_epoch_has_every_block_once_in_another_order():
    shard = PackedTokens([list(range(301))], block_size=4, pad=0)
    seen = first(BlockStream(lambda: [shard], seed=0), 200)
    assert sorted(seen[:100]) == sorted(seen[100:]) == list(range(0, 300, 3))
    assert seen[:100] != seen[100:]
    assert seen != first(BlockStream(lambda: [shard], seed=1), 200)
