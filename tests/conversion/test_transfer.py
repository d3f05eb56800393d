"""Attention transfer: the loss is the KL of weights, its layers are those of the teacher, and it makes maps better."""

import pytest
import torch
from helpers import GROUPED, LINEAR, SIZES, random_ids
from transformers import LlamaConfig, LlamaForCausalLM

from hf_linattn import LinAttnConfig, LinAttnForCausalLM
from hf_linattn.conversion import new_parameters
from hf_linattn.conversion.transfer import AttentionTransfer, attention_kl
from hf_linattn.ops import attention_weights


def by_definition(q, k, phi_q, phi_k, documents, counted):
    """The loss by loops over queries, in plain autograd."""
    total = q.new_zeros(())
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            if not counted[b, i] or documents[b, i] < 0:
                continue
            seen = [j for j in range(i + 1) if documents[b, j] == documents[b, i]]
            for h in range(q.shape[2]):
                a = (k[b, seen, h // group] @ q[b, i, h] / q.shape[-1] ** 0.5).softmax(0)
                s = phi_k[b, seen, h // group] @ phi_q[b, i, h]
                total = total + (a * (a.log() - (s / s.sum()).log())).sum() / q.shape[2]
    return total


@pytest.mark.parametrize("packed", [False, True])
def test_attention_kl_is_its_definition(packed, monkeypatch):
    monkeypatch.setattr("hf_linattn.conversion.transfer.ROWS", 4)
    torch.manual_seed(0)
    q, k = torch.randn(2, 11, 4, 3), torch.randn(2, 11, 2, 3)
    phi_q, phi_k = (torch.rand(2, 11, heads, 5, requires_grad=True) for heads in (4, 2))
    documents = torch.tensor([[0] * 4 + [1] * 7, [-1] * 2 + [2] * 9]) if packed else torch.zeros(2, 11).long()
    counted = torch.rand(2, 11) < 0.7
    expected = by_definition(q, k, phi_q, phi_k, documents, counted)
    wanted = torch.autograd.grad(expected, (phi_q, phi_k))
    loss = attention_kl(q, k, phi_q, phi_k, documents, counted)
    found = torch.autograd.grad(3 * loss, (phi_q, phi_k))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, 3 * b, rtol=1e-4, atol=1e-5)


def make_pair(feature_map="hedgehog", **fields):
    """A Llama, and a student with its weights and fresh maps."""
    torch.manual_seed(0)
    sizes = {**SIZES, **GROUPED, "num_hidden_layers": 3}
    teacher = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    types = fields.pop("layer_types", [LINEAR] * 3)
    config = LinAttnConfig.from_preset("seed", **{**sizes, "feature_map": feature_map, "layer_types": types, **fields})
    student = LinAttnForCausalLM(config).eval()
    lacking, unexpected = student.load_state_dict(teacher.state_dict(), strict=False)
    assert set(lacking) == set(new_parameters(student))
    assert not unexpected
    return student, teacher


def test_the_layers_are_given_what_the_teacher_is_given():
    student, teacher = make_pair()
    ids = random_ids(2, 9)
    seen = teacher.model(ids, output_hidden_states=True, use_cache=False)
    transfer = AttentionTransfer(student, teacher)
    losses = transfer(ids, ids)
    for index, layer in enumerate(student.model.layers):
        hidden = layer.input_layernorm(seen.hidden_states[index])
        positions = student.model.rotary_emb(hidden, torch.arange(9).unsqueeze(0))
        q, k = layer.self_attn.queries_and_keys(hidden, positions)
        softmax = (q.transpose(1, 2) @ k.repeat_interleave(2, 2).permute(0, 2, 3, 1)) / q.shape[-1] ** 0.5
        later = torch.ones(9, 9, dtype=torch.bool).triu(1)
        a = softmax.masked_fill(later, -torch.inf).softmax(-1)
        b = attention_weights(q, k, feature_map=layer.self_attn.feature_map)
        kl = torch.where(later, 0.0, a * (a.log() - b.log())).nan_to_num().sum(-1).mean(1).sum()
        torch.testing.assert_close(losses[index], kl, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["attention", "output", "hidden"])
def test_training_lowers_the_loss_and_touches_only_the_maps(loss):
    student, teacher = make_pair(layer_types=[LINEAR, "full_attention", LINEAR])
    before = {name: p.clone() for name, p in student.named_parameters()}
    transfer = AttentionTransfer(student, teacher, loss)
    assert transfer.layers == [0, 2]
    optimizer = torch.optim.Adam(transfer.parameters(), lr=2e-2)
    ids, losses = random_ids(4, 16), []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(transfer(ids, ids))
        losses[-1].sum().backward()
        optimizer.step()
    assert (losses[-1] < 0.8 * losses[0]).all()
    moved = {name for name, p in student.named_parameters() if not p.equal(before[name])}
    assert moved == set(new_parameters(student)) == {n for n in before if "feature_map" in n}


def test_packed_documents_do_not_see_each_other():
    student, teacher = make_pair()
    transfer = AttentionTransfer(student, teacher)
    ids = random_ids(1, 12)
    packed = transfer(ids, ids, torch.tensor([[*range(5), *range(7)]]))
    alone = sum(transfer(part, part) for part in (ids[:, :5], ids[:, 5:]))
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_what_is_not_predicted_does_not_count():
    student, teacher = make_pair()
    transfer = AttentionTransfer(student, teacher)
    ids = random_ids(1, 8)
    labels = ids.clone()
    labels[:, 5:] = -100
    torch.testing.assert_close(transfer(ids, labels), transfer(ids[:, :5], ids[:, :5]), rtol=1e-4, atol=1e-5)


def test_errors():
    student, teacher = make_pair()
    with pytest.raises(ValueError, match="loss='mse' is unknown; choose one of"):
        AttentionTransfer(student, teacher, "mse")
    with pytest.raises(ValueError, match="vocab_size is 29 in the student and 31 in the teacher"):
        AttentionTransfer(student, LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 31, "num_hidden_layers": 3})))
    with pytest.raises(ValueError, match="no linear layer"):
        AttentionTransfer(*make_pair(layer_types=["full_attention"] * 3))
    with pytest.raises(ValueError, match="feature_map='elu1' has nothing to learn"):
        AttentionTransfer(*make_pair("elu1"))
    with pytest.raises(ValueError, match="feature_map='identity' may be negative"):
        AttentionTransfer(*make_pair("identity", normalizer="rmsnorm"))
