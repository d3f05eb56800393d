"""What the tests of portable checkpoints share."""

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from hf_linattn import (
    LinAttnForCausalLM,
    LinAttnForQuestionAnswering,
    LinAttnForSequenceClassification,
    LinAttnForTokenClassification,
    LinAttnModel,
)

HEADS = {
    AutoModel: LinAttnModel,
    AutoModelForCausalLM: LinAttnForCausalLM,
    AutoModelForSequenceClassification: LinAttnForSequenceClassification,
    AutoModelForTokenClassification: LinAttnForTokenClassification,
    AutoModelForQuestionAnswering: LinAttnForQuestionAnswering,
}
ENTRY = "modeling_linattn"

CUBE = '''\
"""A map of a user."""

import math

from torch import Tensor

from hf_linattn import (
    FeatureMap,
    register_feature_map,
)
from hf_linattn.ops.feature_maps import Hedgehog as Base


@register_feature_map("{name}")
class Cube(FeatureMap):
    base = Base
    is_nonnegative = False

    def forward(self, x: Tensor) -> Tensor:
        from hf_linattn.ops import FEATURE_MAPS

        return math.pi * x**3 if "{name}" in FEATURE_MAPS else x
'''


def files_in(path):
    return {item.name: item.read_bytes() for item in path.iterdir()}


def code_in(path):
    return {item.stem: item.read_text() for item in path.glob("*.py")}
