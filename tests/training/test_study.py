"""The studies: their data, their measures, and that a stopped one goes on where it was."""

import json
import math
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

import byte_lm
import recall
import study
from config import ConfigError
from data import IGNORE
from hf_linattn import FEATURE_MAPS
from hf_linattn.benchmark.readme import fill
from hf_linattn.benchmark.studies import spread
from variants import CHANGED, CHANGES, NARROW, Variant, all_variants

QUICK = recall.SCALES["quick"]


def test_recall_sequences():
    scale = recall.SCALES["cpu"]
    pairs = scale.pairs[-1]
    batch = recall.make_batch(scale, pairs, 50, torch.Generator().manual_seed(0))
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
        told = dict(zip(ids[0 : 2 * pairs : 2], ids[1 : 2 * pairs : 2]))
        assert len(told) == len(set(told.values())) == pairs
        assert max(told) < scale.vocab_size // 2 <= min(told.values())
        asked = {ids[i]: label for i, label in enumerate(labels) if label != IGNORE}
        assert asked == told
        assert labels[: 2 * pairs] == [IGNORE] * (2 * pairs)


def test_queries_stand_early_more_often_than_late():
    batch = recall.make_batch(QUICK, 2, 4000, torch.Generator().manual_seed(0))
    counts = (batch["labels"] != IGNORE).sum(0)[4:].double()
    assert counts[0] > 2 * counts[-1]
    assert counts.sum() == 8000


def test_pairs_that_do_not_fit():
    with pytest.raises(ValueError, match="9 pairs fit neither 24 tokens"):
        recall.make_batch(QUICK, 9, 1, torch.Generator())


def test_accuracy_counts_right_answers(monkeypatch):
    model = recall.new_model(QUICK, Variant("elu1"))

    def oracle(model, batch):
        there = batch["labels"] != IGNORE
        values = batch["labels"][there]
        said = torch.where(torch.arange(len(values)) % 4 == 0, 0, values)
        return torch.nn.functional.one_hot(said, QUICK.vocab_size).double(), values

    monkeypatch.setattr(recall, "answers", oracle)
    assert recall.accuracy(model, QUICK, recall.TEST) == {"2": 0.75, "4": 0.75}


def test_repeated_strings():
    n = byte_lm.REPEAT
    text = list(range(n)) + [99] + list(range(n)) + [n - 1]
    ids = torch.tensor(text + text)
    positions = torch.tensor([*range(len(text)), *range(len(text))])  # a second document, which starts anew
    found = byte_lm.repeated({"input_ids": ids, "position_ids": positions}).tolist()
    one = [False] * (2 * n) + [True, False]
    assert found == one + one


def test_variants():
    variants = all_variants(recall.SCALES["cpu"].mixes, narrow=True)
    assert {v.feature_map for v in variants} == {None, *FEATURE_MAPS}
    assert {v.feature_map for v in variants if v.change in CHANGES} == set(CHANGED)
    for change in NARROW:
        assert {v.feature_map for v in variants if v.change == change} == set(FEATURE_MAPS)
    assert all_variants(recall.SCALES["cpu"].mixes, narrow=False) == [v for v in variants if v.change not in NARROW]
    assert len({v.name for v in variants}) == len(set(variants)) == len(variants)


@pytest.mark.parametrize("variant", all_variants(recall.SCALES["cpu"].mixes, narrow=True), ids=lambda v: v.name)
def test_every_variant_is_equally_large(variant):
    scale = recall.SCALES["cpu"]
    with torch.device("meta"):
        reference, size = (recall.new_model(scale, v).num_parameters() for v in (Variant(None), variant))
    one_unit = 3 * scale.layers * scale.hidden_size  # of the MLPs, which make up for what the variant adds
    assert abs(size - reference) <= one_unit / 2


@pytest.fixture
def run_study(tmp_path, corpus_file, monkeypatch):
    """Runs a study in this process, of one map; returns its results, and which jobs were worked on."""
    quick = replace(byte_lm.SCALES["quick"], dataset=str(corpus_file))
    monkeypatch.setitem(byte_lm.SCALES, "quick", quick)

    class InProcess:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def shutdown(self, **_):
            pass

        def submit(self, function, *arguments):
            future = Future()
            future.set_result(function(*arguments))
            return future

    done = []
    real = study.do
    monkeypatch.setattr(study, "ProcessPoolExecutor", InProcess)
    monkeypatch.setattr(study, "do", lambda job, *rest: done.append(job) or real(job, *rest))

    def run(name):
        done.clear()
        arguments = ["--scale", "quick", "--maps", "elu1", "--runs", str(tmp_path / name), "--processes", "64"]
        study.main([name, *arguments, "--out", str(tmp_path / f"{name}-out")])
        return json.loads((tmp_path / f"{name}-out" / "results.json").read_text()), list(done)

    return run


@pytest.mark.parametrize("name", study.STUDIES)
def test_a_study_from_the_command_line(name, run_study, tmp_path, capsys):
    result, done = run_study(name)
    scale = study.STUDIES[name].SCALES["quick"]
    assert len(done) == len(result["rows"]) * (len(scale.learning_rates) + len(scale.seeds) - 1)
    for row in result["rows"]:
        assert [run["seed"] for run in row["runs"]] == list(scale.seeds)
        assert row["learning_rate"] in scale.learning_rates
    printed = capsys.readouterr().out
    assert "softmax attention" in printed
    assert "What this cannot say" in printed
    for figure in (tmp_path / f"{name}-out" / "figures").iterdir():
        assert figure.stat().st_size > 10_000
    page = f"<!-- table: {name}-out/results.json -->\n<!-- end of table -->"
    assert "elu1" in fill(page, tmp_path)

    # A lost run is done again, to the bit; the others are not.
    lost = done[-1]
    lost.path(tmp_path / name).unlink()
    again, redone = run_study(name)
    assert redone == [lost]
    assert again["rows"] == result["rows"]


def test_learning_rates_are_chosen_on_validation(run_study):
    result, _ = run_study("recall")
    for row in result["rows"]:
        tried = row["validation"]
        assert tried[f"{row['learning_rate']:g}"] == max(tried.values())


def test_a_run_of_other_settings_is_not_taken_for_this_one(run_study, tmp_path):
    _, done = run_study("recall")
    path = done[0].path(tmp_path / "recall")
    run = json.loads(path.read_text())
    run["settings"]["scale"]["steps"] += 1
    path.write_text(json.dumps(run))
    with pytest.raises(ConfigError, match="made with other settings"):
        run_study("recall")
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not a run of a study"):
        run_study("recall")


def test_a_diverged_run_is_never_chosen():
    jobs = [study.Job("bytes", byte_lm.SCALES["quick"], Variant("exp"), rate, 0) for rate in (1e-3, 1e-2)]
    results = {jobs[0]: {"validation": byte_lm.mean_bits(torch.tensor([torch.nan]))}, jobs[1]: {"validation": 9.0}}
    assert study.best(results, byte_lm) == {Variant("exp"): jobs[1]}
    assert byte_lm.mean_bits(torch.tensor([1.0, 2.0])) == pytest.approx(1.5 / math.log(2))
    assert spread([1.0, None, 2.0], 1) == "2 of 3 finite"
    assert spread([1.0, 2.0], 2) == "1.50 ± 0.71"
