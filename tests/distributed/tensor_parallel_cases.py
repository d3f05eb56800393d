"""What is compared between one process and tensor parallel ranks, computed alike by both."""

import torch
from helpers import CONFIGS, GROUPED, HYBRID, make_model, random_ids

from .ranks import whole

CASES = {
    "linear": {"tie_word_embeddings": True},
    "conv": {},
    "hybrid": HYBRID,
    "gqa": {},
    "hedgehog_key": {},
    "hedgehog_query": {},
    "hedgehog_tied": {},
    "favor": {},
    "cosformer": {},
    "sliding_hybrid": GROUPED,
    # everything at once
    "all": {
        **HYBRID,
        **GROUPED,
        "conv_kernel_size": 4,
        "qk_norm": True,
        "normalizer": "rmsnorm",
        "feature_map": "t2r",
        "attention_bias": True,
        "attention_out_bias": True,
    },
}
IDS, MASK = random_ids(2, 70), random_ids(2, 70).ge(0).long()
MASK[0, :5] = 0  # padding on the left of one row


def model_of(case: str):
    torch.manual_seed(0)  # t2r starts at random
    model = make_model(case if case in CONFIGS else "linear", **CASES[case])
    # whose norms and denominators (relu's, of few features) amplify the rounding of float32 beyond its bound
    return model.double() if case in ("all", "cosformer") else model


def _counts(cache) -> int:
    """Bytes that say how full windows are, which every rank keeps."""
    states = [layer.state for layer in cache.layers if hasattr(layer, "mu")]
    return sum(part.nbytes for state in states for part in state[4:])


def measure(model) -> dict:
    """Logits, gradients of two micro-batches, greedy tokens, bytes of the state."""
    labels = IDS.masked_fill(MASK == 0, -100)
    out = model(IDS, attention_mask=MASK, labels=labels, use_cache=False)
    out.loss.backward()
    model(IDS.flip(0), labels=IDS.flip(0), use_cache=False).loss.backward()
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    model.zero_grad()
    generated = model.generate(
        IDS[:, :20],
        attention_mask=MASK[:, :20],
        max_new_tokens=8,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    return {
        "logits": out.logits.detach(),
        "gradients": gradients,
        "tokens": generated.sequences,
        "scores": list(generated.scores),
        "nbytes": generated.cache.nbytes - _counts(generated.cache),
    }
