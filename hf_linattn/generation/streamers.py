"""Streamers for generations of any length: what they keep does not grow with what they have passed on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

REPLACEMENT = "�"  # what a decoder writes for bytes that are not (yet) a character
LONGEST_CHARACTER = 8  # tokens to wait for the rest of one


class CallbackStreamer(BaseStreamer):
    """Calls a function with every step, so that scores need not be kept for all of them.

    `generate(..., streamer=CallbackStreamer(f))` calls `f(tokens, scores)` after each step with the tokens [B] on the
    CPU and the processed scores [B, V] from which they were chosen, on the model's device.

    Args:
        callback: the function. An exception in it ends the generation and reaches the caller.
    """

    def __init__(self, callback: Callable[[Tensor, Tensor], None]):
        self.callback = callback
        self.has_prompt = False

    def put(self, value: Tensor) -> None:
        """Takes the prompt, which is not passed on.

        Raises:
            ValueError: for more than a prompt, which comes from a loop that has no scores to hand over.
        """
        if self.has_prompt:
            raise ValueError(
                "CallbackStreamer needs the scores of each step, which only sampling and greedy search with a cache "
                "hand over"
            )
        self.has_prompt = True

    def put_step(self, tokens: Tensor, scores: Tensor) -> None:
        self.callback(tokens.cpu(), scores)

    def end(self) -> None:
        """Ready for another generation."""
        self.has_prompt = False


class FileStreamer(BaseStreamer):
    """Writes a generation to a file while it goes on: as text, or one line of token ids a step.

    Args:
        path: the file, replaced if it is there; or an open text file, such as `sys.stdout`.
        tokenizer: turns tokens into text (one row only). Without it each step is a line of B ids with tabs between.
        skip_special_tokens: leave out end-of-sequence tokens and the like from the text.

    Raises:
        ValueError: text of more than one row.
    """

    def __init__(
        self,
        path: str | os.PathLike | TextIO,
        tokenizer: PreTrainedTokenizerBase | None = None,
        skip_special_tokens: bool = True,
    ):
        self.path = path
        self.is_open_file = hasattr(path, "write")
        self.file: TextIO | None = path if self.is_open_file else None
        self.decoder = None if tokenizer is None else IncrementalDecoder(tokenizer, skip_special_tokens)
        self.has_prompt = False

    def put(self, value: Tensor) -> None:
        """Write a step [B], or several of one row [1, t] as assisted decoding yields them; the prompt comes first."""
        if not self.has_prompt:
            if self.decoder is not None and len(value) > 1:
                raise ValueError(f"FileStreamer writes the text of one row, the batch has {len(value)}")
            if self.file is None:
                self.file = Path(self.path).open("w", encoding="utf-8")
            self.has_prompt = True
            return
        for tokens in value.reshape(-1, 1).tolist() if value.dim() == 2 else [value.tolist()]:
            if self.decoder is None:
                self.file.write("\t".join(map(str, tokens)) + "\n")
            else:
                self._write(self.decoder.put(tokens[0]))

    def end(self) -> None:
        """Write what was held back, and close the file if it was opened here."""
        if self.file is None:
            return
        self.has_prompt = False
        if self.decoder is not None:
            self._write(self.decoder.flush())
        if self.is_open_file:
            self.file.flush()
        else:
            self.file.close()
            self.file = None

    def _write(self, text: str) -> None:
        if text:
            self.file.write(text)
            if self.is_open_file:
                self.file.flush()


class IncrementalDecoder:
    """Token ids to text as they come, from a window of the last few tokens.

    A token is decoded together with those before it, since a tokenizer may join them; a character whose bytes are
    not complete is held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.window: list[int] = []
        self.read = 0  # tokens of the window whose text was given out

    def put(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        self.window.append(token)
        before, text = self._decode(self.window[: self.read]), self._decode(self.window)
        waiting = len(self.window) - self.read
        if text.endswith(REPLACEMENT) and waiting < LONGEST_CHARACTER:
            return ""
        if len(text) > len(before) or len(self.window) > 2 * LONGEST_CHARACTER:
            self.window = self.window[self.read :]  # else the text before still matters: these tokens have none
        self.read = len(self.window)
        return text[len(before) :]

    def flush(self) -> str:
        """The text of what was held back."""
        text = self._decode(self.window)[len(self._decode(self.window[: self.read])) :]
        self.window, self.read = [], 0
        return text

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(
            tokens, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )
