"""The linear attention decoder."""

from .configuration_linattn import LinAttnConfig
from .modeling_linattn import (
    LinAttnForCausalLM,
    LinAttnForQuestionAnswering,
    LinAttnForSequenceClassification,
    LinAttnForTokenClassification,
    LinAttnModel,
    LinAttnPreTrainedModel,
)

__all__ = [
    "LinAttnConfig",
    "LinAttnForCausalLM",
    "LinAttnForQuestionAnswering",
    "LinAttnForSequenceClassification",
    "LinAttnForTokenClassification",
    "LinAttnModel",
    "LinAttnPreTrainedModel",
]
