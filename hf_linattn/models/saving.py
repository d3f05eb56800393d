"""`save_pretrained` and `push_to_hub` of every model: with `portable=True` the code travels with the weights."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import get_token
from huggingface_hub.errors import HfHubHTTPError
from transformers.utils import PushToHubMixin

from .installed import is_carried


class PortableMixin:
    """Mixed into `PreTrainedModel`, left of it."""

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, portable: bool = False, **kwargs: Any):
        """Save config, weights and generation settings, and with `portable` the code that runs them.

        A portable checkpoint loads where this package is not installed, with `AutoModel*.from_pretrained(...,
        trust_remote_code=True)`; where it is, the installed classes serve. The code is this package's own modelling
        code in PyTorch, without kernels, and the module of a feature map that a user registered. The folder is
        complete or as it was before; the same model gives the same bytes.

        Args:
            save_directory: the folder; other files in it stay.
            portable: also write the code. (Code that was itself read from a checkpoint is always written again.)
            args, kwargs: those of `PreTrainedModel.save_pretrained`, by name where `portable` is set.

        Raises:
            ValueError: a feature map whose source cannot be carried, adapters, a class that is not of this package,
                `distributed_checkpoint`; before anything is written.
            PermissionError: `push_to_hub=True` without a token that the hub accepts.
        """
        write = super().save_pretrained
        if not portable or is_carried():
            if not kwargs.get("push_to_hub"):
                return write(save_directory, *args, **kwargs)
            with _credentials(_repo_id(save_directory, kwargs), kwargs.get("token")):
                return write(save_directory, *args, **kwargs)
        if args:
            raise TypeError(f"portable=True takes the other arguments by name, got {len(args)} without one")
        # Not an import statement: a checkpoint carries the modules that those name, and this one writes checkpoints.
        portable = importlib.import_module(".portable", __package__)
        if kwargs.pop("push_to_hub", False):
            names = ("commit_message", "private", "token", "create_pr", "max_shard_size")
            repo_id = _repo_id(save_directory, kwargs)
            self.push_to_hub(repo_id, portable=True, **{name: kwargs[name] for name in names if name in kwargs})
            for name in {*names, "repo_id"} - {"max_shard_size"}:
                kwargs.pop(name, None)
        return portable.save_portable(self, save_directory, write, **kwargs)

    def push_to_hub(self, repo_id: str, *, portable: bool = False, **kwargs: Any):
        """Upload the model to a repository of the hub, created if need be; with `portable` the code as well.

        Args:
            repo_id: `"name"` or `"organization/name"`.
            portable: see `save_pretrained`.
            kwargs: those of transformers (`private`, `commit_message`, `token`, `revision`, `create_pr`, ...).

        Raises:
            PermissionError: no token, or one that the hub does not accept.
            ValueError: as `save_pretrained`, before anything is uploaded.
        """
        with _credentials(repo_id, kwargs.get("token")):
            if not portable:
                return super().push_to_hub(repo_id, **kwargs)
            tags = [*(self.model_tags or []), *(kwargs.pop("tags", None) or [])]
            return _PortableModel(self).push_to_hub(repo_id, tags=list(dict.fromkeys(tags)), **kwargs)


class _PortableModel(PushToHubMixin):
    """What transformers uploads: the files that `save_pretrained` of a model writes with its code."""

    def __init__(self, model: PortableMixin):
        self.model = model

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        self.model.save_pretrained(save_directory, portable=True, **kwargs)


def _repo_id(save_directory: str | os.PathLike, kwargs: dict[str, Any]) -> str:
    return kwargs.get("repo_id") or os.path.basename(os.path.abspath(save_directory))


@contextmanager
def _credentials(repo_id: str, token: str | bool | None) -> Iterator[None]:
    """Say in one line that there is no token, or none that serves."""
    advice = "log in with `hf auth login`, set HF_TOKEN, or pass token=..."
    if token in (None, True) and get_token() is None:
        raise PermissionError(f"pushing to {repo_id!r} needs a token of the hub: {advice}")
    try:
        yield
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403):
            raise
        raise PermissionError(
            f"the hub does not let this token push to {repo_id!r} (HTTP {error.response.status_code}): {advice}"
        ) from error


__all__ = ["PortableMixin"]
