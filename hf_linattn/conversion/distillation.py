"""Distillation: the whole student learns what the teacher predicts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

ROWS = 1024  # tokens whose logits exist at once


def distillation_loss(
    student: PreTrainedModel, hidden: Tensor, teacher: PreTrainedModel, teacher_hidden: Tensor, counted: Tensor
) -> Tensor:
    """KL(teacher || student) of the next token, summed over the counted places, in nats.

        sum_i sum_w p_i(w) (log p_i(w) - log q_i(w)),    p, q = softmax of the logits

    Args:
        hidden, teacher_hidden: last hidden states [B, T, hidden_size] of both.
        counted: [B, T], the places whose prediction counts.

    Returns:
        A float32 scalar. Logits exist for 1,024 tokens at a time, and are computed again in the backward.
    """
    ours, theirs = hidden[counted], teacher_hidden[counted]
    heads = student.get_output_embeddings(), teacher.get_output_embeddings()
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, len(ours), ROWS):
        rows = slice(start, start + ROWS)
        total = total + checkpoint(_kl, ours[rows], theirs[rows], *heads, use_reentrant=False)
    return total


def _kl(ours: Tensor, theirs: Tensor, student_head, teacher_head) -> Tensor:
    log_q = student_head(ours).float().log_softmax(-1)
    with torch.no_grad():
        log_p = teacher_head(theirs).float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()
