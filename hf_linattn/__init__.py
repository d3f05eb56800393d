"""Linear attention for Hugging Face transformers: importing this package registers its models."""

from .cache import LinearAttentionCache
from .conversion import linearize
from .generation import CallbackStreamer, ContinuousBatch, FileStreamer
from .models import (
    LinAttnConfig,
    LinAttnForCausalLM,
    LinAttnForQuestionAnswering,
    LinAttnForSequenceClassification,
    LinAttnForTokenClassification,
    LinAttnModel,
    LinAttnPreTrainedModel,
    parallelize,
    register,
)
from .ops import (
    FEATURE_MAPS,
    FeatureMap,
    LinearAttentionState,
    linear_attention,
    make_feature_map,
    register_feature_map,
)

register()

__version__ = "0.1.0"

__all__ = [
    "FEATURE_MAPS",
    "CallbackStreamer",
    "ContinuousBatch",
    "FeatureMap",
    "FileStreamer",
    "LinAttnConfig",
    "LinAttnForCausalLM",
    "LinAttnForQuestionAnswering",
    "LinAttnForSequenceClassification",
    "LinAttnForTokenClassification",
    "LinAttnModel",
    "LinAttnPreTrainedModel",
    "LinearAttentionCache",
    "LinearAttentionState",
    "linear_attention",
    "linearize",
    "make_feature_map",
    "parallelize",
    "register_feature_map",
]
