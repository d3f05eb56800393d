"""Models, and their registration with transformers' Auto classes."""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForDecision,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    configuration_utils,
)
from transformers.models.auto import modeling_auto

from ..cache import LINEAR_LAYER_TYPE
from .linattn import (
    LinAttnConfig,
    LinAttnForCausalLM,
    LinAttnForQuestionAnswering,
    LinAttnForSequenceClassification,
    LinAttnForTokenClassification,
    LinAttnModel,
    LinAttnPreTrainedModel,
    parallelize,
)

# Auto class, model class, and the table of class names in which Trainer and pipelines look models up
_HEADS = (
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
    for auto_class, model_class, names in _HEADS:
        auto_class.register(LinAttnConfig, model_class, exist_ok=True)
        getattr(modeling_auto, names)[LinAttnConfig.model_type] = model_class.__name__
    # Trainer reads the config of the checkpoint it resumes from with the base class, which knows layers by this table.
    if LINEAR_LAYER_TYPE not in configuration_utils.ALLOWED_ATTN_LAYER_TYPES:
        configuration_utils.ALLOWED_ATTN_LAYER_TYPES += (LINEAR_LAYER_TYPE,)
    # `transformers serve` loads through this class first; a model it does not hold is looked up by its name in the
    # transformers package, where no plugin's class is. For decisions it is the right one: they read a causal model.
    AutoModelForDecision.register(LinAttnConfig, LinAttnForCausalLM, exist_ok=True)


__all__ = [
    "LinAttnConfig",
    "LinAttnForCausalLM",
    "LinAttnForQuestionAnswering",
    "LinAttnForSequenceClassification",
    "LinAttnForTokenClassification",
    "LinAttnModel",
    "LinAttnPreTrainedModel",
    "parallelize",
    "register",
]
