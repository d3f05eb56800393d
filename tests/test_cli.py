"""`hf-linattn read` and `ask`: a text is read once, and asking does not change the state; `transformers` passes on."""

from importlib.util import find_spec

import pytest
import torch
from helpers import make_config

from data import byte_tokenizer
from hf_linattn import LinAttnForCausalLM, LinearAttentionCache, cli
from hf_linattn.cli import main


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = make_config("conv", vocab_size=len(tokenizer), eos_token_id=None)
    LinAttnForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_text("Zwölf Boxkämpfer jagen Viktor. " * 40, encoding="utf-8")
    return tmp_path


def test_read_then_ask(checkpoint, capsys):
    book, state, model = checkpoint / "book.txt", checkpoint / "book.state", str(checkpoint / "model")
    main(["read", str(book), "--model", model, "--out", str(state), "--chunk", "100"])
    tokens = len(book.read_bytes())
    assert f"{tokens:,} tokens read" in capsys.readouterr().out
    before = state.read_bytes()
    answers = []
    for _ in range(2):
        main(["ask", str(state), "Und", "--tokens", "12"])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != "\n"
    assert state.read_bytes() == before

    loaded = LinAttnForCausalLM.from_pretrained(model)
    assert LinearAttentionCache.load(state, loaded).get_seq_length() == tokens
    ids = byte_tokenizer()(book.read_text(encoding="utf-8") + "Und", return_tensors="pt")["input_ids"]
    expected = loaded.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert answers[0].rstrip("\n") == byte_tokenizer().decode(expected, skip_special_tokens=True).rstrip("\n")


@pytest.mark.parametrize(
    "change, words",
    [
        (["read", "nobook.txt", "--model", "model", "--out", "new.state"], "there is no such file"),
        (["read", "bad.txt", "--model", "model", "--out", "new.state"], "not UTF-8 text"),
        (["read", "empty.txt", "--model", "model", "--out", "new.state"], "has no tokens"),
        (["read", "book.txt", "--model", "model", "--out", "bad.txt"], "is there already; --force replaces it"),
        (["ask", "no.state", "Und"], "no such state file"),
        (["ask", "book.txt", "Und"], "not a whole safetensors file"),
    ],
)
def test_bad_input_is_one_line(checkpoint, monkeypatch, change, words):
    monkeypatch.chdir(checkpoint)
    (checkpoint / "bad.txt").write_bytes(b"\xff\xfe\xff")
    (checkpoint / "empty.txt").write_text("")
    with pytest.raises(SystemExit) as error:
        main(change)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not (checkpoint / "new.state").exists()


@pytest.mark.parametrize(
    "arguments, words", [(["--help"], ("serve", "chat")), (["serve", "--help"], ("--host", "--port"))]
)
def test_the_command_of_transformers(arguments, words, capsys):
    """Options are handed on, not read by this command."""
    with pytest.raises(SystemExit) as ended:
        main(["transformers", *arguments])
    assert ended.value.code in (0, None)
    shown = capsys.readouterr().out
    assert "hf-linattn transformers" in shown
    assert all(word in shown for word in words)


@pytest.mark.parametrize(
    "arguments, absent, words",
    [
        (["serve", "model"], {"fastapi", "uvicorn"}, "serve needs fastapi, uvicorn: pip install 'hf-linattn[serve]'"),
        (["chat", "model"], {"rich"}, "chat needs rich: pip install 'hf-linattn[serve]'"),
        (["serve", ".", "--device", "cpu"], set(), "hf-linattn: "),  # a folder without a model
    ],
)
def test_what_cannot_be_served_is_one_line(arguments, absent, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in absent else find_spec(name))
    with pytest.raises(SystemExit) as error:
        main(["transformers", *arguments])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_evaluating_without_the_harness_is_one_line(monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(
        SystemExit, match=r"^hf-linattn: lm-eval needs the package lm-eval: pip install 'lm-eval\[hf\]'$"
    ):
        main(["lm-eval", "run", "--tasks", "lambada_openai"])


def test_env_says_what_runs_and_why(capsys, monkeypatch):
    main(["env", "--device", "cpu"])
    out = capsys.readouterr().out
    assert f"| torch | {torch.__version__} |" in out
    assert "| causal, float32 | native | the fastest here |" in out
    assert "| causal, float64 | torch | native: torch.float64 has no kernel" in out
    monkeypatch.setenv("HF_LINATTN_BACKEND", "torch")
    main(["env", "--device", "cpu"])
    assert "| causal, float32 | torch | HF_LINATTN_BACKEND names it |" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["nothing", "cuda"])
def test_env_of_a_device_that_is_not_there(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match=f"hf-linattn: --device {device}: ") as error:
        main(["env", "--device", device])
    assert "\n" not in str(error.value)
