import ast
import json
from pathlib import Path

import numpy as np
import pytest

import hf_linattn.benchmark.plots as plots

pytest.importorskip("matplotlib")
from PIL import Image  # noqa: E402  comes with matplotlib

FILES = {"compare.png", "training.png"}


def test_every_result_in_a_file_is_drawn(results, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(results))
    plots.main([str(tmp_path / "results.json"), "--out", str(tmp_path / "figures")])
    assert {path.name for path in (tmp_path / "figures").iterdir()} == FILES
    for name in FILES:
        image = Image.open(tmp_path / "figures" / name)
        assert image.format == "PNG"
        grey = np.asarray(image.convert("L"))
        assert (grey < 140).mean() > 0.002  # lines and text are dark enough without colour


@pytest.fixture
def panels(monkeypatch) -> list:
    """All panels that are drawn on."""
    made = []
    figure = plots.figure

    def remember(*args, **options):
        made.extend((result := figure(*args, **options))[1])
        return result

    monkeypatch.setattr(plots, "figure", remember)
    return made


def test_axes_are_logarithmic_and_lines_carry_names(results, tmp_path, panels):
    plots.plot(results["compare"], tmp_path)
    assert len(panels) == 2
    for axes, measure in zip(panels, ("cache_bytes", "ms_per_token"), strict=True):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert [text.get_text() for text in axes.texts] == ["linear attention", "Llama"]
        for line, side in zip(axes.lines, ("model", "llama"), strict=True):
            rows = results["compare"]["rows"]
            assert list(line.get_xdata()) == [row["context"] for row in rows]
            assert list(line.get_ydata()) == [row[side][measure] for row in rows]
        assert len({(line.get_linestyle(), line.get_marker()) for line in axes.lines}) == 2
    assert [tick.get_text() for tick in panels[0].get_yticklabels()] == [
        "256 KiB",
        "1 MiB",
        "4 MiB",
        "16 MiB",
        "64 MiB",
    ]


def test_training_picture_shows_the_baselines(results, tmp_path, panels):
    plots.plot(results["train"], tmp_path)
    (axes,) = panels
    assert [text.get_text() for text in axes.texts] == ["model 2.06", "gzip 2.50", "6-gram 2.40"]
    assert [line.get_ydata()[0] for line in axes.lines[1:]] == [2.5, 2.4]


def test_a_level_has_speed_and_memory_of_every_measured_pass(level, tmp_path, panels):
    (path,) = plots.plot(level, tmp_path)
    assert path.name == "benchmark_op.png"
    assert len(panels) == 2  # the pass without rows is not drawn
    for axes, values in zip(panels, ([64_000, 64_000, 64_000], [2048, 4096, 8192]), strict=True):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        first, second = axes.lines[:2]
        assert list(first.get_xdata()) == [128, 256, 512]
        assert list(first.get_ydata()) == values
        assert list(second.get_xdata()) == [128, 256]  # it was dropped
        assert (first.get_linestyle(), first.get_marker()) != (second.get_linestyle(), second.get_marker())
    speed, memory = panels
    assert [text.get_text() for text in speed.texts] == ["faster from 161 tokens"]
    assert speed.lines[2].get_xdata() == [161.27, 161.27]
    assert len(memory.lines) == 2
    assert [text.get_text() for text in speed.figure.legends[0].get_texts()] == ["linear, C kernels", "softmax (SDPA)"]
    assert "8 heads of 64" in speed.figure.get_suptitle()


def test_a_level_whose_device_does_not_tell_its_memory(level, tmp_path, panels):
    for row in level["passes"]["forward"]["rows"]:
        for side in row["sides"].values():
            side["peak_bytes"] = None
    assert plots.plot(level, tmp_path)
    assert not panels[1].lines


def test_a_level_without_rows_is_not_drawn(level, tmp_path):
    level["passes"] = {}
    assert plots.plot(level, tmp_path) == []


@pytest.mark.parametrize(
    "length, text", [(128, "128"), (1024, "1k"), (1000, "1,000"), (524288, "512k"), (2**20, "1M"), (1536, "1,536")]
)
def test_lengths_are_written_in_binary_thousands(length, text):
    assert plots.length_text(length) == text


def test_a_narrow_range_has_ticks(tmp_path):
    _, (axes,) = plots.figure()
    axes.set_yscale("log")
    plots.round_ticks(axes, [900, 1400])
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["700", "1,000", "1,500", "2,000"]
    plots.round_ticks(axes, [1e5, 1e8])
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["100,000", "1 million", "10 million", "100 million"]
    plots.byte_ticks(axes, [65 * 2**20, 130 * 2**20])
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["64 MiB", "128 MiB", "256 MiB"]


def test_unknown_kinds_are_named(tmp_path):
    with pytest.raises(ValueError, match="no picture for kind 'novel'"):
        plots.plot({"kind": "novel"}, tmp_path)


def test_matplotlib_is_imported_on_first_use_only():
    tree = ast.parse(Path(plots.__file__).read_text())
    imported = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imported for alias in node.names} | {
        getattr(node, "module", "") for node in imported
    }
    assert not [name for name in names if name and name.startswith("matplotlib")]
