"""Places of weights in layers of experts, and layers of transformers outside of its `use_experts_implementation`.

    layer of transformers' interface    gate_up_proj or up_proj, down_proj, their biases, all its own
    `Experts`                           the same
    a `Family`                          two stacked weights, of it or of modules inside; a forward by the op is here

A family's forward is compared with the class's own, on a small layer, before ranks share such layers: another version
of transformers may mean something else by the same names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .gates import GATES, Gate, halves

_ops: Any = torch.ops.cp_rewrite


@dataclass(frozen=True)
class Family:
    """One class.

    Args:
        up, down: names of the weights, (E, G, C) and (E, C, F) or with their last two dims swapped (`transposed`).
        gate: of a layer, what it runs between its products. chosen: of a layer, experts that a token has.
        forward: the class's forward, by the op.
        small: makes a layer of the class, of a few columns, and what its forward takes.
    """

    up: str
    down: str
    transposed: bool
    gate: Callable[[Any], Gate]
    chosen: Callable[[Any], Any]
    forward: Callable[..., Any]
    small: Callable[[type[nn.Module]], tuple[nn.Module, Sequence[Tensor]]]


class Place(NamedTuple):
    """A weight of a module."""

    module: nn.Module
    name: str

    @property
    def weight(self) -> nn.Parameter:
        found = self.module._parameters[self.name]
        assert found is not None, "layers of experts hold weights"
        return found


def family_of(layer: nn.Module) -> Family | None:
    """The family of a layer whose weights are where it has them."""
    family = FAMILIES.get(_known_as(type(layer)))
    found = family and [_place(layer, name) for name in (family.up, family.down)]
    return family if found and all(found) else None


def _known_as(kind: type[nn.Module]) -> str:
    """The name of a class among `FAMILIES`."""
    return f"{kind.__module__}.{kind.__name__}".removeprefix("transformers.models.")


def places(layer: Any) -> dict[str, Place]:
    """Weights of a layer of experts, by the op's names of them."""
    if family := family_of(layer):
        names = {"up": family.up, "down": family.down}
    else:
        names = {"up": "gate_up_proj" if layer.has_gate else "up_proj", "down": "down_proj"}
        names |= {f"{role}_bias": f"{name}_bias" for role, name in names.items() if layer.has_bias}
    found = {role: _place(layer, name) for role, name in names.items()}
    return {role: place for role, place in found.items() if place is not None}


def weights_of(layer: Any) -> list[nn.Parameter]:
    """Weights of the experts of a layer."""
    return [place.weight for place in places(layer).values()]


def is_transposed(layer: Any) -> bool:
    """True if rows of tokens are multiplied by weights as they lie: (E, C, G) and (E, F, C)."""
    family = family_of(layer)
    return layer.is_transposed if family is None else family.transposed


class Widths(NamedTuple):
    """E experts of a layer, and its columns: C of a token, G of the first product, F of what the gate gives."""

    experts: int
    columns: int
    first: int
    inner: int


def widths_of(layer: Any) -> Widths:
    """Of a whole layer, or of one that is cut."""
    found, turned = places(layer), is_transposed(layer)
    up, down = found["up"].weight.shape, found["down"].weight.shape
    return Widths(down[0], *((down[2], up[2], down[1]) if turned else (down[1], up[1], down[2])))


