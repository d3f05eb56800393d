import json

import pytest

from hf_linattn.benchmark.tables import bytes_text, main, ratio_text, render


def test_compare_table(results):
    assert render(results["compare"]) == (
        "| context (tokens) | cache | Llama's cache | ratio | ms/token | Llama's ms/token | ratio |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| 256 | 520 KiB | 1 MiB | 1.97x | 2.12 | 2.56 | 1.20x |\n"
        "| 4,096 | 520 KiB | 16 MiB | 32x | 2.12 | 40.96 | 19x |\n"
        "| 16,384 | 520 KiB | 64 MiB | 126x | 2.12 | 164 | 77x |\n"
    )


def test_train_table_puts_the_baselines_between_before_and_after(results):
    assert render(results["train"]).splitlines()[2:] == [
        "| the model, untrained | 8.250 |",
        "| gzip -9 | 2.500 |",
        "| a 6-gram | 2.400 |",
        "| the model, after 1,234,567 tokens | 2.062 |",
    ]
    results["train"]["baselines"] = None
    assert len(render(results["train"]).splitlines()) == 4


def test_ops_table(results):
    lines = render(results["ops"]).splitlines()
    assert lines[0] == (
        "| forward, length | linear, C kernels, ms | softmax (SDPA) | of the product rate | memory, times q |"
    )
    assert lines[3:5] == ["| 4,096 | 1.50 | 4.10x | 0.75 | 4.0 |", "| 16,384 | 1.50 |  | 0.75 | 4.0 |"]
    assert lines[6] == "Slower than linear, C kernels: softmax (SDPA) from 1,000 tokens."
    assert lines[-1] == "Slower than linear, C kernels: none."


def test_modes_of_the_same_cells_share_a_row():
    same = {"linear": "exact", "linear_padded": "exact", "hybrid": "exact", "hybrid_padded": "exact", "llama": "works"}
    rows = [{"mode": "greedy", **same}, {"mode": "x", **same, "hybrid": "refused: why"}, {"mode": "beams", **same}]
    rows.append({"mode": "y", **same, "hybrid": "refused: why"})
    assert render({"kind": "modes", "rows": rows}).splitlines() == [
        "Exact in all four columns: greedy; beams.",
        "",
        "| mode | linear | linear, padded | hybrid | hybrid, padded |",
        "| --- | --- | --- | --- | --- |",
        "| x; y | exact | exact | refused: why | exact |",
    ]


def test_a_file_of_several_results_gives_all_their_tables(results, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(results))
    main([str(tmp_path / "results.json"), "--out", str(tmp_path / "table.md")])
    expected = "\n".join(render(results[name]) for name in ("train", "compare", "ops"))
    assert (tmp_path / "table.md").read_text() == expected


def test_generation_table_says_what_was_promised():
    result = {
        "kind": "generation",
        "bounds": {"batch 1": 1.15, "prefill": 1.1, "loop": 0.5, "memory": 16 * 2**20, "prompt lookup": 1.5},
        "positions": {
            "near": 1000,
            "far": 1_000_000,
            "cases": {"batch 1": {"ratio": 1.021, "far_us": 1234.0}},
            "prefill": {"length": 1_000_000, "ratio": 0.99},
        },
        "loop": {"ratio": 0.4, "ours_us": 100.4, "stock_us": 251.0},
        "memory": {"near": 1000, "length": 1_000_000, "growth_without_ids_bytes": -2048},
        "prompt lookup": {"ratio": 1.875, "texts": {"a": {"ratio": 1.0}, "b": {"ratio": 2.75}}},
    }
    assert render(result).splitlines()[2:] == [
        "| time of a token after 1,000,000 tokens over one after 1,000, batch 1 | 1.02x (1.23 ms) | at most 1.15x |",
        "| time of reading the last tenth of 1,000,000 tokens over the first | 0.99x | at most 1.10x |",
        "| time of the loop beyond the model, over that of transformers' loop | 0.40x (100 us against 251 us) "
        "| at most 0.50x |",
        "| resident memory from token 1,000 to 1,000,000, ids aside | -2 KiB | at most 16 MiB |",
        "| speed of prompt lookup over greedy search, median of 2 repetitive texts | 1.88x (1.00x, 2.75x) "
        "| at least 1.50x |",
    ]


def test_batching_table():
    result = {
        "kind": "batching",
        "sizes": {"requests": 64, "slots": 16},
        "tokens_per_second": {"one_by_one": 200.4, "static": 900.0, "continuous": 1234.0},
        "continuous_over": {"one_by_one": 6.125, "static": 1.5},
    }
    assert render(result).splitlines() == [
        "| 64 requests | tokens/s | continuous is faster by |",
        "| --- | ---: | ---: |",
        "| one by one | 200 | 6.12x |",
        "| static batches of 16 | 900 | 1.50x |",
        "| continuous batch, 16 rows | 1,234 |  |",
    ]


def test_unknown_kinds_are_named():
    with pytest.raises(
        ValueError, match="no table for kind 'novel'; known: batching, compare, generation, modes, ops, plan, train"
    ):
        render({"kind": "novel"})


@pytest.mark.parametrize(
    "size, text",
    [(0, "0 B"), (900, "900 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**20 - 1, "1024 KiB"),
     (5 * 2**20, "5 MiB"), (3 * 2**30, "3 GiB"), (2500 * 2**30, "2,500 GiB")],
)  # fmt: skip
def test_sizes_are_written_in_binary_units(size, text):
    assert bytes_text(size) == text


def test_ratios():
    assert [ratio_text(x) for x in (0.5, 9.99, 10, 1234.5)] == ["0.50x", "9.99x", "10x", "1,234x"]
