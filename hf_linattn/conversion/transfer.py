"""Attention transfer: feature maps learn the softmax attention that they replace, layer by layer.

The teacher reads a batch once, without gradients. Each of its attentions shows what it was given and what came out;
the student's attention of the same layer is given the same, so that the layers learn side by side and none waits for
another. Only what conversion added learns: feature maps, and how much a window counts.

    "attention"  KL(a_i || b_i) for every query i, with a = softmax(q k^T / sqrt(D)) of the teacher and
                 b_ij = phi(q_i) phi(k_j)^T / sum_j' phi(q_i) phi(k_j')^T, over all visible keys: a window is off
    "output"     |y' - y|^2 / |y|^2 of the attentions' outputs y, windows and all
    "hidden"     the same of the decoder layers' outputs

Source: Hedgehog, arXiv:2402.04347, section 4.2 (cross-entropy on weights, which differs from KL by a constant);
LoLCATs, arXiv:2410.10254, section 3.2 (outputs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..layers import LinearAttention, Packing
from ..models.linattn.masks import find_packing
from .loading import new_parameters

LOSSES = ("attention", "output", "hidden")
TINY = 1e-12  # a weight below this counts as this, and gets no gradient
ROWS = 128  # queries at a time: no more of the T x T weights exists at once


class AttentionKL(torch.autograd.Function):
    """sum over the counted queries of the mean over heads of KL(softmax weights || linear weights).

    Weights and their gradients are made for `ROWS` queries at a time; what is kept is the gradient of the features.
    """

    @staticmethod
    def forward(ctx, q, k, phi_q, phi_k, documents, counted):
        heads = k.shape[2]
        queries, phi_queries = (x.float().unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4) for x in (q, phi_q))
        keys, phi_keys = (x.float().permute(0, 2, 1, 3) for x in (k, phi_k))  # [B, Hk, T, ...]
        grad_q, grad_k = torch.zeros_like(phi_queries), torch.zeros_like(phi_keys)
        weight = counted.float()[:, None, None, :, None] / q.shape[2]  # [B, 1, 1, T, 1]
        total = q.new_zeros((), dtype=torch.float32)
        for start in range(0, q.shape[1], ROWS):
            rows, seen = slice(start, start + ROWS), slice(0, start + ROWS)
            visible = _visible(documents, rows, seen)[:, None, None]  # [B, 1, 1, rows, seen]
            scores = torch.einsum("bhgtd,bhsd->bhgts", queries[..., rows, :], keys[..., seen, :])
            scores = (scores * q.shape[-1] ** -0.5).masked_fill(~visible, torch.finfo(torch.float32).min)
            log_a = scores.log_softmax(-1)
            a = log_a.exp().masked_fill(~visible, 0)
            s = torch.einsum("bhgtf,bhsf->bhgts", phi_queries[..., rows, :], phi_keys[..., seen, :])
            s = s.masked_fill(~visible, 0)
            denominator = s.sum(-1, keepdim=True).clamp_min(TINY)
            large = s.clamp_min(TINY)
            kl = a * (log_a - large.log() + denominator.log())
            total += (kl.sum(-1, keepdim=True) * weight[..., rows, :]).sum()
            if not any(ctx.needs_input_grad):  # an evaluation
                continue
            grad = (1 / denominator - a / large).masked_fill(~visible | (s < TINY), 0) * weight[..., rows, :]
            grad_q[..., rows, :] = torch.einsum("bhgts,bhsf->bhgtf", grad, phi_keys[..., seen, :])
            grad_k[..., seen, :] += torch.einsum("bhgts,bhgtf->bhsf", grad, phi_queries[..., rows, :])
        ctx.save_for_backward(
            grad_q.permute(0, 3, 1, 2, 4).flatten(2, 3).to(phi_q.dtype), grad_k.permute(0, 2, 1, 3).to(phi_k.dtype)
        )
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grad_q, grad_k = ctx.saved_tensors
        return None, None, grad_q * grad, grad_k * grad, None, None


def attention_kl(
    q: Tensor, k: Tensor, phi_q: Tensor, phi_k: Tensor, documents: Tensor, counted: Tensor | None = None
) -> Tensor:
    """How far linear attention is from softmax attention, summed over queries, in nats.

        sum_i mean_h sum_j a_ij log(a_ij / b_ij)

    Args:
        q, k: queries [B, T, Hq, D] and keys [B, T, Hk, D] of softmax attention, rotated; no gradient reaches them.
        phi_q, phi_k: their features, [B, T, Hq, F] and [B, T, Hk, F], not negative.
        documents: [B, T], the number of each token's document, -1 for padding; a token sees its own document.
        counted: [B, T], the queries that count; by default all but padding.

    Returns:
        A float32 scalar; float32 sums whatever the dtype. Memory is O(T (D + F) + T * 128).
    """
    counted = documents >= 0 if counted is None else counted & (documents >= 0)
    return AttentionKL.apply(q, k, phi_q, phi_k, documents, counted)


def _visible(documents: Tensor, rows: slice, seen: slice) -> Tensor:
    """[B, rows, seen]: the key stands in the query's document, and not after it."""
    of_rows, of_seen = documents[:, rows, None], documents[:, None, seen]
    places = torch.arange(documents.shape[1], device=documents.device)
    return (of_rows == of_seen) & (of_seen >= 0) & (places[rows, None] >= places[seen])


