"""Models, and their registration with transformers' Auto classes."""

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
from .registry import register

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
