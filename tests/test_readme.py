"""The README's Python runs as it stands, and its tables are what their files say."""

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data import byte_tokenizer
from hf_linattn import LinAttnConfig, LinAttnForCausalLM
from hf_linattn.benchmark.readme import fill

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def demo_checkpoint(tmp_path, monkeypatch):
    """Stand-ins for what `make demo` trains, and for a pretrained model, where the README looks for them."""
    tokenizer = byte_tokenizer()
    config = LinAttnConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        conv_kernel_size=4,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    torch.manual_seed(0)
    LinAttnForCausalLM(config).save_pretrained(tmp_path / "runs/demo")
    tokenizer.save_pretrained(tmp_path / "runs/demo")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path / "runs/llama")
    monkeypatch.chdir(tmp_path)


def test_python_blocks_run(demo_checkpoint, capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 5
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    read = int(re.search(r"(\d+) tokens read", capsys.readouterr().out)[1])
    assert read == names["cache"].get_seq_length() == names["history"].shape[1] - 1
    assert names["out"].shape == (1, 4096, 8, 64)
    assert names["new_model"].config.layer_types.count("full_attention") == 2
    assert names["student"].config.layer_types.count("full_attention") == 1


def test_tables_are_their_files():
    assert README.count("<!-- table:") == 12
    assert fill(README, ROOT) == README


@pytest.mark.parametrize("study", ["recall", "bytes"])
def test_pages_of_studies_are_their_files(study):
    page = (ROOT / "model_cards" / study / "README.md").read_text()
    assert page.count("<!-- table:") == 1
    assert fill(page, ROOT / "model_cards" / study) == page


@pytest.mark.parametrize("page", ["README.md", "model_cards/recall/README.md", "model_cards/bytes/README.md"])
def test_linked_files_exist(page):
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    assert links
    missing = [link for link in links if not link.startswith("https:") and not ((ROOT / page).parent / link).exists()]
    assert not missing
