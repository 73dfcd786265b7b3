"""What a model must have before it is traced."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import nn


def install_hooks(model: nn.Module) -> None:
    """What a model of `transformers` does in its first call that captures outputs (as those of experts' routers), with
    a lock that can't be traced."""
    models: Any = sys.modules.get("transformers.modeling_utils")
    for module in model.modules() if models else ():
        if isinstance(module, models.PreTrainedModel):
            importlib.import_module("transformers.utils.output_capturing").maybe_install_capturing_hooks(module)
