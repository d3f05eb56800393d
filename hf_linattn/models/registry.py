"""Which class stands behind which Auto class, and the registration of all of them with transformers."""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForDecision,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    configuration_utils,
)
from transformers.models.auto import modeling_auto

from ..cache import STATE_LAYER_TYPES
from .linattn import (
    LinAttnConfig,
    LinAttnForCausalLM,
    LinAttnForQuestionAnswering,
    LinAttnForSequenceClassification,
    LinAttnForTokenClassification,
    LinAttnModel,
)

# Auto class, model class, and the table of class names in which Trainer and pipelines look models up
HEADS = (
    (AutoModel, LinAttnModel, "MODEL_MAPPING_NAMES"),
    (AutoModelForCausalLM, LinAttnForCausalLM, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    (
        AutoModelForSequenceClassification,
        LinAttnForSequenceClassification,
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    (
        AutoModelForTokenClassification,
        LinAttnForTokenClassification,
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    ),
    (AutoModelForQuestionAnswering, LinAttnForQuestionAnswering, "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
)


def register() -> None:
    """Make the Auto classes, Trainer and pipelines know these models; harmless when repeated."""
    AutoConfig.register(LinAttnConfig.model_type, LinAttnConfig, exist_ok=True)
    # `transformers serve` loads through this class first; a model it does not hold is looked up by its name in the
    # transformers package, where no plugin's class is. For decisions it is the right one: they read a causal model.
    AutoModelForDecision.register(LinAttnConfig, LinAttnForCausalLM, exist_ok=True)
    register_models()


def register_models() -> None:
    """The part that leaves other copies of this code alone, which checkpoints may carry: no model type is taken."""
    for auto_class, model_class, table in HEADS:
        auto_class.register(model_class.config_class, model_class, exist_ok=True)
        getattr(modeling_auto, table)[model_class.config_class.model_type] = model_class.__name__
    # Trainer reads the config of the checkpoint it resumes from with the base class, which knows layers by this table.
    for layer_type in STATE_LAYER_TYPES:
        if layer_type not in configuration_utils.ALLOWED_ATTN_LAYER_TYPES:
            configuration_utils.ALLOWED_ATTN_LAYER_TYPES += (layer_type,)


def auto_map(config_class: type[PreTrainedConfig]) -> dict[str, str]:
    """`auto_map` of a config.json beside which the code lies: the file and class behind every Auto class.

    One file for all: transformers reads a folder anew for every file that it is sent to, and a configuration from
    another reading is of another class.
    """
    heads = {auto.__name__: head.__name__ for auto, head, _ in HEADS if head.config_class is config_class}
    classes = {"AutoConfig": config_class.__name__, **heads}
    return {auto: f"modeling_{config_class.model_type}.{name}" for auto, name in classes.items()}


__all__ = ["HEADS", "auto_map", "register", "register_models"]
