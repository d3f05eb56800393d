"""A card says what the result files say, in words a reader can trust, and the hub takes it."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, metadata_load
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from transformers.pipelines import SUPPORTED_TASKS

from hf_linattn.benchmark import plots
from hf_linattn.benchmark.record import read_json
from hf_linattn.benchmark.tables import render
from hf_linattn.cli import main
from hf_linattn.model_card import render_card, write_card
from hf_linattn.model_card.limits import LIMITS
from hf_linattn.model_card.sections import FIGURES, SECTIONS

CARDS = Path(__file__).parents[1] / "model_cards"
DEMO = CARDS / "demo"
# Studies compare many small models and have tables instead of a card.
RESULTS = {path.parent: json.loads(path.read_text())["kind"] for path in CARDS.glob("*/results.json")}
WITH_A_MODEL = sorted(folder for folder, kind in RESULTS.items() if not kind.endswith("study"))


@pytest.fixture
def demo(tmp_path):
    """A copy of the demo's folder."""
    return shutil.copytree(DEMO, tmp_path / "demo")


@pytest.fixture
def changed(demo):
    """The card after a change to a file: `changed(change)` of results.json, or of another."""

    def render_after(change, file="results.json"):
        result = json.loads((demo / file).read_text())
        change(result)
        (demo / file).write_text(json.dumps(result))
        return str(render_card(demo))

    return render_after


def section(card: str, heading: str) -> str:
    return card.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


# ---- what is committed ----


@pytest.mark.parametrize("folder", WITH_A_MODEL, ids=lambda folder: folder.name)
def test_committed_cards_are_their_files(folder):
    assert str(render_card(folder)).encode() == (folder / "README.md").read_bytes()


def test_the_demo_has_a_card():
    assert DEMO in WITH_A_MODEL


@pytest.mark.parametrize("folder", WITH_A_MODEL, ids=lambda folder: folder.name)
def test_links_lead_somewhere_inside_the_folder(folder):
    links = re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text())
    assert {"results.json", "figures/training.png", "figures/compare.png"} <= set(links)
    for link in links:
        assert link.startswith("https://huggingface.co/") or (folder / link).is_file()


# ---- what a card says ----


def test_sections_stand_in_order_and_limits_come_first():
    card = render_card(DEMO).text
    headings = re.findall(r"^## (.*)$", card, re.MULTILINE)
    assert headings == [section.heading for section in SECTIONS if section.heading]
    assert headings[0] == "Limits"
    before = card.split("\n## ")[0].strip().splitlines()
    assert len([line for line in before if line]) == 2  # the name, and one line of what it is


def test_tables_are_those_of_the_benchmark():
    card = render_card(DEMO).text
    results = read_json(DEMO / "results.json")
    tables = [results["train"], results["compare"], read_json(DEMO / "benchmark.json")["model"]]
    tables += [read_json(DEMO / f"{name}.json") for name in ("generation", "batching", "modes", "throughput")]
    for result in tables:
        assert render(result).strip() in card


def test_every_number_is_in_the_files(changed):
    """Other measurements give other numbers, wherever they stand in the text."""
    card = changed(
        lambda r: (
            r["train"].update(tokens_seen=992256, seconds=77.4),
            r["train"]["model"].update(parameters=496129),
            r["train"]["bits_per_byte"].update(after=2.4321),
            r["train"]["evaluations"][-1].__setitem__(1, 2.4321),
            r["train"]["config"].update(block_size=128, max_steps=1234),
            r["train"]["data"].update(held_out_bytes=90001, train_tokens=1984512),
            r["train"]["record"].update(commit="c0ffee" * 6 + "c0ff", command="accelerate launch training/other.py"),
            r["generate"].update(seconds=12.34, cache_bytes=2048),
        )
    )
    limits = section(card, "Limits")
    assert "496,129 parameters and was trained on 992,256 tokens, 2 a parameter and 50% of its training text" in limits
    assert "it needs 2.432" in limits
    assert "90,001 bytes" in limits
    assert "blocks of 128 tokens" in limits
    data = section(card, "Data, code and machine")
    assert "1,234 steps of 1 x 128 tokens a process" in data
    assert "77 seconds" in data
    assert "`c0ffeec0ffee`" in data
    assert "| 2,200 | 2.432 |" in section(card, "Quality")
    assert "took 12.3 seconds" in section(card, "Memory and speed")
    assert "then held 2 KiB" in section(card, "Memory and speed")
    assert "accelerate launch training/other.py  # results.json" in section(card, "How it was made")
    for old in ("560,972", "2.525", "496,128", "100,000"):
        assert old not in card


