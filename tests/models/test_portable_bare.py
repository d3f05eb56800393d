"""Portable checkpoints in processes of their own: where the package is not installed, and where it is not imported."""

import copy
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import GROUPED, make_model, random_ids, tokenizer_of
from loopback_hub import serve_hub
from packaging.requirements import Requirement
from portable_checkpoints import CUBE, ENTRY, HEADS, code_in, files_in

import hf_linattn
from hf_linattn import FEATURE_MAPS, LinAttnForSequenceClassification

HERE = Path(__file__).parent
IDS = random_ids(2, 9, seed=3)
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """For both processes; and the PyTorch form here too, for a checkpoint carries no kernels."""
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_LINATTN_BACKEND", "torch")
    home = tmp_path_factory.mktemp("home")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "HF_HUB_OFFLINE"))}
    yield kept | {"HF_HOME": str(home), "NO_PROXY": "*", "OMP_NUM_THREADS": "1"}
    patch.undo()


@pytest.fixture(scope="module")
def models(tmp_path_factory, environment):
    """A hybrid, one with windows, one with a user's map, and one with a learned map that a hub holds."""
    users = tmp_path_factory.mktemp("users")
    (users / "cube_maps.py").write_text(CUBE.format(name="cube"))
    sys.path.insert(0, str(users))
    importlib.import_module("cube_maps")
    yield {
        "tiny": make_model("hybrid", conv_kernel_size=4),
        "sliding": make_model("sliding_hybrid"),
        "cube": make_model(feature_map="cube", normalizer="rmsnorm"),
        "remote": make_model(**GROUPED, feature_map="hedgehog"),
    }
    sys.path.remove(str(users))
    del FEATURE_MAPS["cube"], sys.modules["cube_maps"]


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for name, model in models.items():
        model.save_pretrained(root / name, portable=True)
    tokenizer_of().save_pretrained(root / "tiny")
    return {name: root / name for name in models}


@pytest.fixture(scope="module")
def classifier():
    return make_model(cls=LinAttnForSequenceClassification)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Stands for the site-packages of a user: links to what the package needs, with what that needs in turn."""
    folder = tmp_path_factory.mktemp("packages")
    distribution = importlib.metadata.distribution
    found, queue = set(), [Requirement(text) for text in distribution("hf_linattn").requires]
    while queue:
        requirement = queue.pop()
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(requirement.name)
        needed = distribution(requirement.name)
        queue += [Requirement(text) for text in needed.requires or ()]
        for name in {file.parts[0] for file in needed.files} - {"..", "__pycache__"}:
            if not (folder / name).exists():
                (folder / name).symlink_to(needed.locate_file(name))
    return folder


def run(script, task, environment):
    process = subprocess.run(
        [sys.executable, "-S", "-I", HERE / script, json.dumps(task, default=str)],
        env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-6000:]
    return torch.load(Path(task["work"]) / "results.pt", weights_only=True)


@pytest.fixture(scope="module")
def bare(folders, classifier, packages, environment, tmp_path_factory):
    """The results where the package is not installed."""
    work = tmp_path_factory.mktemp("bare")
    classifier.save_pretrained(work / "saved_classifier", portable=True)
    with serve_hub() as hub:
        hub.repos["user/remote-1.0"] = files_in(folders["remote"])
        task = {
            "packages": packages,
            "folders": {name: folders[name] for name in ("tiny", "sliding", "cube")},
            "repos": {"remote": "user/remote-1.0"},
            "classifier": work / "saved_classifier",
            "ids": IDS.tolist(),
            "work": work,
        }
        results = run("portable_bare.py", task, environment | {"HF_ENDPOINT": hub.url})
    return results, work


@pytest.fixture(scope="module")
def unimported(folders, packages, environment, tmp_path_factory):
    """The results where the package is installed and nothing imports it."""
    installed = tmp_path_factory.mktemp("installed")
    (installed / "hf_linattn").symlink_to(HERE.parents[1] / "hf_linattn")
    (installed / "hf_linattn.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: hf-linattn\nVersion: {hf_linattn.__version__}\n"
    (installed / "hf_linattn.dist-info" / "METADATA").write_text(metadata)
    work = tmp_path_factory.mktemp("unimported")
    folders["tiny"].with_name("newer").mkdir()
    newer = folders["tiny"].with_name("newer")
    for name, content in files_in(folders["tiny"]).items():
        (newer / name).write_bytes(content.replace(b'installed_package("', b'installed_package("99.'))
    task = {
        "packages": [packages, installed],
        "cube": folders["cube"],
        "newer": newer,
        "plain": folders["remote"],
        "ids": IDS.tolist(),
        "work": work,
    }
    return run("portable_unimported.py", task, environment), work


def test_it_takes_trust(bare):
    assert "trust_remote_code=True" in bare[0]["without trust"]


@pytest.mark.parametrize("name", ["tiny", "sliding", "cube", "remote"])
def test_the_carried_code_gives_the_same_bits(name, bare, models):
    results, model = bare[0], models[name]
    assert results[f"module of {name}"].startswith("transformers_modules.")
    assert results[f"module of {name}"].endswith(f".{ENTRY}")
    assert torch.equal(results[f"logits of {name}"], model(IDS).logits)
    assert torch.equal(results[f"text of {name}"], model.generate(IDS, **GREEDY))
    assert torch.equal(results[f"static text of {name}"], results[f"text of {name}"])
    assert torch.equal(results[f"beams of {name}"], model.generate(IDS, num_beams=2, **GREEDY))
    assert results[f"text of {name}"][:, IDS.shape[1] :].unique().numel() > 1


def test_it_says_that_it_has_no_kernels(bare):
    assert [text for text in bare[0]["warnings"] if "which carries none; with hf_linattn installed they serve" in text]


def test_a_pipeline(bare, models):
    tokenizer = tokenizer_of()
    expected = models["tiny"].generate(**tokenizer("abc", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert bare[0]["pipeline"] == tokenizer.decode(expected[0], skip_special_tokens=True)


def test_every_auto_class(bare, classifier):
    results = bare[0]
    assert results["config"] == "LinAttnConfig"
    for auto, cls in HEADS.items():
        if auto.__name__ in results:
            assert results[auto.__name__] == cls.__name__
    assert results["AutoModel lacks"] == []
    assert results["AutoModelForSequenceClassification lacks"] == ["score.weight"]
    assert torch.equal(results["classes"], classifier(IDS).logits)


def test_a_training_step(bare, models):
    model = copy.deepcopy(models["cube"]).train()
    model(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert bare[0]["without gradient"] == []
    trained = dict(model.named_parameters())
    assert bare[0]["trained"].keys() == trained.keys()
    for name, parameter in bare[0]["trained"].items():
        assert torch.equal(parameter, trained[name]), name


def test_saving_from_there_carries_the_code_on(bare, folders):
    results, work = bare
    for name in ("plain", "portable", "classifier"):
        assert results[f"{name} again"], name
        source = "cube" if name != "classifier" else "tiny"
        entries = set(code_in(work / name))
        assert entries == set(code_in(folders[source])), name
    config = json.loads((work / "classifier" / "config.json").read_text())
    assert set(config["auto_map"].values()) == {
        f"{ENTRY}.LinAttnConfig",
        *(f"{ENTRY}.{c.__name__}" for c in HEADS.values()),
    }


def test_an_installed_package_serves_without_being_imported(unimported, models):
    results, work = unimported
    assert not results["imported"]
    for name, expected in {"cube": "cube", "plain": "remote"}.items():
        assert results[f"module of {name}"] == "hf_linattn.models.linattn.modeling_linattn"
        assert torch.equal(results[f"logits of {name}"], models[expected](IDS).logits)
    assert set(files_in(work / "cube")) == {"config.json", "generation_config.json", "model.safetensors"}


def test_a_package_that_is_older_than_the_checkpoint_does_not(unimported, models):
    results, work = unimported
    assert results["module of newer"].startswith("transformers_modules.newer.")
    assert not results["imported for newer"]
    assert torch.equal(results["logits of newer"], models["tiny"](IDS).logits)
    assert "modeling_linattn.py" in files_in(work / "newer")


@pytest.mark.parametrize("name, expected", [("newer", "tiny"), ("cube", "cube"), ("plain", "remote")])
def test_copies_of_the_code_keep_apart(name, expected, unimported, models):
    text = models[expected].generate(IDS, **GREEDY)
    for implementation in ("dynamic", "static"):
        assert torch.equal(unimported[0][f"{implementation} text of {name}"], text)