def linear_layers_of(student: PreTrainedModel) -> list[int]:
    """The numbers of the layers whose attention is linear."""
    return [i for i, layer in enumerate(student.model.layers) if isinstance(layer.self_attn, LinearAttention)]


def check_pair(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """A student can learn from this teacher.

    Raises:
        ValueError: their vocabularies, layers or hidden sizes differ.
    """
    for field in ("vocab_size", "num_hidden_layers", "hidden_size"):
        ours, theirs = (getattr(model.config.get_text_config(), field) for model in (student, teacher))
        if ours != theirs:
            raise ValueError(f"{field} is {ours} in the student and {theirs} in the teacher; they must be the same")


class AttentionTransfer(nn.Module):
    """A student and its teacher, and what the student's attentions lack.

    Its parameters are `new_parameters` of the student alone, so that an optimizer and a checkpoint see nothing else.

    Args:
        student: a converted model, on whose linear layers the loss is taken.
        teacher: the model it was converted from, or one with the same layers.
        loss: one of `LOSSES`.

    Raises:
        ValueError: an unknown loss; models of different vocabularies or sizes; no linear layer, or none with anything
            to learn; a loss on weights for a map that may be negative.
    """

    def __init__(self, student: PreTrainedModel, teacher: PreTrainedModel, loss: str = "attention"):
        super().__init__()
        if loss not in LOSSES:
            raise ValueError(f"loss={loss!r} is unknown; choose one of {list(LOSSES)}")
        check_pair(student, teacher)
        self.layers = linear_layers_of(student)
        if not self.layers:
            raise ValueError("the student has no linear layer: nothing is to be transferred")
        first = student.model.layers[self.layers[0]].self_attn
        if loss == "attention" and not first.feature_map.is_nonnegative:
            raise ValueError(
                f"loss='attention' compares weights, and feature_map={student.config.feature_map!r} may be negative; "
                "choose loss='output' or 'hidden'"
            )
        self.loss = loss
        self.models = (student, teacher)  # a tuple: not modules of this one
        new = set(new_parameters(student))
        learned = {name: parameter for name, parameter in student.named_parameters() if name in new}
        self.learned = nn.ParameterDict({name.replace(".", "/"): parameter for name, parameter in learned.items()})
        if not self.learned:
            raise ValueError(
                f"feature_map={student.config.feature_map!r} has nothing to learn; go on with distillation"
            )
        for model in self.models:
            model.requires_grad_(False)
        for parameter in self.learned.values():
            parameter.requires_grad_()

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """The loss of each linear layer, [layers], summed over the tokens whose label is not negative."""
        student, teacher = self.models
        counted = labels >= 0
        batch, length = input_ids.shape
        packing = find_packing(position_ids, None, None, None, batch, length)
        rows = torch.arange(batch, device=input_ids.device).unsqueeze(1).expand(batch, length)
        documents = rows if packing is None else packing.segments
        losses: dict[int, Tensor] = {}

        def watch(index: int) -> Any:
            watched = teacher.model.layers[index]
            if self.loss == "hidden":
                compare = self._compare_outputs(student.model.layers[index], packing, counted)
                return watched.register_forward_hook(note(losses, index, compare), with_kwargs=True)
            attention = student.model.layers[index].self_attn
            if self.loss == "output":
                compare = self._compare_outputs(attention, packing, counted)
            else:
                compare = self._compare_weights(attention, documents, counted)
            return watched.self_attn.register_forward_hook(note(losses, index, compare), with_kwargs=True)

        hooks = [watch(index) for index in self.layers]
        try:
            with torch.no_grad():
                teacher.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack([losses[index] for index in self.layers])

    def _compare_weights(self, attention: LinearAttention, documents: Tensor, counted: Tensor) -> Callable[..., Tensor]:
        def compare(hidden: Tensor, given: dict[str, Any], out: Tensor) -> Tensor:
            with torch.no_grad():
                q, k = attention.queries_and_keys(hidden, given["position_embeddings"])
            return attention_kl(q, k, attention.feature_map.query(q), attention.feature_map.key(k), documents, counted)

        return compare

    def _compare_outputs(self, module: nn.Module, packing: Packing | None, counted: Tensor) -> Callable[..., Tensor]:
        def compare(hidden: Tensor, given: dict[str, Any], out: Tensor) -> Tensor:
            ours = module(hidden, position_embeddings=given["position_embeddings"], packing=packing)
            ours = ours[0] if isinstance(ours, tuple) else ours
            there = counted.unsqueeze(-1)
            scale = (out.float().square() * there).sum() / there.sum().clamp(min=1)
            return ((ours.float() - out.float()).square() * there).sum() / scale

        return compare


def note(losses: dict[int, Tensor], index: int, compare: Callable[..., Tensor]) -> Callable[..., None]:
    """A forward hook that notes the loss of a layer, with a graph of its own where one is wanted now."""
    is_learning = torch.is_grad_enabled()

    def hook(module, args, kwargs, out) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        with torch.set_grad_enabled(is_learning):
            losses[index] = compare(hidden.detach(), kwargs, out[0] if isinstance(out, tuple) else out)

    return hook
