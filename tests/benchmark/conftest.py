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

    def timing(length):
        linear = {"ms": 1.5, "over_main": 1.0, "of_product_rate": 0.75, "peak_bytes": length * 2048 * 4}
        softmax = {"ms": 123.4, "over_main": length / 1000, "peak_bytes": length * 2048 * 6}
        return {"native": linear, "softmax": softmax} if length < 10_000 else {"native": linear}

    ops = {
        "kind": "ops",
        "device": "cpu",
        "dtype": "float32",
        "sizes": {"batch": 1, "heads": 8, "head_dim": 64},
        "main": "native",
        "sides": {"native": "linear, C kernels", "softmax": "softmax (SDPA)"},
        "crossover": {"forward": {"softmax": 1000.4}, "forward+backward": {"softmax": None}},
        "rows": [{"length": n, "forward": timing(n), "forward+backward": timing(n)} for n in (128, 4096, 16384)],
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
    return {"kind": "demo", "train": train, "compare": compare, "ops": ops}
