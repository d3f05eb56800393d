"""Pushing to a hub and loading from it, against one on this machine."""

import json
import os

import huggingface_hub
import pytest
import torch
import transformers
from helpers import make_model, random_ids
from loopback_hub import TOKEN, serve_hub
from portable_checkpoints import files_in
from transformers import AutoConfig, AutoModelForCausalLM

from hf_linattn import LinAttnForCausalLM


@pytest.fixture
def no_token(monkeypatch, tmp_path):
    """Nobody is logged in."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))


@pytest.fixture
def hub(monkeypatch, tmp_path, no_token):
    """The hub that both libraries then take for theirs."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub_cache"))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    huggingface_hub.utils.close_session()
    with serve_hub() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", huggingface_hub.HfApi(endpoint=server.url))
        yield server
    huggingface_hub.utils.close_session()


@pytest.mark.parametrize("portable", [True, False])
def test_a_pushed_model_comes_back(portable, hub, tmp_path):
    model, ids = make_model("hybrid"), random_ids(2, 9)
    model.add_model_tags("linear-attention")
    model.push_to_hub("user/tiny", portable=portable, token=TOKEN, tags=["tiny"])
    model.save_pretrained(tmp_path / "saved", portable=portable)
    remote = dict(hub.repos["user/tiny"])
    card = remote.pop("README.md").decode()
    assert "- linear-attention" in card
    assert "- tiny" in card
    assert remote == files_in(tmp_path / "saved")
    assert ("modeling_linattn.py" in remote) == portable

    hub.requests.clear()
    for options in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        again = AutoModelForCausalLM.from_pretrained("user/tiny", **options)
        assert type(again) is LinAttnForCausalLM
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert any(request.endswith("model.safetensors") for request in hub.requests)
    code = [name for name in remote if name.endswith(".py")]
    assert not any(request.endswith(tuple(code)) for request in hub.requests), "code of the repository was fetched"
    assert not (tmp_path / "modules").exists()


def test_a_repository_is_pushed_to_again(hub):
    model = make_model()
    for scale in (1, 2):
        with torch.no_grad():
            model.lm_head.weight.mul_(scale)
        info = model.push_to_hub("tiny", portable=True, token=TOKEN, commit_message=f"times {scale}")
        assert info.commit_message == f"times {scale}"
    again = AutoModelForCausalLM.from_pretrained("user/tiny")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert AutoConfig.from_pretrained("user/tiny").feature_map == "elu1"


def test_saving_can_push(hub, tmp_path):
    make_model().save_pretrained(tmp_path / "tiny", portable=True, push_to_hub=True, token=TOKEN)
    local = files_in(tmp_path / "tiny")
    assert {name: hub.repos["user/tiny"][name] for name in local} == local
    assert "AutoConfig" in json.loads(local["config.json"])["auto_map"]


@pytest.mark.parametrize("portable", [True, False])
def test_no_token_is_said_in_one_line(portable, no_token, tmp_path, monkeypatch):
    def connect(*args, **kwargs):
        raise AssertionError("nothing is asked of the hub without a token")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", connect)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PermissionError, match=r"^pushing to 'user/tiny' needs a token of the hub: log in .*$") as error:
        make_model().push_to_hub("user/tiny", portable=portable)
    assert "\n" not in str(error.value)
    with pytest.raises(PermissionError, match="^pushing to 'tiny' needs a token"):
        make_model().save_pretrained("tiny", portable=portable, push_to_hub=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("portable", [True, False])
def test_a_token_that_the_hub_refuses_is_said_in_one_line(portable, hub, tmp_path):
    with pytest.raises(PermissionError, match=r"does not let this token push to 'user/tiny' \(HTTP 401\)") as error:
        make_model().push_to_hub("user/tiny", portable=portable, token="hf_wrong")
    assert "\n" not in str(error.value)
    assert hub.repos == {}
    folder = tmp_path / "local"
    with pytest.raises(PermissionError, match="HTTP 401"):
        make_model().save_pretrained(folder, portable=True, push_to_hub=True, repo_id="user/tiny", token="hf_wrong")
    assert not folder.exists()
