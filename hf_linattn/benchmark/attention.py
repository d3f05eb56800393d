"""The attention function alone: time, peak memory, error, and how much of the machine it uses.

`attention_level` climbs the lengths; `shapes_level` measures a few fixed shapes that other work has published.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import elu

from .ceilings import Ceiling, ceilings, operations, traffic
from .climb import Call, Settings, climb, new_pass, one_line
from .decoding import decode_pass
from .sides import Side, attention_call, sides_here

PASSES = ("forward", "forward+backward")
SIZES = {"batch": 1, "heads": 8, "head_dim": 64}
WITH_CEILINGS = 1024  # tokens; a round of shorter calls would be all ceilings
SHAPES = (
    {"batch": 1, "length": 8192, "heads": 96, "head_dim": 128},
    {"batch": 2, "length": 16384, "heads": 16, "head_dim": 128},
    {"batch": 4, "length": 2048, "heads": 16, "head_dim": 128},
    {"batch": 8, "length": 1024, "heads": 8, "head_dim": 64},
)
SMALL_SHAPES = ({"batch": 2, "length": 160, "heads": 2, "head_dim": 16},)


def attention_level(level: dict[str, Any], settings: Settings) -> None:
    """Fill `level` with forward and forward with backward over the lengths."""
    sizes = SIZES | ({"heads": 2, "head_dim": 16} if settings.small else {})
    sides, absent = sides_here(settings.device, settings.dtype, sizes["head_dim"], settings.sides)
    level |= describe(settings, sides, absent) | {"kind": "benchmark op", "sizes": sizes}
    level["errors"] = errors(sides, settings, **sizes)
    settings.save()
    beside = ceilings(settings.device, settings.dtype, settings.small)
    level["passes"] = {}
    for name in PASSES:
        measured = level["passes"][name] = new_pass()
        climb_pass(measured, name, sides, settings, beside, **sizes)


def shapes_level(level: dict[str, Any], settings: Settings) -> None:
    """Fill `level` with forward, backward and a decoding step at the shapes of SHAPES."""
    beside = ceilings(settings.device, settings.dtype, settings.small)
    level |= {"kind": "benchmark shapes", "shapes": []}
    for shape in SMALL_SHAPES if settings.small else SHAPES:
        sizes = {key: value for key, value in shape.items() if key != "length"}
        sides, absent = sides_here(settings.device, settings.dtype, sizes["head_dim"], settings.sides)
        level |= describe(settings, sides, absent)
        passes: dict[str, Any] = {}
        level["shapes"].append({"sizes": shape, "passes": passes})
        for name in ("forward", "backward"):
            measured = passes[name] = new_pass()
            climb_pass(measured, name, sides, settings, beside, lengths=[shape["length"]], **sizes)
        measured = passes["decode"] = new_pass()
        decode_pass(measured, settings, lengths=[shape["length"]], **sizes)


def describe(settings: Settings, sides: dict[str, Side], absent: dict[str, str]) -> dict[str, Any]:
    return {
        "device": str(settings.device),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "sides": {name: {"label": side.label} for name, side in sides.items()},
        "absent": absent,
    }


def inputs(length: int, batch: int, heads: int, head_dim: int, settings: Settings) -> list[Tensor]:
    """q, k, v and the gradient of out, [B, T, H, D], of a seed."""
    g = torch.Generator(settings.device).manual_seed(settings.seed)
    shape = batch, length, heads, head_dim
    return [torch.randn(shape, generator=g, device=settings.device, dtype=settings.dtype) for _ in range(4)]


def climb_pass(
    measured: dict[str, Any],
    name: str,
    sides: dict[str, Side],
    settings: Settings,
    beside: tuple[dict[str, Ceiling], str],
    *,
    batch: int,
    heads: int,
    head_dim: int,
    lengths: list[int] | None = None,
) -> None:
    """One pass ("forward", "backward", "forward+backward") of all sides over the lengths, with the ceilings."""
    limits, product = beside

    def prepare(length: int, names: list[str]) -> dict[str, Callable[[], Call]]:
        by_time = inputs(length, batch, heads, head_dim, settings)
        by_head = by_time
        if any(sides[side].heads_first for side in names):
            by_head = [x.transpose(1, 2).contiguous() for x in by_time]
        tensors = {side: by_head if sides[side].heads_first else by_time for side in names}
        return {side: lambda side=side: attention_call(sides[side].run, tensors[side], name) for side in names}

    def held_bytes(length: int, names: list[str]) -> int:
        layouts = len({sides[side].heads_first for side in names} | {False})
        return 4 * layouts * batch * length * heads * head_dim * settings.dtype.itemsize

    def with_ceilings(length: int) -> dict[str, Call]:
        if length < WITH_CEILINGS and not settings.small:
            return {}
        return {limit: ceiling.run for limit, ceiling in limits.items()}

    def finish(row: dict[str, Any], samples: dict[str, list[float]]) -> None:
        if limits.keys() - samples.keys():
            return
        row["ceilings"] = {
            limit: {
                f"{ceiling.unit}_per_s": ceiling.amount / statistics.median(samples[limit]) * 1e3,
                "samples_ms": samples[limit],
            }
            for limit, ceiling in limits.items()
        }
        work = operations(name, batch * row["length"], heads, head_dim, head_dim)
        moved = traffic(name, batch * row["length"], heads, head_dim, head_dim, settings.dtype.itemsize)
        for side, figures in row["sides"].items():
            if sides[side].is_linear:
                figures["of_matmul"] = fraction(work, samples[side], limits[product], samples[product])
            figures["of_copy"] = fraction(moved, samples[side], limits["copy"], samples["copy"])

    climb(
        measured, list(sides), prepare, settings, title=f"attention, {name}", lengths=lengths, held_bytes=held_bytes,
        beside=with_ceilings, finish=finish,
    )  # fmt: skip


def fraction(amount: int, times: list[float], ceiling: Ceiling, its_times: list[float]) -> float:
    """A rate over a ceiling's rate of the same round; the median of the rounds."""
    return statistics.median(amount / a / (ceiling.amount / b) for a, b in zip(times, its_times, strict=True))


