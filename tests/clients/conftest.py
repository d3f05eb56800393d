"""Tiny models as their clients get them; no client may reach for the network."""

import huggingface_hub.constants
import pytest
from accelerate.state import AcceleratorState, GradientState
from helpers import FULL, LINEAR, make_model

LAYERS = {"linear": [LINEAR, LINEAR], "hybrid": [LINEAR, FULL]}


@pytest.fixture(params=LAYERS)
def kind(request) -> str:
    """What the layers of `make` are: all linear, or one linear and one with keys and values."""
    return request.param


@pytest.fixture
def make(kind):
    """A model of hidden size 32 and two layers, the same at every call; options are those of `make_model`."""

    def build(**options):
        return make_model(hidden_size=32, layer_types=LAYERS[kind], **options)

    return build


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """accelerate's state is global: each test is a process of its own to it."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
