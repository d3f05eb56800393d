import pytest


@pytest.fixture
def results() -> dict:
    """A result file of several results, with numbers that are easy to recognise."""
    side = {"samples_ms": [[1.0]]}
    compare = {
        "kind": "compare",
        "device": "cpu",
        "dtype": "float32",
        "rows": [
            {
                "context": context,
                "model": {"cache_bytes": 532_480, "ms_per_token": 2.125, **side},
                "llama": {"cache_bytes": context * 4096, "ms_per_token": context / 100, **side},
                "llama_over_model": {"cache_bytes": context * 4096 / 532_480, "ms_per_token": context / 212.5},
            }
            for context in (256, 4096, 16384)
        ],
    }
    train = {
        "kind": "train",
        "tokens_seen": 1_234_567,
        "bits_per_byte": {"before": 8.25, "after": 2.0625},
        "baselines": {
            "gzip": {"bits_per_byte": 2.5, "what": "gzip -9"},
            "6-gram": {"bits_per_byte": 2.4, "what": "a 6-gram"},
        },
        "evaluations": [[0, 8.25], [100, 2.0625]],
    }
    return {"kind": "demo", "train": train, "compare": compare}


def measured(rows: list[dict], **changes) -> dict:
    return {"rows": rows, "dropped": {}, "crossover": {}, "memory_fit": {}} | changes


def level_row(length: int, over: float, **sides: tuple[float, float]) -> dict:
    """A row of a level: {side: (milliseconds, bytes)}, and the ratio of the last side to the first."""
    filled = {
        name: {"ms": ms, "peak_bytes": size, "held_bytes": size, "of_matmul": 0.25, "of_copy": 0.0625}
        for name, (ms, size) in sides.items()
    }
    return {"length": length, "sides": filled, "over_first": {list(sides)[-1]: over}}


@pytest.fixture
def level() -> dict:
    """A function level without a GPU, whose softmax side stops."""
    rows = [
        level_row(128, 0.5, native=(2.0, 2048), softmax=(1.0, 1024)),
        level_row(256, 4.0, native=(4.0, 4096), softmax=(16.0, 4096)),
        {"length": 512, "sides": level_row(512, 0, native=(8.0, 8192))["sides"]},
    ]
    changes = {
        "crossover": {"softmax": {"measured": 256, "interpolated": 161.27}},
        "dropped": {"softmax": {"length": 512, "reason": "slow"}},
        "memory_fit": {"native": {"slope": 8192.0, "start": 0.0, "r_squared": 0.99999}, "softmax": None},
    }
    return {
        "kind": "benchmark op",
        "device": "cpu",
        "dtype": "float32",
        "sizes": {"batch": 1, "heads": 8, "head_dim": 64},
        "sides": {"native": {"label": "linear, C kernels"}, "softmax": {"label": "softmax (SDPA)"}},
        "absent": {"flash-linear-attention": "needs a GPU"},
        "errors": {"native": {"out": 1.25e-7, "dq": 2e-7, "dk": 3e-7, "dv": 4e-7}, "softmax": {"failed": "why"}},
        "passes": {"forward": measured(rows, **changes), "forward+backward": measured([])},
    }