def test_baselines_that_are_not_reached_are_limits_and_others_are_not(changed):
    limits = section(changed(lambda r: r["train"]["bits_per_byte"].update(after=2.0)), "Limits")
    assert "does not reach 6-gram (1.694 bits per byte): it needs 2.000" in limits
    assert "gzip (" not in limits
    limits = section(changed(lambda r: r["train"]["bits_per_byte"].update(after=1.5)), "Limits")
    assert "does not reach" not in limits
    assert "compared with gzip and 6-gram alone" in limits
    limits = section(changed(lambda r: r["train"].update(baselines=None)), "Limits")
    assert "No baseline was measured" in limits


def test_a_gpu_is_named_where_one_was_used_and_missed_where_not(changed):
    assert "Nothing was measured on a GPU." in section(str(render_card(DEMO)), "Limits")

    def on_gpu(result):
        result["compare"]["device"] = "cuda:0"
        result["compare"]["record"] |= {"command": "python x.py"}
        result["compare"]["record"]["hardware"]["gpus"] = ["NVIDIA H200", "NVIDIA H200"]

    card = changed(on_gpu)
    assert "Nothing was measured on a GPU" not in card
    assert "2 NVIDIA H200 (devices: cpu, cuda)" in section(card, "Limits")


def test_a_training_run_on_gpus_counts_though_it_names_no_device(changed):
    card = changed(lambda r: r["train"]["record"]["hardware"].update(gpus=["NVIDIA H200"]))
    assert "1 NVIDIA H200 (devices: cpu, cuda)" in section(card, "Limits")


def test_code_that_is_no_commit_is_a_limit(changed):
    assert "is no commit" not in str(render_card(DEMO))
    commit = json.loads((DEMO / "results.json").read_text())["train"]["record"]["commit"]
    for unknown, cell in ((f"{commit}-dirty", f"| `{commit[:12]}-dirty` |"), (None, "|  |")):
        card = changed(lambda r, unknown=unknown: r["train"]["record"].update(commit=unknown))
        assert "The code behind results.json is no commit" in section(card, "Limits")
        assert cell in section(card, "Data, code and machine")


def test_contexts_where_the_llama_is_faster_are_named(changed):
    assert "faster than this model after 256 and 1,024 tokens" in section(str(render_card(DEMO)), "Limits")

    def always_faster(result):
        for row in result["compare"]["rows"]:
            row["llama_over_model"]["ms_per_token"] = 2.0

    assert "faster than this model" not in changed(always_faster)


def test_modes_that_a_llama_lacks_too_are_no_limit_of_this_model():
    limits = section(str(render_card(DEMO)), "Limits")
    assert '`cache_implementation="quantized"` (refused' in limits
    assert "`output_attentions` (inexact" in limits
    assert "use_mtp" not in limits  # refused by a Llama as well


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda b: b.update(quick=True), "benchmark.json are of a quick run that only tries the code"),
        (lambda b: b.update(skipped={"decode": "interrupted"}), "was to hold was measured (decode: interrupted)"),
    ],
)
def test_a_benchmark_that_is_not_whole_is_a_limit(changed, change, words):
    assert words in section(changed(change, "benchmark.json"), "Limits")


