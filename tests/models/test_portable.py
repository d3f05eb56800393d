"""Portable checkpoints where the package is installed: their files, whose classes load, and what is refused."""

import builtins
import importlib
import re
import sys

import pytest
import torch
import transformers
from helpers import make_config, make_model, random_ids
from portable_checkpoints import CUBE, ENTRY, HEADS, code_in, files_in
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    dynamic_module_utils,
)

import hf_linattn
from hf_linattn import (
    FEATURE_MAPS,
    FeatureMap,
    LinAttnConfig,
    LinAttnForCausalLM,
    register_feature_map,
)
from hf_linattn.models.portable import folder as folders
from hf_linattn.models.portable import rewrite
from hf_linattn.ops import backends


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A hybrid model and its folder; tests read only."""
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    model = make_model("hybrid", conv_kernel_size=4)
    model.save_pretrained(path, portable=True)
    return model, path


@pytest.fixture
def modules(monkeypatch, tmp_path):
    """Where transformers would put code that it is about to run; nobody answers its questions."""

    def ask(*args):
        raise AssertionError("transformers asks the user")

    monkeypatch.setattr(builtins, "input", ask)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "modules"


@pytest.fixture
def users_module(monkeypatch, tmp_path):
    """Writes a module and imports it; what it registers is forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path / "users")
    for name in FEATURE_MAPS:
        monkeypatch.setitem(FEATURE_MAPS, name, FEATURE_MAPS[name])
    before = dict(FEATURE_MAPS)
    written = []

    def write(name, text):
        (tmp_path / "users").mkdir(exist_ok=True)
        (tmp_path / "users" / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        written.append(name)
        return importlib.import_module(name)

    yield write
    for name in written:
        sys.modules.pop(name, None)
    FEATURE_MAPS.clear()
    FEATURE_MAPS.update(before)


# ---- what is in the folder


def test_config_names_every_auto_class(checkpoint):
    config = transformers.PreTrainedConfig.get_config_dict(checkpoint[1])[0]
    expected = {auto.__name__: f"{ENTRY}.{cls.__name__}" for auto, cls in HEADS.items()}
    assert config["auto_map"] == {"AutoConfig": f"{ENTRY}.LinAttnConfig", **expected}


def test_transformers_finds_every_file_from_the_entry_and_no_other_is_there(checkpoint):
    path = checkpoint[1]
    found = {rewrite.Path(name).stem for name in dynamic_module_utils.get_relative_import_files(path / f"{ENTRY}.py")}
    assert found | {ENTRY} == set(code_in(path))
    assert {
        "configuration_linattn",
        "ops_chunk",
        "ops_feature_maps",
        "cache_layers",
        "ops_sliding_chunk",
        "generation_loop",
    } <= found
    left_behind = ("benchmark", "cli", "conversion", "model_card", "portable", "native", "triton")
    assert not [name for name in found if any(part in name for part in left_behind)]


def test_code_needs_nothing_but_transformers_and_what_it_needs(checkpoint):
    for path in checkpoint[1].glob("*.py"):
        imported = set(dynamic_module_utils.get_imports(path)) - set(sys.stdlib_module_names)
        assert imported <= {"torch", "transformers", "safetensors", "huggingface_hub", "packaging", "tqdm"}, path.name


def test_every_file_says_what_it_is(checkpoint):
    for name, text in code_in(checkpoint[1]).items():
        head = text[:1000]
        assert 'Licensed under the Apache License, Version 2.0 (the "License")' in head, name
        assert f"# Generated from hf_linattn {hf_linattn.__version__}" in head, name
    assert ", module hf_linattn.ops.chunk." in code_in(checkpoint[1])["ops_chunk"][:1000]


def test_saving_again_gives_the_same_bytes(checkpoint, tmp_path):
    model, path = checkpoint
    for _ in range(2):
        model.save_pretrained(tmp_path / "other", portable=True)
        assert files_in(tmp_path / "other") == files_in(path)
    LinAttnForCausalLM.from_pretrained(path).save_pretrained(tmp_path / "loaded", portable=True)
    assert files_in(tmp_path / "loaded") == files_in(path)


def test_other_files_stay_and_those_of_an_earlier_save_go(tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path, portable=True, max_shard_size="5KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    (tmp_path / "ops_old.py").write_text("# Generated from hf_linattn 0.0.1, module hf_linattn.ops.old.\n")
    (tmp_path / "mine.py").write_text("# my notes\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    model.save_pretrained(tmp_path, portable=True)
    names = set(files_in(tmp_path))
    assert [name for name in names if "safetensors" in name] == ["model.safetensors"]
    assert {"mine.py", "tokenizer.json", "config.json"} <= names
    assert "ops_old.py" not in names
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()


# ---- where the package is installed its classes serve


@pytest.mark.parametrize("trust", [None, False, True])
@pytest.mark.parametrize("auto", HEADS, ids=lambda auto: auto.__name__)
def test_the_installed_classes_load(auto, trust, modules, checkpoint):
    _, path = checkpoint
    options = {} if trust is None else {"trust_remote_code": trust}
    assert type(AutoConfig.from_pretrained(path, **options)) is LinAttnConfig
    model = auto.from_pretrained(path, **options)
    assert type(model) is HEADS[auto]
    assert not modules.exists()
    assert not [name for name in sys.modules if name.startswith("transformers_modules.tiny")]


def test_logits_are_the_same_bits(checkpoint):
    model, path = checkpoint
    ids = random_ids(2, 9)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(path)(ids).logits, model(ids).logits)


def test_a_plain_save_of_what_was_loaded_names_no_code(checkpoint, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint[1], trust_remote_code=True)
    model.save_pretrained(tmp_path)
    assert set(files_in(tmp_path)) == {"config.json", "generation_config.json", "model.safetensors"}
    assert "auto_map" not in transformers.PreTrainedConfig.get_config_dict(tmp_path)[0]
    checkpoint[0].save_pretrained(tmp_path)  # nor of what was saved with code before
    assert "auto_map" not in transformers.PreTrainedConfig.get_config_dict(tmp_path)[0]


# ---- feature maps of a user


def test_a_users_map_travels(users_module, tmp_path):
    users_module("cube_maps", CUBE.format(name="cube"))
    model = make_model(feature_map="cube", normalizer="none")
    model.save_pretrained(tmp_path / "tiny", portable=True)
    code = code_in(tmp_path / "tiny")
    assert "math.pi * x**3" in code["feature_map_cube_maps"]
    assert "Apache" not in code["feature_map_cube_maps"]
    assert not re.search(r"^\s*(import|from) hf_linattn", code["feature_map_cube_maps"], re.MULTILINE)
    assert 'register_feature_map("cube")' in code["feature_map_cube_maps"]
    make_model().save_pretrained(tmp_path / "plain", portable=True)
    assert "feature_map_cube_maps" not in code_in(tmp_path / "plain")


def test_a_map_that_is_not_registered_here_says_how_to(users_module, modules, tmp_path):
    users_module("cube_maps", CUBE.format(name="cube"))
    model = make_model(feature_map="cube", normalizer="none")
    model.save_pretrained(tmp_path / "tiny", portable=True)
    del FEATURE_MAPS["cube"]
    with pytest.raises(ValueError, match="feature_map='cube' is unknown.*get_class_from_dynamic_module") as error:
        AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", trust_remote_code=True)
    reference = re.search(r"get_class_from_dynamic_module\('([\w.]+)'", str(error.value))[1]
    dynamic_module_utils.get_class_from_dynamic_module(reference, str(tmp_path / "tiny"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    ids = random_ids(1, 9)
    assert torch.equal(again(ids).logits, model(ids).logits)


def refused(model, path, match):
    with pytest.raises(ValueError, match=match) as error:
        model.save_pretrained(path, portable=True)
    assert "\n" not in str(error.value)
    assert not path.exists()


@pytest.mark.parametrize(
    "change, match",
    [
        ({"import math": "import math\n\nimport cube_helper"}, "cube_maps imports cube_helper, which no installed"),
        ({"import math": "import math\n\nfrom cube_helper import x"}, "cube_maps imports cube_helper, which no"),
        ({"import math": "import math\n\nimport hf_linattn.ops"}, "`import hf_linattn.ops`; write `from hf_linattn"),
        (
            {"import math": "import math\n\nfrom hf_linattn import ops"},
            "`from hf_linattn import ops`; import the names",
        ),
    ],
)
def test_a_module_that_cannot_travel_is_refused(change, match, users_module, tmp_path):
    users_module("cube_helper", "x = 1\n")
    text = CUBE.format(name="cube")
    for old, new in change.items():
        text = text.replace(old, new)
    users_module("cube_maps", text)
    refused(make_model(feature_map="cube", normalizer="none"), tmp_path / "tiny", match)


def test_a_module_in_a_package_of_its_own_is_refused(users_module, tmp_path):
    (tmp_path / "users" / "mine").mkdir(parents=True)
    (tmp_path / "users" / "mine" / "helper.py").write_text("x = 1\n")
    (tmp_path / "users" / "mine" / "__init__.py").write_text("from .helper import x\n" + CUBE.format(name="cube"))
    importlib.invalidate_caches()
    importlib.import_module("mine")
    try:
        refused(make_model(feature_map="cube", normalizer="none"), tmp_path / "tiny", r"mine imports \.helper, which")
    finally:
        del sys.modules["mine"], sys.modules["mine.helper"]


def test_a_map_without_source_is_refused(users_module, tmp_path):
    @register_feature_map("dynamic")
    class Dynamic(FeatureMap):
        def forward(self, x):
            return x.relu()

    refused(
        make_model(feature_map="dynamic"), tmp_path / "tiny", "feature_map='dynamic': the source of .*Dynamic cannot"
    )
    Dynamic.__module__ = "__main__"
    refused(
        make_model(feature_map="dynamic"), tmp_path / "tiny", "Dynamic is defined in the script or session that runs"
    )
    Dynamic.__module__ = "no_such_module"
    refused(make_model(feature_map="dynamic"), tmp_path / "tiny", "source of no_such_module.* cannot be found")


# ---- what else is refused, and that nothing is left then


def test_what_is_no_portable_model_is_refused(tmp_path):
    class Mine(LinAttnForCausalLM):
        pass

    refused(Mine(make_config()), tmp_path / "tiny", "carries the classes of hf_linattn, and Mine is defined in")
    with pytest.raises(ValueError, match="distributed_checkpoint"):
        make_model().save_pretrained(tmp_path / "tiny", portable=True, distributed_checkpoint=True)
    with pytest.raises(TypeError, match="by name"):
        make_model().save_pretrained(tmp_path / "tiny", True, portable=True)
    (tmp_path / "file").write_text("here")
    with pytest.raises(ValueError, match=r"save_directory='.*file' is a file"):
        make_model().save_pretrained(tmp_path / "file", portable=True)
    assert files_in(tmp_path) == {"file": b"here"}


def test_adapters_are_refused(tmp_path):
    model = make_model()
    model._hf_peft_config_loaded = True  # what transformers sets in `add_adapter`
    refused(model, tmp_path / "tiny", "has adapters: merge them")


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("fault", ["while writing", "while moving"])
def test_a_fault_leaves_the_folder_as_it_was(fault, exists, monkeypatch, tmp_path):
    path = tmp_path / "tiny"
    if exists:
        make_model("conv").save_pretrained(path, portable=True)
        (path / "notes.txt").write_text("mine")
    before = files_in(path) if exists else None

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if fault == "while writing":
        monkeypatch.setattr(GenerationConfig, "save_pretrained", full)
    else:
        replace, calls = folders.os.replace, []

        def late(source, target):
            calls.append(source)
            if len(calls) == (60 if exists else 1):  # among the new files, when the old ones have been moved away
                full()
            replace(source, target)

        monkeypatch.setattr(folders.os, "replace", late)
    with pytest.raises(OSError, match="No space left"):
        make_model().save_pretrained(path, portable=True)
    assert (files_in(path) if exists else None) == before
    assert [item.name for item in tmp_path.iterdir()] == ["tiny"] * exists
    monkeypatch.undo()
    make_model().save_pretrained(path, portable=True)
    assert LinAttnForCausalLM.from_pretrained(path).config.conv_kernel_size == 0


def test_other_ranks_write_nothing(tmp_path):
    make_model().save_pretrained(tmp_path / "tiny", portable=True, is_main_process=False)
    assert files_in(tmp_path / "tiny") == {}


# ---- how modules become files


def test_names_of_files_never_collide():
    names = []
    for module in ("hf_linattn.ops.chunk", "hf_linattn.ops_chunk", "ops.chunk", "hf_linattn.ops"):
        names.append(rewrite.flat_name(module, names))
    assert names == ["ops_chunk", "ops_chunk_", "ops_chunk__", "ops"]


def test_imports_are_rewritten_where_they_stand():
    source = """\
from __future__ import annotations
import math  # é: columns are counted in bytes
from . import backends as b, linear_attention
from .chunk import (
    chunk_linear_attention,  # gone
    CHUNK as C,
)
def f():
    from ..cache import X
    return X  # from .chunk import y
"""
    flat = {f"hf_linattn.{name}": name.replace(".", "_") for name in ("ops", "ops.backends", "ops.chunk", "cache")}
    text = rewrite.rewritten(source, "hf_linattn.ops", lambda brought: rewrite.flat_import(brought, flat))
    assert (
        text
        == """\
from __future__ import annotations
import math  # é: columns are counted in bytes
from .ops_backends import __name__ as _
from . import ops_backends as b
from .ops import linear_attention
from .ops_chunk import chunk_linear_attention, CHUNK as C
def f():
    from .cache import X
    return X  # from .chunk import y
"""
    )


def test_modules_are_found_by_their_imports():
    found = rewrite.modules_from(["hf_linattn.cache.rollback"])
    assert "hf_linattn.ops" in found
    assert "hf_linattn.ops.chunk" in found
    assert "hf_linattn.cache" not in found
    with pytest.raises(ValueError, match="hf_linattn.nothing is no module"):
        rewrite.modules_from(["hf_linattn.nothing"])


def test_code_without_kernels_says_so(monkeypatch):
    monkeypatch.setattr(backends, "absent", lambda backend: "this code was read from a checkpoint, which carries none")
    q = torch.ones(1, 2, 1, 4)
    backends._say_once.cache_clear()
    with pytest.warns(
        UserWarning, match="runs in PyTorch, without native kernels: this code was read from a checkpoint"
    ):
        assert backends.choose(q, q, q).backend == "torch"
    with pytest.raises(RuntimeError, match="backend='native' cannot run this call.*read from a checkpoint"):
        hf_linattn.linear_attention(q, q, q, backend="native")