def run(layer: Any, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """(N, C): a layer's results, by its own weights or by those that ranks share. x: (N, C). chosen, weight: (N, k)."""
    found = places(layer)
    held: list[Any] = [found[role].weight if role in found else None for role in ("up", "down", "up_bias", "down_bias")]
    weights = [w.to_local() if isinstance(w, DTensor) else w for w in held]
    return _ops.experts.default(x, chosen, weight, *weights, layer.cp_gate, is_transposed(layer), layer.cp_group)[0]


def _place(layer: nn.Module, name: str) -> Place | None:
    path, _, last = name.rpartition(".")
    module: Any = layer
    for part in path.split(".") if path else ():
        module = module._modules.get(part, nn.Module())
    return Place(module, last) if module._parameters.get(last) is not None else None


@functools.cache
def means_the_same(kind: type[nn.Module]) -> bool:
    """True if layers of a class give what the forward of their family gives."""
    family = FAMILIES[_known_as(kind)]
    draw = torch.Generator().manual_seed(0)
    try:
        with torch.device("cpu"), torch.no_grad():
            layer, given = family.small(kind)
            layer.float()
            for p in layer.parameters():
                p.normal_(generator=draw)
            GATES["trial"], small = family.gate(layer), cast(Any, layer)
            small.cp_gate, small.cp_group = "trial", ""
            theirs, ours = (how(small, *given) for how in (kind.forward, family.forward))
    except Exception:  # of a class that takes or has something else
        return False
    finally:
        GATES.pop("trial", None)
    pairs = zip(*([x] if isinstance(x, Tensor) else x for x in (theirs, ours)), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def _llama4(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Of `Llama4TextMoe`, which scales what experts get and not what they give: each choice is a row of its own."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    _, logits = self.router(x)
    top, chosen = logits.topk(self.top_k, dim=1)
    scale, out = top.float().sigmoid().to(top.dtype), self.shared_expert(x)
    for i in range(self.top_k):
        one = slice(i, i + 1)
        out = out + run(self, x * scale[:, one], chosen[:, one], torch.ones_like(scale[:, one]))
    return out, logits


def _small_llama4(kind: Any) -> tuple[nn.Module, Sequence[Tensor]]:
    from transformers import Llama4TextConfig  # an optional package; the layer is of it

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
    config = Llama4TextConfig(**sizes, intermediate_size=4, num_local_experts=4, num_experts_per_tok=2)
    return kind(config), [torch.linspace(-1, 1, 40).view(5, 8)]


def _aria(self: Any, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
    return run(self, hidden_states, *self.route_tokens_to_experts(router_logits))


def _small_aria(kind: Any) -> tuple[nn.Module, Sequence[Tensor]]:
    from transformers import AriaTextConfig  # an optional package

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 4}
    config = AriaTextConfig(**sizes, moe_num_experts=4, moe_topk=2)
    return kind(config), [torch.linspace(-1, 1, 40).view(5, 8), torch.linspace(0, 50, 20).view(5, 4).sin()]


def _small_step3p7(kind: Any) -> tuple[nn.Module, Sequence[Tensor]]:
    from transformers import Step3p7TextConfig  # an optional package

    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 4}
    config = Step3p7TextConfig(**sizes, n_routed_experts=4)
    chosen = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [1, 0]])
    return kind(config, 0.5), [torch.linspace(-1, 1, 40).view(5, 8), chosen, torch.linspace(0, 1, 10).view(5, 2)]


FAMILIES: dict[str, Family] = {
    "llama4.modeling_llama4.Llama4TextMoe": Family(
        up="experts.gate_up_proj",
        down="experts.down_proj",
        transposed=True,
        gate=lambda layer: halves(layer.experts.act_fn),
        chosen=lambda layer: layer.top_k,
        forward=_llama4,
        small=_small_llama4,
    ),
    "aria.modeling_aria.AriaExperts": Family(
        up="fc1.weight",
        down="fc2.weight",
        transposed=True,
        gate=lambda layer: GATES["swiglu"],
        chosen=lambda layer: layer.config.moe_topk,
        forward=_aria,
        small=_small_aria,
    ),
    "step3p7.modeling_step3p7.Step3p7Experts": Family(
        up="gate_up_proj",
        down="down_proj",
        transposed=False,
        gate=lambda layer: layer._apply_gate,
        chosen=lambda layer: None,  # which its router knows
        forward=run,
        small=_small_step3p7,
    ),
}
"""By module in `transformers.models` and name."""