def errors(
    sides: dict[str, Side], settings: Settings, batch: int, heads: int, head_dim: int, length: int = 200
) -> dict[str, dict[str, float]]:
    """Largest error of out, dq, dk, dv of each side against its definition in float64, over the largest entry."""
    by_time = inputs(length, batch, heads, head_dim, settings)
    found = {}
    for name, side in sides.items():
        tensors = [x.transpose(1, 2).contiguous() for x in by_time] if side.heads_first else by_time
        results = []
        for run, dtype in ((side.run, settings.dtype), (definition(side), torch.float64)):
            # not every device has float64
            *leaves, grad = (x.detach().to("cpu" if dtype == torch.float64 else x.device, dtype) for x in tensors)
            leaves = [x.requires_grad_() for x in leaves]
            try:
                out = run(*leaves)
                results.append([out, *torch.autograd.grad(out, leaves, grad)])
            except Exception as error:  # another code may fail here: the level reports it and goes on
                found[name] = {"failed": one_line(error)}
                break
        else:
            gaps = [((a.cpu().double() - b).abs().max() / b.abs().max()).item() for a, b in zip(*results, strict=True)]
            found[name] = dict(zip(("out", "dq", "dk", "dv"), gaps))
    return found


def definition(side: Side) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What a side computes, as the formula has it: [T, T] weights of every head."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not side.heads_first:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if side.is_linear:
            weights = ((elu(q) + 1) @ (elu(k) + 1).mT).tril()
            weights = weights / weights.sum(-1, keepdim=True)
        else:
            later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
            weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf).softmax(-1)
        out = weights @ v
        return out if side.heads_first else out.transpose(1, 2)

    return run
