import ast
import json
from pathlib import Path

import numpy as np
import pytest

import hf_linattn.benchmark.plots as plots

pytest.importorskip("matplotlib")
from PIL import Image  # noqa: E402  comes with matplotlib

FILES = {"compare.png", "memory.png", "ops.png", "training.png"}


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

    def remember(*args):
        made.extend((result := figure(*args))[1])
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


def test_ops_pictures_have_a_panel_for_each_pass(results, tmp_path, panels):
    results["ops"]["rows"][1]["forward+backward"]["native"]["ms"] = 7.0
    plots.plot(results["ops"], tmp_path)
    times, memory = panels[:2], panels[2:]
    assert [list(axes.lines[0].get_ydata()) for axes in times] == [[1.5, 1.5, 1.5], [1.5, 7.0, 1.5]]
    assert [list(axes.lines[1].get_xdata()) for axes in times] == [[128, 4096]] * 2  # it left
    assert [list(axes.lines[0].get_ydata()) for axes in memory] == [[n * 8192 for n in (128, 4096, 16384)]] * 2
    # the crossing is marked where there is one
    assert [len(axes.lines) for axes in times] == [3, 2]
    assert list(times[0].lines[2].get_xdata()) == [1000.4] * 2
    assert "1,000" in times[0].texts[0].get_text()
    for axes in panels:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["linear, C kernels", "softmax (SDPA)"]
        assert len({(line.get_linestyle(), line.get_marker()) for line in axes.lines[:2]}) == 2


def test_training_picture_shows_the_baselines(results, tmp_path, panels):
    plots.plot(results["train"], tmp_path)
    (axes,) = panels
    assert [text.get_text() for text in axes.texts] == ["model 2.06", "gzip 2.50", "6-gram 2.40"]
    assert [line.get_ydata()[0] for line in axes.lines[1:]] == [2.5, 2.4]


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
