"""What a step of `generate()` is called with, for whoever reads it under an older name."""

from __future__ import annotations

from typing import Any

_NEW_NAMES = {"past_key_values": "cache"}


class ModelInputs(dict):
    """Arguments of the model by name, in which the cache can also be read and replaced as `past_key_values`.

    peft wraps `prepare_inputs_for_generation` and looks there for the cache, up to 0.21 by the name it had before
    transformers 5. Without it a soft prompt is put before every token, and a prefix that no state can hold is dropped
    without a word. As keyword arguments (`**inputs`) there is one cache, under its own name.
    """

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(_NEW_NAMES.get(name, name))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(_NEW_NAMES.get(name, name), value)

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(_NEW_NAMES.get(name, name), default)
