import ast
import json
from pathlib import Path

import numpy as np
import pytest

import hf_linattn.benchmark.plots as plots

pytest.importorskip("matplotlib")
from PIL import Image  # noqa: E402  comes with matplotlib

FILES = {"cache.png", "ms_per_token.png", "ops_forward.png", "ops_forward_backward.png", "training.png"}


def test_every_result_in_a_file_is_drawn(results, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(results))
    plots.main([str(tmp_path / "results.json"), "--out", str(tmp_path / "figures")])
    assert {path.name for path in (tmp_path / "figures").iterdir()} == FILES
    for name in FILES:
        image = Image.open(tmp_path / "figures" / name)
        assert image.format == "PNG"
        grey = np.asarray(image.convert("L"))
        assert (grey < 140).mean() > 0.002  # lines and text are dark enough without colour


def drawn(results: dict, name: str, monkeypatch) -> list:
    """The axes that plotting `results[name]` makes."""
    made = []
    figure = plots.figure
    monkeypatch.setattr(plots, "figure", lambda *args: made.append(figure(*args)) or made[-1])
    return made


def test_axes_are_logarithmic_and_lines_carry_names(results, tmp_path, monkeypatch):
    made = drawn(results, "compare", monkeypatch)
    plots.plot(results["compare"], tmp_path)
    assert len(made) == 2
    for (_, axes), measure in zip(made, ("cache_bytes", "ms_per_token"), strict=True):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert [text.get_text() for text in axes.texts] == ["linear attention", "Llama"]
        for line, side in zip(axes.lines, ("model", "llama"), strict=True):
            rows = results["compare"]["rows"]
            assert list(line.get_xdata()) == [row["context"] for row in rows]
            assert list(line.get_ydata()) == [row[side][measure] for row in rows]
        assert len({(line.get_linestyle(), line.get_marker()) for line in axes.lines}) == 2


def test_training_picture_shows_the_baselines(results, tmp_path, monkeypatch):
    made = drawn(results, "train", monkeypatch)
    plots.plot(results["train"], tmp_path)
    ((_, axes),) = made
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
