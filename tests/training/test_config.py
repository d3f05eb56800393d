from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml
from transformers import AutoConfig

import hf_linattn  # noqa: F401  registers the models
from config import ConfigError, EvaluateConfig, FinetuneConfig, PretrainConfig, read_config

FOLDER = Path(__file__).parents[2] / "training" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
FINETUNING = sorted((FOLDER / "finetune").glob("*.yaml"))


@pytest.fixture
def recipe(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "recipe.yaml").write_text("model_config: {model_type: llama, hidden_size: 64}\n" + text)
        return str(tmp_path / "recipe.yaml")

    return write


def test_the_command_line_wins_over_the_recipe_and_both_over_defaults(recipe):
    path = recipe("max_steps: 7\nlearning_rate: 1e-3\nmixed_precision: no\nisolate_documents: true\n")
    config = read_config([path, "--max_steps", "9", "--isolate_documents", "false", "--seed", "5"])
    assert (config.max_steps, config.seed, config.isolate_documents) == (9, 5, False)
    assert config.learning_rate == 1e-3  # YAML 1.1 reads 1e-3 as text
    assert config.mixed_precision == "no"  # ... and an unquoted no as false
    assert config.batch_size == 8


def test_model_config_on_the_command_line_is_laid_over_the_recipe(recipe):
    config = read_config([recipe(""), "--model_config", '{"num_hidden_layers": 3}'])
    assert config.model_config == {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3}


@pytest.mark.parametrize(
    "text, arguments, message",
    [
        (
            "leraning_rate: 0.1\n",
            [],
            "unknown key 'leraning_rate'; did you mean 'learning_rate'.*Allowed: .*model_config",
        ),
        ("", ["--max_step", "3"], "unknown key 'max_step'; did you mean 'max_steps'.*Allowed: .*model_config"),
        ("", ["stray"], "do not know what to do with 'stray'"),
        ("", ["--max_steps", "many"], "max_steps.*invalid int value: 'many'"),
        ("max_steps: 1.5\n", [], "max_steps is 1.5; it must be of type int"),
        ("max_steps: true\n", [], "max_steps is True; it must be of type int"),
        ("text_column: 3\n", [], "text_column is 3; it must be of type str"),
        ("max_steps: 0\n", [], "max_steps is 0; it must be at least 1"),
        ("held_out_fraction: 1.0\n", [], "held_out_fraction is 1.0; it must lie between 0 and 1"),
        ("mixed_precision: fp8\n", [], "mixed_precision is 'fp8'; choose one of no, bf16, fp16"),
        ("", ["--mixed_precision", "fp8"], "mixed_precision.*invalid choice: 'fp8'"),
        ("model_name_or_path: somewhere\n", [], "either model_config .* or model_name_or_path"),
        ("", ["--model_config", "{"], "model_config is not JSON"),
        ("", ["--model_config", "[1]"], "model_config must be a JSON object"),
        ("a: [\n", [], "is not YAML"),
    ],
)
def test_mistakes_are_explained_in_one_line(recipe, text, arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_config([recipe(text), *arguments])
    assert "\n" not in str(caught.value)


def test_other_ways_to_have_no_recipe(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the recipe nowhere.yaml"):
        read_config(["nowhere.yaml"])
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="must hold `field: value` lines"):
        read_config([str(tmp_path / "list.yaml")])
    with pytest.raises(ConfigError, match="model_config needs a model_type"):
        read_config(["--model_config", '{"hidden_size": 8}'])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_name_only_fields_that_exist(path):
    config = read_config([str(path)])
    assert set(yaml.safe_load(path.read_text())) <= set(vars(config))
    if config.model_config is None:  # a recipe for a checkpoint that is there
        assert config.model_name_or_path
        return
    defaults = AutoConfig.for_model(config.model_config["model_type"])
    assert [name for name in config.model_config if not hasattr(defaults, name)] == []
    assert AutoConfig.for_model(**config.model_config).hidden_size == config.model_config["hidden_size"]


@pytest.mark.parametrize("path", FINETUNING, ids=lambda path: path.stem)
def test_recipes_for_finetuning_want_a_checkpoint(path):
    with pytest.raises(ConfigError, match="give model_name_or_path"):
        read_config([str(path)], FinetuneConfig)
    config = read_config([str(path), "--model_name_or_path", "x"], FinetuneConfig)
    assert config.task == yaml.safe_load(path.read_text())["task"]


def test_there_are_recipes():
    assert {"demo", "gpu_125m", "own_text"} <= {path.stem for path in RECIPES}
    assert {path.stem for path in FINETUNING} >= {
        "chat",
        "chat_lora",
        *get_args(get_type_hints(FinetuneConfig)["task"]),
    }


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        (FinetuneConfig, ["--model_name_or_path", "x", "--task", "poetry"], "task.*invalid choice: 'poetry'"),
        (FinetuneConfig, ["--model_name_or_path", "x", "--lora_rank", "-1"], "lora_rank is -1; it must be at least 0"),
        (FinetuneConfig, ["--streaming", "true"], "unknown key 'streaming'"),
        (EvaluateConfig, [], "give model_name_or_path: the checkpoint to evaluate"),
        (PretrainConfig, ["--model_name_or_path", "x", "--decay_fraction", "1.5"], "decay_fraction is 1.5"),
        (PretrainConfig, ["--model_name_or_path", "x", "--tracker", "paper"], "tracker.*invalid choice: 'paper'"),
    ],
)
def test_each_script_has_its_own_fields(kind, arguments, message):
    with pytest.raises(ConfigError, match=message):
        read_config(arguments, kind)
