"""The text-generation pipeline with a tokenizer of bytes."""

import pytest
import torch
from helpers import make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, TextIteratorStreamer, pipeline

TEXTS = ["read once,", "a longer prompt, so that the first is padded"]


@pytest.fixture(scope="module")
def tokenizer():
    """Token 0 pads, token 1 ends, the others are bytes."""
    pieces = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", padding_side="left")


def byte_model(name, tokenizer):
    model = make_model(name, vocab_size=len(tokenizer))
    model.generation_config.suppress_tokens = [0, 1]
    return model


@pytest.mark.parametrize("name", ["conv", "hybrid"])
def test_texts_one_by_one_and_batched(name, tokenizer):
    model = byte_model(name, tokenizer)
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    alone = [pipe(text, **options)[0]["generated_text"] for text in TEXTS]
    batched = [found[0]["generated_text"] for found in pipe(TEXTS, batch_size=2, **options)]
    assert batched == alone
    for text, generated in zip(TEXTS, alone, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        tokens = []
        for _ in range(8):
            logits = model(torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], 1), use_cache=False).logits[0, -1]
            logits[:2] = float("-inf")
            tokens.append(int(logits.argmax()))
        assert generated == tokenizer.decode(tokens)


def test_from_disk(tokenizer, tmp_path):
    model = byte_model("linear", tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"max_new_tokens": 8, "do_sample": False}
    loaded = pipeline("text-generation", model=str(tmp_path))
    assert type(loaded.model) is type(model)
    expected = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert loaded(TEXTS[0], **options) == expected(TEXTS[0], **options)
    assert AutoTokenizer.from_pretrained(tmp_path).padding_side == "left"


CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "And what is a book for?"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ],
    [{"role": "user", "content": "a question that is longer than the others " * 3}],
    [{"role": "user", "content": "the last, alone in its batch"}],
]


@pytest.mark.parametrize("name", ["conv", "hybrid"])
@pytest.mark.parametrize("prompts", [[*TEXTS, "x", "y" * 90, "the last"], CHATS], ids=["texts", "chats"])
def test_batches_of_four_from_disk(name, prompts, tokenizer, tmp_path):
    """Mixed lengths, the last batch smaller; the batch size is given to the pipeline once, as a server would."""
    byte_model(name, tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    batched = pipeline("text-generation", model=str(tmp_path), batch_size=4)
    single = pipeline("text-generation", model=batched.model, tokenizer=batched.tokenizer)
    sizes = []
    batched.model.model.register_forward_pre_hook(
        lambda module, inputs, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    found = [one[0]["generated_text"] for one in batched(prompts, **options)]
    assert set(sizes) == {1, 4}
    assert found == [single(prompt, **options)[0]["generated_text"] for prompt in prompts]
    assert len(set(found)) > 1


def test_several_returns(tokenizer):
    pipe = pipeline("text-generation", model=byte_model("linear", tokenizer), tokenizer=tokenizer)
    found = pipe(TEXTS[0], max_new_tokens=4, num_return_sequences=3, do_sample=True)
    assert len(found) == 3
    assert all(one["generated_text"].startswith(TEXTS[0]) for one in found)


def test_a_text_streamer(tokenizer):
    model = byte_model("linear", tokenizer)
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    out = model.generate(ids, max_new_tokens=6, do_sample=False, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(out[0, ids.shape[1] :])
