"""Hooks by which `transformers`, PEFT and TRL give reentrant checkpoints of frozen models gradients."""

from __future__ import annotations

from torch import nn

_CHECKPOINT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
"""What `transformers`, PEFT and TRL call them. Reentrant checkpoints of frozen models have no gradients without."""


def drop_checkpoint_hooks(model: nn.Module) -> None:
    """Take hooks of checkpoints out, and let no more come. Each time that checkpointing is switched on, as TRL does in
    every step, one is added: a graph is guarded by how many there are, and can't hold one on frozen embeddings."""
    for module in model.modules():
        for number, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "") in _CHECKPOINT_HOOKS:
                del module._forward_hooks[number]
        if hasattr(module, "enable_input_require_grads"):
            module.enable_input_require_grads = _nothing  # type: ignore[assignment]


def _nothing() -> None:
    return None
