import json

import pytest

from hf_linattn.benchmark.tables import main, render
from hf_linattn.benchmark.text import bytes_text, ratio_text


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
    expected = "\n".join(render(results[name]) for name in ("train", "compare"))
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


def test_level_table_leaves_blank_what_was_not_measured(level):
    lines = render(level).splitlines()
    assert lines[2:4] == [
        "| linear, C kernels | 1.2e-07 | 2.0e-07 | 3.0e-07 | 4.0e-07 |",
        "| softmax (SDPA) |  |  |  |  |",
    ]
    assert lines[5] == "Attention function, forward (cpu, float32, batch 1, 8 heads of 64):"
    assert lines[7] == (
        "| length | linear, C kernels, ms | softmax (SDPA), times longer | of the product rate | of the copy bandwidth "
        "| linear, C kernels, peak memory | softmax (SDPA), peak memory |"
    )
    assert lines[9:12] == [
        "| 128 | 2.00 | 0.50x | 25% | 6.2% | 2 KiB | 1 KiB |",
        "| 256 | 4.00 | 4.00x | 25% | 6.2% | 4 KiB | 4 KiB |",
        "| 512 | 8.00 |  | 25% | 6.2% | 8 KiB |  |",
    ]
    assert lines[13:] == [
        "- forward: softmax (SDPA) is slower from 161 to 256 tokens, the longest of both.",
        "- forward: peak memory of linear, C kernels: 8 KiB a token, 4.0 times that of q (R^2 = 0.9999900).",
        "- forward: softmax (SDPA) was not measured from 512 tokens on: slow.",
        "- flash-linear-attention was not measured: needs a GPU.",
    ]


def test_a_level_that_is_never_faster_says_so(level):
    level["passes"]["forward"]["crossover"] = {"softmax": None}
    assert "- forward: softmax (SDPA) is faster at 256 tokens, the longest of both." in render(level)


def test_a_level_of_models_gives_tokens_a_second(level):
    rows = [{"length": 1000, "sides": {"model": {"ms": 4.0, "peak_bytes": 1024, "held_bytes": 2048}}}]
    level |= {"kind": "benchmark model", "sizes": {"batch": 2, "hidden_size": 64, "num_hidden_layers": 3}, "errors": {}}
    level |= {"sides": {"model": {"label": "linattn"}, "llama": {"label": "Llama"}}, "absent": {}}
    empty = {"dropped": {}, "crossover": {}, "memory_fit": {}}
    level["passes"] = {name: {"rows": rows, **empty} for name in ("prefill", "decode")}
    lines = render(level).splitlines()
    assert lines[0] == "Model, prefill (cpu, float32, batch 2, 3 layers of 64):"
    assert [line for line in lines if line.startswith("| 1,000")] == [
        "| 1,000 | 500,000 |  |  | 1 KiB |  |",
        "| 1,000 | 500 |  |  | 2 KiB |  |",  # a token a row
    ]


def test_an_interrupted_level_has_a_table_of_what_there_is(level):
    del level["passes"], level["errors"]
    assert render(level) == "- flash-linear-attention was not measured: needs a GPU.\n"


def test_shapes_table_gives_ratios_to_both_rivals():
    sides = {
        "triton": {"ms": 0.0123, "peak_bytes": 1024, "of_matmul": 0.5, "of_copy": 0.25},
        "softmax": {"ms": 1.5},
        "fla": {"ms": 0.5},
    }
    row = {"length": 8, "sides": sides, "over_first": {"softmax": 12.0, "fla": 4.0}}
    shape = {"sizes": {"batch": 1, "length": 8, "heads": 2, "head_dim": 4}, "passes": {"forward": {"rows": [row]}}}
    labels = {name: {"label": name} for name in (*sides, "torch")}
    assert render({"kind": "benchmark shapes", "sides": labels, "shapes": [shape]}).splitlines()[2:] == [
        "| B1 T8 H2 D4, forward | 0.0123 | 1.5 | 0.5 |  | 12x | 4.00x | 1 KiB | 50% | 25% |"
    ]


def test_throughput_table():
    speeds = {"pretrain": 6912.4, "bare": 7332.0}
    result = {"device": "cpu", "tokens_per_step": 256, "tokens_per_second": speeds, "pretrain_over_bare": 0.93}
    assert render({"kind": "throughput"} | result).splitlines() == [
        "| steps of 256 tokens (cpu) | tokens/s |",
        "| --- | ---: |",
        "| pretrain.py | 6,912 |",
        "| forward, backward and AdamW alone | 7,332 |",
        "| pretrain.py, part of the bare speed | 93% |",
    ]


def test_unknown_kinds_are_named():
    with pytest.raises(
        ValueError,
        match="no table for kind 'novel'; known: batching, benchmark decode, .* plan, recall study, throughput, train",
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
