"""Streaming to a file: the text of the tokens, whatever the tokenizer joins, from a bounded window."""

import io

import pytest
import torch
from helpers import make_model, random_ids
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_linattn.generation import FileStreamer
from hf_linattn.generation.streamers import IncrementalDecoder

TEXT = "naïve café 🤖 über\n\n def f(x): return x ** 2  # 你好\n"


def byte_tokenizer():
    """One token a byte, so that most characters of other scripts take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["<end>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def word_tokenizer():
    """Words that the decoder joins by blanks: the text of a token depends on the one before it."""
    vocabulary = {word: i for i, word in enumerate(["<end>", "a", "##b", "c", "##d", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<end>"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def test_text_of_several_tokens_a_character():
    tokenizer = byte_tokenizer()
    decoder, ids = IncrementalDecoder(tokenizer), tokenizer(TEXT)["input_ids"]
    pieces = [decoder.put(token) for token in ids]
    assert "".join(pieces) + decoder.flush() == TEXT
    assert all("�" not in piece for piece in pieces)
    assert pieces[2] == ""  # the first byte of ï


def test_text_joined_by_the_tokenizer():
    tokenizer = word_tokenizer()
    decoder, ids = IncrementalDecoder(tokenizer), [1, 2, 3, 5, 4, 1, 0, 0, 3]
    text = "".join(decoder.put(token) for token in ids) + decoder.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=True) == "ab c .d a c"


def test_the_window_is_bounded():
    tokenizer = byte_tokenizer()
    decoder, longest = IncrementalDecoder(tokenizer), 0
    for token in tokenizer(TEXT * 30)["input_ids"]:
        decoder.put(token)
        longest = max(longest, len(decoder.window))
    assert longest <= 16


def test_bytes_that_are_no_text_are_not_held_for_ever():
    tokenizer = byte_tokenizer()
    broken = tokenizer("é")["input_ids"][:1] * 20
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.put(token) for token in broken]
    assert any(pieces)
    assert "".join(pieces) + decoder.flush() == "�" * 20


def test_text_file(tmp_path):
    tokenizer, model = byte_tokenizer(), make_model(vocab_size=257)
    path, ids = tmp_path / "out.txt", random_ids(1, 5)
    tokens = model.generate(ids, max_new_tokens=40, do_sample=True, streamer=FileStreamer(path, tokenizer))
    assert path.read_bytes().decode() == tokenizer.decode(tokens[0, 5:], skip_special_tokens=True)


def test_text_to_an_open_file():
    tokenizer, model, file = byte_tokenizer(), make_model(vocab_size=257), io.StringIO(newline="")
    streamer = FileStreamer(file, tokenizer)
    text = ""
    for _ in range(2):  # the file stays open, and a streamer serves again
        tokens = model.generate(random_ids(1, 5), max_new_tokens=9, do_sample=False, streamer=streamer)
        text += tokenizer.decode(tokens[0, 5:], skip_special_tokens=True)
    assert file.getvalue() == text


def test_ids_file(tmp_path):
    path, ids = tmp_path / "ids.tsv", random_ids(3, 5)
    tokens = make_model().generate(ids, max_new_tokens=6, do_sample=True, streamer=FileStreamer(path))
    read = [[int(token) for token in line.split("\t")] for line in path.read_text().splitlines()]
    assert torch.equal(torch.tensor(read).t(), tokens[:, 5:])


def test_several_tokens_a_step(tmp_path):
    """Prompt lookup hands over what it accepted at once."""
    path, ids = tmp_path / "ids.tsv", torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    tokens = make_model().generate(
        ids, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3, streamer=FileStreamer(path)
    )
    assert [int(line) for line in path.read_text().splitlines()] == tokens[0, 8:].tolist()


def test_text_of_two_rows_is_refused(tmp_path):
    path = tmp_path / "out.txt"
    with pytest.raises(ValueError, match="one row, the batch has 2"):
        make_model().generate(random_ids(2, 5), max_new_tokens=2, streamer=FileStreamer(path, byte_tokenizer()))
    assert not path.exists()