def test_results_alone_make_a_card(demo):
    """What has no file or figure is not told of."""
    for path in demo.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "results.json":
            path.unlink()
    card = str(render_card(demo))
    assert "![" not in card
    assert set(re.findall(r"\]\(([^)]+)\)", card)) == {"results.json"}
    headings = re.findall(r"^## (.*)$", card, re.MULTILINE)
    assert "Memory and speed of the code" not in headings
    assert headings[:5] == [
        "Limits",
        "Data, code and machine",
        "Quality",
        "Memory and speed",
        "How to load and generate",
    ]
    assert "up to a context of 16,384 tokens" in section(card, "Limits")  # that of the comparison: no generation.json
    assert "<details>" not in card


def test_figures_have_the_names_that_plots_gives_them(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "save", lambda figure, path: path)  # drawing takes seconds
    files = [read_json(DEMO / name) for name in ("results.json", "benchmark.json")]
    parts = [
        part for whole in files for part in whole.values() if isinstance(part, dict) and part.get("kind") in plots.PLOTS
    ]
    for part in parts:
        assert [path.name for path in plots.plot(part, tmp_path)] == [FIGURES[part["kind"]][0]]
    assert {part["kind"] for part in parts} == set(FIGURES)


def test_the_code_block_is_python_and_uses_the_run_and_its_prompt():
    code = re.search(r"```python\n(.*?)```", str(render_card(DEMO)), re.DOTALL)[1]
    compile(code, "card", "exec")
    prompt = read_json(DEMO / "results.json")["generate"]["prompt"]
    assert eval(re.search(r'tokenizer\((".*"), return_tensors', code)[1]) == prompt
    assert code.count('"runs/demo"') == 2


@pytest.mark.parametrize("prompt", ['say "hi"', "it's", "back\\slash\n", "both ' and \""])
def test_any_prompt_is_quoted(changed, prompt):
    card = changed(lambda r: r["generate"].update(prompt=prompt))
    assert eval(re.search(r'tokenizer\((".*"), return_tensors', card)[1]) == prompt


def test_what_a_byte_model_writes_cannot_break_the_card(changed, tmp_path):
    card = changed(lambda r: r["generate"].update(text="a\r\nb\x00c\x85d ```\n---\n# no heading"))
    assert "\r" not in card
    assert "\x00" not in card
    sample = re.search(r"^````text\n(.*?)\n````$", card, re.DOTALL | re.MULTILINE)[1]
    assert sample == "a\ufffd\nb\ufffdc\ufffdd ```\n---\n# no heading"


# ---- other models ----


def from_checkpoint(result):
    config = result["train"]["config"]
    config["model_config"], config["model_name_or_path"] = None, "/home/someone/models/first"


def test_a_model_that_goes_on_from_another_claims_no_licence(changed):
    card = ModelCard(changed(from_checkpoint))
    assert card.data.license is None
    assert "trained on from `first` on" in card.text
    assert "The weights go back to `first`, whose licence holds for them." in section(card.text, "Licence")
    assert "/home" not in str(card)
    assert "A token is a byte" not in card.text


def hub_data(result):
    result["train"]["data"] |= {"dataset": "someone/texts", "origin": "hub"}


def own_data(result):
    result["train"]["data"] |= {"dataset": "/home/someone/texts/*.txt", "origin": "files"}


def streamed(result):
    for name in ("train_documents", "train_bytes", "train_tokens"):
        del result["train"]["data"][name]


def llama(result):
    result["train"]["model"]["class"] = "LlamaForCausalLM"
    result["train"]["config"]["model_config"]["model_type"] = "llama"


def hybrid(result):
    kinds = ["kernel_linear_attention", "full_attention", "kernel_linear_attention"]
    result["train"]["config"]["model_config"] |= {"layer_types": kinds, "num_hidden_layers": 3}


def many_evaluations(result):
    result["train"]["evaluations"] = [[100 * i, 9 - i / 50] for i in range(101)]


