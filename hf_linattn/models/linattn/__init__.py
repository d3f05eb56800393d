"""The linear attention decoder."""

from .configuration_linattn import LinAttnConfig
from .heads import LinAttnForQuestionAnswering, LinAttnForSequenceClassification, LinAttnForTokenClassification
from .modeling_linattn import LinAttnForCausalLM, LinAttnModel, LinAttnPreTrainedModel
from .parallel import parallelize

__all__ = [
    "LinAttnConfig",
    "LinAttnForCausalLM",
    "LinAttnForQuestionAnswering",
    "LinAttnForSequenceClassification",
    "LinAttnForTokenClassification",
    "LinAttnModel",
    "LinAttnPreTrainedModel",
    "parallelize",
]
