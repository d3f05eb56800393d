"""The kernels against the definition in float64, forward, backward and decoding, under a handful of options.

The tests say more; this says it on the machine that the times beside it come from.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import LinearAttentionState, make_feature_map, parallel_linear_attention, recurrent_linear_attention
from .climb import Settings, one_line
from .sides import bucketed

LENGTH = 300
TOLERANCE = 1e-5  # float32, of out and the state; twice that of gradients, which are differences
TWICE = 2.0  # half precision: times the error of plain PyTorch in that dtype

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16, D = 128": {"dtype": torch.bfloat16, "D": 128},
    "softmax map": {"feature_map": "softmax"},
    "grouped heads": {"Hq": 4},
    "padding": {"padding": True},
    "resumed": {"resumed": True},
    "packed documents": {"packed": True},
    "no denominator": {"feature_map": "identity", "normalize": False},
}


def kernels_level(
    level: dict[str, Any], settings: Settings, form: Callable | None = None, step: Callable | None = None
) -> None:
    """Fill `level` with the errors of every case and what they may be.

    `form` and `step` stand in for `triton_linear_attention` and `decode_step`, whose signatures they have.
    """
    if form is None or step is None:
        from ..ops.triton import decode_step, triton_linear_attention

        form, step = form or triton_linear_attention, step or decode_step
    level |= {"kind": "benchmark kernels", "device": str(settings.device), "rows": []}
    for name, options in CASES.items():
        settings.say(f"kernels, {name}")
        try:
            row = check(form, step, settings.device, settings.seed, **options)
        except Exception as error:  # a kernel that does not compile is a result
            row = {"failed": one_line(error), "within": False}
        level["rows"].append({"case": name, **row})
        settings.save()


def check(
    form: Callable,
    step: Callable,
    device: torch.device,
    seed: int,
    dtype: torch.dtype = torch.float32,
    D: int = 64,
    Hq: int = 2,
    feature_map: str = "elu1",
    padding: bool = False,
    resumed: bool = False,
    packed: bool = False,
    normalize: bool = True,
) -> dict[str, Any]:
    """Errors of out, mu, nu, the gradients of q, k, v, and of four decoding steps; their bounds; whether all hold."""
    g = torch.Generator().manual_seed(seed)
    B, Hk = (1, 2) if packed else (2, 2)
    made = [torch.randn(B, LENGTH, heads, D, generator=g).to(device, dtype) for heads in (Hq, Hk, Hk, Hq)]
    options: dict[str, Any] = {"feature_map": make_feature_map(feature_map, D, Hq, Hk), "normalize": normalize}
    if padding:
        options["key_mask"] = torch.arange(LENGTH, device=device) >= torch.tensor([[0], [70]], device=device)
    if packed:
        options["cu_seqlens"] = torch.tensor([0, LENGTH // 3, LENGTH // 3 + 1, LENGTH], device=device)
    if resumed:
        nu = torch.rand(B, Hk, D, generator=g) + 1
        mu = torch.randn(B, Hk, D, D, generator=g)
        options["initial_state"] = LinearAttentionState(mu.to(device), nu.to(device))

    actual, expected = (results(f, made, to, options) for f, to in ((form, dtype), (parallel_linear_attention, None)))
    found = {name: distance(a, b) for name, a, b in zip(("out", "mu", "nu", "dq", "dk", "dv"), actual, expected)}
    bounds = {name: TOLERANCE * (1 + name.startswith("d")) for name in found}
    decode = {key: value for key, value in options.items() if key in ("feature_map", "normalize")}
    found["decode"], bounds["decode"] = decoding_error(step, made, dtype, decode), TOLERANCE
    if dtype != torch.float32:
        plain = results(by_heads(bucketed), made, dtype, {})
        bounds = {name: TWICE * distance(a, b) for name, a, b in zip(found, plain, expected) if a is not None}
        bounds |= dict.fromkeys(("mu", "nu", "decode"), torch.finfo(dtype).eps)
    within = all(found[name] <= bound for name, bound in bounds.items())
    return {"errors": found, "bounds": bounds, "within": within}


def results(form: Callable, made: list[Tensor], dtype: torch.dtype | None, options: dict[str, Any]) -> list:
    """[out, mu, nu, dq, dk, dv] of a form; in float64 without a dtype."""
    to = dtype or torch.float64
    *leaves, grad = (x.detach().to(to) for x in made)
    leaves = [x.requires_grad_() for x in leaves]
    out, state = form(*leaves, **options, **({"output_final_state": True} if options else {}))
    return [out, *(state or (None, None)), *torch.autograd.grad(out, leaves, grad)]


def by_heads(run: Callable) -> Callable:
    return lambda q, k, v: (run(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), None)


def decoding_error(step: Callable, made: list[Tensor], dtype: torch.dtype, options: dict[str, Any]) -> float:
    """Largest error of four steps from an empty state, against the recurrence in float64."""
    q, k, v = (x[:, :4] for x in made[:3])
    expected, _ = recurrent_linear_attention(*(x.double() for x in (q, k, v)), **options)
    mu, nu = LinearAttentionState.zeros(q.shape[0], k.shape[2], k.shape[3], v.shape[3], device=q.device)
    with torch.no_grad():
        outs = [step(*(x[:, i : i + 1] for x in (q, k, v)), mu, nu, **options) for i in range(4)]
    return distance(torch.cat(outs, 1), expected)


def distance(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, over the largest entry expected or 1."""
    expected = expected.detach().double()
    return ((actual.detach().double() - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
