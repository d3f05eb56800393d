"""The decoder with a head that classifies sequences, tokens or spans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutputWithPast, TokenClassifierOutput
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg

from .modeling_linattn import LinAttnPreTrainedModel


class LinAttnForSequenceClassification(GenericForSequenceClassification, LinAttnPreTrainedModel):
    """The decoder with a classification head on the last real token of each row."""

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Class logits [B, num_labels], and the loss where `labels` are given.

        With an `attention_mask` the last token is the last one it marks as real. `num_items_in_batch` divides the
        summed loss by that number instead of the labels of this batch, for gradients that are accumulated.
        """
        inputs = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "cache": cache,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            **kwargs,
        }
        if attention_mask is None:
            outputs = super().forward(**inputs, return_dict=True)
        else:
            outputs = self._pooled(attention_mask, self.model(attention_mask=attention_mask, **inputs))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=outputs.logits,
                labels=labels,
                pooled_logits=outputs.logits,
                config=self.config,
                num_items_in_batch=num_items_in_batch,
            )
            # which only cross entropy heeds: the others are means over the labels of this batch
            if num_items_in_batch is not None and self.config.problem_type != "single_label_classification":
                loss = loss * labels.numel() / num_items_in_batch
        return SequenceClassifierOutputWithPast(loss=loss, **outputs)

    def _pooled(self, attention_mask: Tensor, outputs: Any) -> SequenceClassifierOutputWithPast:
        hidden_states = outputs.last_hidden_state
        batch, length = hidden_states.shape[:2]
        places = torch.arange(length, device=hidden_states.device)
        last = (attention_mask[:, -length:].to(hidden_states.device).long() * places).argmax(-1)
        return SequenceClassifierOutputWithPast(
            logits=self.score(hidden_states[torch.arange(batch, device=last.device), last]),
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class LinAttnForTokenClassification(GenericForTokenClassification, LinAttnPreTrainedModel):
    """The decoder with a classification head on every token."""

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Class logits [B, T, num_labels], and the loss where `labels` [B, T] are given (-100 is ignored).

        `num_items_in_batch` divides the summed loss by that number instead of the labels of this batch.
        """
        outputs = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        loss = None
        if labels is not None:
            loss = self.loss_function(outputs.logits, labels, self.config, num_items_in_batch=num_items_in_batch)
        return TokenClassifierOutput(loss=loss, **outputs)


class LinAttnForQuestionAnswering(GenericForQuestionAnswering, LinAttnPreTrainedModel):
    """The decoder with a span head: start and end logits."""


__all__ = ["LinAttnForQuestionAnswering", "LinAttnForSequenceClassification", "LinAttnForTokenClassification"]
