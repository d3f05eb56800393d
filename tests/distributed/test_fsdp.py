"""FSDP2 with two ranks trains what one process trains, resumes from a sharded checkpoint, and is saved as one model."""

import pytest
import torch
from helpers import random_ids
from transformers import AutoModelForCausalLM

from .fsdp_cases import CASES, SPLIT, STEPS, model_of, optimizer_of, train
from .ranks import launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp")
    model_of("hybrid").save_pretrained(folder / "whole")
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return launch("fsdp_ranks", 2, folder)


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_one_process(ranks, case):
    model = model_of(case)
    alone = train(model, optimizer_of(model), range(STEPS))
    assert alone[-1] < 0.99 * alone[0]
    for rank in ranks:
        assert rank[case]["losses"] == pytest.approx(alone, rel=1e-5)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert sum(rank[case]["local"] for rank in ranks) == total
    assert all(rank[case]["local"] < 0.6 * total for rank in ranks)
    layers = [f"model.layers.{index}" for index in range(model.config.num_hidden_layers)]
    assert ranks[0][case]["units"] == ["", *layers]  # what must not be split is gathered at once, nothing smaller


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_checkpoint_resumes_to_the_bit(ranks, case):
    for rank in ranks:
        assert rank[case]["resumed"] == rank[case]["losses"][SPLIT:]


@pytest.mark.parametrize("case", CASES)
def test_the_merged_model_is_an_ordinary_checkpoint(ranks, folder, case):
    merged = ranks[0][case]["merged"]
    model = AutoModelForCausalLM.from_pretrained(folder / case / "merged")
    saved = model.state_dict()
    assert saved.keys() == merged.keys() == model_of(case).state_dict().keys()
    assert all(torch.equal(saved[name], merged[name]) for name in saved)
    assert model.config.tie_word_embeddings == CASES[case].get("tie_word_embeddings", False)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == model.config.tie_word_embeddings
    # and the one that was trained: the next loss is that of the rank's
    ids = random_ids(4, 40, seed=STEPS - 1)
    assert model(ids, labels=ids).loss.item() < ranks[0][case]["losses"][-1]


def test_transformers_own_sharding_loads_it(ranks):
    model = model_of("hybrid")
    expected = model(random_ids(2, 40), use_cache=False).logits
    for rank in ranks:
        torch.testing.assert_close(rank["loaded"], expected, rtol=1e-5, atol=1e-5)