@pytest.mark.parametrize(
    "change, heading, words",
    [
        (hub_data, "Data, code and machine", "[someone/texts](https://huggingface.co/datasets/someone/texts)"),
        (own_data, "Data, code and machine", "Training text: `*.txt` (687 documents"),
        (streamed, "Data, code and machine", "Python 3.11.7. Held-out text: 10 documents"),
        (llama, "How to load and generate", "```python\nfrom transformers import AutoModelForCausalLM"),
        (hybrid, "Limits", "The state of a linear layer has a fixed size"),
        (many_evaluations, "Quality", "| 10,000 | 7.000 |"),
    ],
)
def test_other_runs_have_cards_too(changed, change, heading, words):
    card = changed(change)
    assert words in section(card, heading)
    assert hub_errors(card) == []
    assert "/home" not in card


def test_layers_are_counted_by_kind(changed):
    assert "3 layers" not in str(render_card(DEMO))
    assert "2 layers of linear attention and 1 layer of full attention" in changed(hybrid)


def test_a_llama_has_the_layers_of_a_llama(changed):
    card = changed(llama)
    assert "(`LlamaForCausalLM`, 2 layers of full attention)" in card
    assert "tags:" not in card
    assert "linear layer" not in card


def test_only_the_hubs_own_data_is_in_the_metadata(changed):
    assert ModelCard(changed(own_data)).data.to_dict().keys().isdisjoint({"datasets", "language"})
    assert ModelCard(changed(hub_data)).data.datasets == ["someone/texts"]


def test_long_runs_show_a_few_evaluations(changed):
    rows = re.findall(r"^\| [\d,]+ \| \d\.\d+ \|$", section(changed(many_evaluations), "Quality"), re.MULTILINE)
    assert 3 <= len(rows) <= 8
    assert (rows[0], rows[-1]) == ("| 0 | 9.000 |", "| 10,000 | 7.000 |")


def test_parts_that_a_gpu_adds_are_told(changed):
    rows = [{"case": "relu", "within": True, "errors": {"out": 1e-7}}, {"case": "taylor2", "within": False}]
    kernels = {"kind": "benchmark kernels", "device": "cuda", "rows": rows}

    def on_gpu(benchmark):
        benchmark |= {"kernels": kernels, "shapes": {"kind": "benchmark shapes", "device": "cuda", "shapes": []}}

    card = changed(on_gpu, "benchmark.json")
    assert "Kernels are outside their error bounds on cuda: taylor2." in section(card, "Limits")
    assert "Nothing was measured on a GPU" not in card
    code = section(card, "Memory and speed of the code")
    assert render(kernels).strip() in code
    assert "The attention function at published shapes ([benchmark.json](benchmark.json)):" in code


def test_a_new_kind_of_result_is_a_function_in_a_section(changed, monkeypatch):
    quality = next(section for section in SECTIONS if section.heading == "Quality")
    monkeypatch.setitem(quality.writers, "recall", lambda part, evidence: [f"It recalls {part.fields['pairs']} pairs."])
    monkeypatch.setitem(LIMITS, "recall", (lambda part, evidence: f"Recall was tried in {part.file} alone.",))
    card = changed(lambda r: r.update(recall={"kind": "recall", "pairs": 17}))
    assert section(card, "Quality").rstrip().endswith("It recalls 17 pairs.")
    assert "- Recall was tried in results.json alone." in section(card, "Limits")


# ---- metadata ----


def hub_errors(content: str) -> list[str]:
    """What the hub would refuse, by its published specification (huggingface/hub-docs, modelcard.md)."""
    data = yaml.safe_load(REGEX_YAML_BLOCK.search(content).group(2))
    errors = []

    def need(holds, message):
        errors.extend([] if holds else [message])

    need(data.get("license", "mit") in ("apache-2.0", "mit", "other"), f'"license" must be one of the list: {data}')
    for name in data.get("datasets", []):
        need(re.fullmatch(r"(?:[\w-]+/)?[\w.-]+", name), f'"datasets" holds {name}')
    language = data.get("language", "code")
    need(re.fullmatch(r"[a-z]{2,3}|code|multilingual", language), f'"language" is {language}')
    need(data.get("pipeline_tag") in SUPPORTED_TASKS, '"pipeline_tag" is unknown')
    for model in data.get("model-index", []):
        need(isinstance(model.get("name"), str), '"model-index[0].name" is required')
        for result in model["results"]:
            need(isinstance(result.get("task", {}).get("type"), str), '"task.type" is required')
            dataset = result.get("dataset", {})
            need(re.fullmatch(r"(?:[\w-]+/)?[\w.-]+", str(dataset.get("type", "/"))), '"dataset.type" is required')
            need(isinstance(dataset.get("name"), str), '"dataset.name" is required')
            for metric in result.get("metrics", [{}]):
                need({"type", "value"} <= metric.keys(), '"metrics" need type and value')
    return errors


def test_metadata_survives_the_hubs_own_readers(demo):
    card = render_card(demo)
    path = write_card(demo)
    assert str(ModelCard.load(path)) == str(card) == path.read_text(encoding="utf-8")
    loaded = metadata_load(path)
    assert loaded == card.data.to_dict() == yaml.safe_load(card.data.to_yaml())
    name, (result,) = model_index_to_eval_results(loaded["model-index"])
    assert eval_results_to_model_index(name, [result]) == loaded["model-index"]
    train = read_json(DEMO / "results.json")["train"]
    assert (name, result.metric_type) == ("demo", "bits_per_byte")
    assert result.metric_value == round(train["bits_per_byte"]["after"], 3)
    assert hub_errors(str(card)) == []
    assert {key: loaded[key] for key in ("license", "library_name", "pipeline_tag", "language", "tags")} == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "language": "code",
        "tags": ["linear-attention", "hf_linattn"],
    }


VALIDATE = """
import sys
from huggingface_hub import ModelCard
for path in sys.argv[1:]:
    try:
        print("valid", ModelCard.load(path).validate())
    except ValueError as error:
        print("refused:", error)
"""


def test_the_hub_is_asked_and_takes_the_card(demo, tmp_path):
    """`ModelCard.validate()` against a server that answers as the hub does: 200, or 400 and what is wrong as text."""
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            errors = hub_errors(body["content"])
            answer = "\n".join(errors) if errors else json.dumps({"errors": [], "warnings": []})
            self.send_response(400 if errors else 200)
            self.send_header("Content-Type", "text/plain" if errors else "application/json")
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *arguments):
            pass

    good, bad = write_card(demo), tmp_path / "bad.md"
    bad.write_text(good.read_text().replace("type: bits_per_byte", "kind: bits_per_byte").replace("text-gen", "no-gen"))
    spoiled = bad.read_text()
    bad.write_text(spoiled.replace("    - kind:", "    - type: x\n      kind:"))  # loads here, and is refused there
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        there = f"http://127.0.0.1:{server.server_port}"
        environment = os.environ | {"HF_ENDPOINT": there, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        run = subprocess.run(
            [sys.executable, "-c", VALIDATE, str(good), str(bad)],
            capture_output=True, text=True, env=environment, timeout=60,
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines() == ["valid None", 'refused: "pipeline_tag" is unknown']
    assert asked[0] == ("/api/validate-yaml", {"repoType": "model", "content": good.read_text(encoding="utf-8")})
    assert len(asked) == 2


# ---- the command, and what is wrong with its input ----


def test_the_command_writes_and_checks(demo, tmp_path, capsys):
    path = demo / "README.md"
    path.unlink()
    main(["card", str(demo)])
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert path.read_bytes() == (DEMO / "README.md").read_bytes()
    main(["card", str(demo), "--check"])
    assert "up to date" in capsys.readouterr().out
    main(["card", str(demo), "--out", str(tmp_path / "new" / "card.md")])
    assert (tmp_path / "new" / "card.md").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda path: path.write_text(path.read_text() + "\n"), "is not what the result files say: run this without"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n")), "is not what the result files say"),
        (lambda path: path.unlink(), "cannot be read (No such file or directory)"),
    ],
)
def test_check_fails_in_one_line_and_changes_nothing(demo, spoil, words):
    path = demo / "README.md"
    spoil(path)
    before = {each: each.read_bytes() for each in demo.rglob("*") if each.is_file()}
    with pytest.raises(SystemExit) as error:
        main(["card", str(demo), "--check"])
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert {each: each.read_bytes() for each in demo.rglob("*") if each.is_file()} == before


def drop(*names):
    """Deletes a field given by its path."""

    def change(text):
        result = json.loads(text)
        inner = result
        for name in names[:-1]:
            inner = inner[name]
        del inner[names[-1]]
        return json.dumps(result)

    return change


def put(value, *names):
    def change(text):
        result = json.loads(text)
        inner = result
        for name in names[:-1]:
            inner = inner[name]
        inner[names[-1]] = value
        return json.dumps(result)

    return change


@pytest.mark.parametrize(
    "file, change, words",
    [
        ("results.json", lambda text: text[:2000], "not a whole JSON file ("),
        ("results.json", lambda text: "[]", "holds a list; a result is a JSON object"),
        ("results.json", lambda text: '{"model_type": "linattn"}', "no result of this package"),
        ("results.json", lambda text: '{"kind": 3}', "no result of this package"),
        ("results.json", put(2, "schema_version"), "schema_version is 2; this release reads 1"),
        ("generation.json", put(7, "schema_version"), "schema_version is 7; this release reads 1"),
        ("benchmark_rate.json", lambda text: text[:-30], "not a whole JSON file ("),
        ("results.json", lambda text: '{"kind": "study"}', "kind 'study' describes no model; a card needs"),
        ("results.json", drop("train", "bits_per_byte", "after"), "the field train.bits_per_byte.after is missing"),
        ("results.json", drop("train", "record", "hardware", "cpu"), "the field train.record.hardware.cpu is missing"),
        ("results.json", drop("compare", "rows", 1, "llama"), "the field compare.rows.1.llama is missing"),
        ("results.json", drop("generate", "prompt"), "the field generate.prompt is missing"),
        ("generation.json", drop("bounds", "loop"), "the field bounds.loop is missing"),
        ("throughput.json", drop("record", "date"), "the field record.date is missing"),
        ("benchmark.json", drop("model", "sides"), "the field model.sides is missing"),
        ("results.json", put("fast", "train", "seconds"), "a field of kind 'train' is not as it should be: "),
        ("results.json", put(None, "train", "bits_per_byte"), "a field of kind 'train' is not as it should be: "),
        ("results.json", put(0, "train", "model", "parameters"), "a field of kind 'train' is not as it should be: "),
        ("modes.json", put([1], "rows"), "a field of kind 'modes' is not as it should be: "),
        ("results.json", put("LlamaModel", "train", "model", "class"), "class is 'LlamaModel'; cards are for classes"),
    ],
)
def test_bad_files_are_one_line_that_names_file_and_field(demo, file, change, words):
    (demo / file).write_text(change((demo / file).read_text()))
    before = (demo / "README.md").read_bytes()
    with pytest.raises(ValueError) as error:
        write_card(demo)
    assert str(error.value).startswith(f"{demo / file}: ")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert (demo / "README.md").read_bytes() == before


def test_folders_that_cannot_have_a_card(tmp_path):
    with pytest.raises(ValueError, match=r"nothing: there is no such folder$"):
        render_card(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"there is no results.json in it; training/demo.py writes one$"):
        render_card(tmp_path)


@pytest.mark.parametrize(
    "out, words", [("figures", "Is a directory"), ("results.json/README.md", "Not a directory|File exists")]
)
def test_what_cannot_be_written_leaves_nothing_half_written(demo, out, words):
    before = sorted(demo.rglob("*"))
    with pytest.raises(ValueError, match=f"^{re.escape(str(demo / out))}: cannot be written \\(({words})\\)$"):
        write_card(demo, demo / out)
    assert sorted(demo.rglob("*")) == before
