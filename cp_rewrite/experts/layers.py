"""Layers of experts whose weights ranks share: found, checked, cut, and where FSDP shards the rest.

    mesh of 8 ranks, experts=4: E experts in ep groups of 4 consecutive ranks

    rank          0     1     2     3     4     5     6     7
    its experts   0/4   1/4   2/4   3/4   0/4   1/4   2/4   3/4      DTensor Shard(0) over "ep"
    FSDP shards these over ranks 0 4, 1 5, 2 6, 3 7                  "efsdp"

Where all ranks of the mesh share one set, FSDP leaves these weights alone: nothing is left to gather. An owner's
gradient is a sum over the tokens of its ep group already.

Layers are those of transformers that go through its `use_experts_implementation` or are of a `Family`, and `Experts`
below. A layer gets a class of its own, whose forward runs the op `cp_rewrite::experts`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_rewrite.refusal import ADAPTED_PARAMETER
from cp_rewrite.torch_internals import cut_in_groups, sharded_over, shards_over_some

from .dispatch import join_group
from .families import Family, family_of, means_the_same, places, run, weights_of, widths_of
from .gates import GATES, Gate

_NUMBERS = (bool, int, float, str, type(None))
OWNED = "_cp_rewrite_owned"
"""Attribute of a stand-in of a weight that ranks share: its `SharedWeight`."""


@dataclass(frozen=True)
class SharedWeight:
    """group: its name in graphs. shape, dtype: of a rank's part, as the op gets it."""

    group: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Experts(nn.Module):
    """Experts of a mixture for models that are not transformers': E pairs of matrices with a gate between.

        layer = cp.Experts(num_experts=8, hidden_size=512, intermediate_size=256)
        y = layer(x, chosen, weight)     # x (N, C), chosen and weight (N, k) of a router -> (N, C)

    Each token gets the sum over its choices of weight · down(gate(up(x))). `cp.parallelize(…, experts=n)` lets n ranks
    share the experts. Weights are made without values: initialize them, or load them.

    Args:
        num_experts, hidden_size, intermediate_size: E, C and F.
        gate: `swiglu` or `geglu`, which multiply silu or gelu of the first half of 2 F columns by the second; or
            `silu`, `gelu`, `relu`, `relu2` of F columns.
        bias: both products add one. device, dtype: of the weights.
    Raises:
        ValueError: another gate.
    """

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, gate: str = "swiglu", *, bias: bool = False,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if gate not in ("swiglu", "geglu", "silu", "gelu", "relu", "relu2"):
            raise ValueError(f"gate must be one of swiglu, geglu, silu, gelu, relu, relu2; got {gate!r}")
        self.num_experts, self.has_gate, self.has_bias, self.is_transposed = (
            num_experts,
            gate.endswith("glu"),
            bias,
            False,
        )
        self.cp_gate, self.cp_group = gate, ""
        columns = intermediate_size * (2 if self.has_gate else 1)
        up = "gate_up_proj" if self.has_gate else "up_proj"
        shapes = {up: (columns, hidden_size), "down_proj": (hidden_size, intermediate_size)}
        if bias:
            shapes |= {f"{up}_bias": (columns,), "down_proj_bias": (hidden_size,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype)))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(N, C). hidden_states: (N, C). top_k_index: (N, k), of 0 … E - 1. top_k_weights: (N, k)."""
        return run(self, hidden_states, top_k_index, top_k_weights)


@functools.cache
def _shared(kind: type[nn.Module], family: Family | None) -> type[nn.Module]:
    """A class of layers with the forward of `run`, or of their family."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return run(self, hidden_states, top_k_index, top_k_weights)

    found = forward if family is None else family.forward
    return type(kind.__name__, (kind,), {"forward": found, "__module__": kind.__module__})


class SharedExperts:
    """Layers of experts of a model that are shared over groups of `size` consecutive ranks of a mesh.

    `begin` changes the layers' forwards, `cut` their weights, once stand-ins of whole ones were made, which are traced.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, size: int) -> None:
        """`mesh`: of one dim. `size`: more than one, of which `check_size` knows nothing bad.

        Raises:
            ValueError: what stands against it, in the model and in this torch, before anything is changed.
        """
        self.layers = layers_to_share(model, mesh.size(), size)
        self.size, self.mesh = size, mesh
        self.whole = size == mesh.size()
        """All ranks share one set: FSDP has nothing to do."""

    def begin(self) -> None:
        """Let the layers run the op."""
        self.rest, self.ep = (None, self.mesh) if self.whole else cut_in_groups(self.mesh, self.size)
        self.name = join_group(self.mesh.mesh.tolist(), self.ep.get_group(), self.size)
        for layer in self.layers:
            layer.cp_gate, layer.cp_group = _gate_of(layer), self.name
            layer.__class__ = _shared(type(layer), family_of(layer))

    def weights(self) -> list[nn.Parameter]:
        """All of them, in the order of layers."""
        return [p for layer in self.layers for p in weights_of(layer)]

    def cut(self, stand_ins: Iterable[tuple[Tensor, nn.Module, str]], device: torch.device, divide_by: float) -> None:
        """Leave each rank its own experts, as a DTensor over the ep group.

        Args:
            stand_ins: of the model's weights, each with the module that holds the weight and its name there: those of
                shared ones are marked as such.
            device: where weights go. divide_by: what sums of gradients are divided by, where FSDP does not.
        """
        owned = {*self.weights()}
        for x, module, name in stand_ins:
            weight = module._parameters[name]
            if weight is not None and weight in owned:
                dtype = weight.dtype if self.whole else x.dtype  # which FSDP casts to
                setattr(x, OWNED, SharedWeight(self.name, (x.shape[0] // self.size, *x.shape[1:]), dtype))
        rank, made = self.ep.get_local_rank(), dict[int, nn.Parameter]()  # of tied weights one
        for layer in self.layers:
            for place in places(layer).values():
                holder: Any = place.module
                holder.cp_divide_by, p = divide_by if self.whole else 1.0, place.weight
                if id(p) not in made:
                    own = p.detach().chunk(self.size, 0)[rank]
                    own = own.clone() if own.is_meta else own.to(device, copy=True)
                    part = DTensor.from_local(own, self.ep, [Shard(0)], run_check=False)
                    made[id(p)] = nn.Parameter(part, requires_grad=p.requires_grad)
                holder._parameters[place.name] = made[id(p)]

    def placement(self) -> dict[str, Any]:
        """Arguments of `fully_shard`: weights that it leaves alone, or over which ranks it shards them."""
        owned, rest = {*self.weights()}, self.rest
        if rest is None:
            return {"ignored_params": owned}
        over = sharded_over(rest)
        return {"shard_placement_fn": lambda p: over(_even_dim(p, rest.size())) if p in owned else None}


def layers_to_share(model: nn.Module, ranks: int, size: int) -> list[Any]:
    """The layers of experts of a model that are sharded over `ranks`, for groups of `size` to share.

    Raises:
        ValueError: what stands against it, in the model and in this torch.
    """
    if size < ranks and not shards_over_some():
        raise ValueError(
            f"experts={size} of {ranks} ranks needs FSDP that shards weights over some ranks of its mesh, "
            f"which torch {torch.__version__} lacks (2.13 has it): share over all, experts={ranks}"
        )
    names = {module: name for name, module in model.named_modules() if is_layer_of_experts(module)}
    if not names:
        raise ValueError(f"experts={size}: {_none_found(model)}")
    adapted: list[Any] = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    if any(wrapper.get_base_layer() in names for wrapper in adapted):
        raise ValueError(f"experts={size}: {ADAPTED_PARAMETER}")
    for layer, name in names.items():
        _check_layer(layer, name, size)
        held = {*weights_of(layer)}
        for key, p in layer.named_parameters():
            if p in held and size < ranks and _even_dim(p, ranks // size, size) is None:
                raise ValueError(
                    f"experts={size}: FSDP can't cut {name}.{key} of {tuple(p.shape)} over the {ranks // size} ranks "
                    "that have the same experts: share them by more ranks"
                )
    return [*names]


def _even_dim(weight: Tensor, ranks: int, parts: int = 1) -> Any:
    """The first dim of a weight, cut into `parts` in dim 0, that `ranks` ranks cut evenly; None: there is none."""
    shape = (weight.shape[0] // parts, *weight.shape[1:])
    own = weight.to_local().shape if isinstance(weight, DTensor) else shape
    return next((dim for dim, size in enumerate(own) if size % ranks == 0), None)


def local_weight(module: Any, weight: Tensor) -> Tensor:
    """The weight that a rank computes with: its own part of a shared one, whose gradient is divided as FSDP would."""
    if not isinstance(weight, DTensor):
        return weight
    own = weight.to_local()
    by = getattr(module, "cp_divide_by", 1.0)
    return own if by == 1.0 else cast(Tensor, _Divided.apply(own, by))


class _Divided(torch.autograd.Function):
    """The identity, whose gradient is divided by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:  # type: ignore[override]
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad / ctx.by, None


def check_size(size: Any, ranks: int, offload: Collection[str] = ()) -> None:
    """Raise a TypeError or a ValueError where `size` of `ranks` ranks can't share experts, whatever the model and the
    machine; "auto" can. offload: what lies on the host."""
    if size == "auto":
        return
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"experts must be how many ranks share one set of experts, an int, or 'auto'; got {size!r}")
    if size < 1 or ranks % size:
        raise ValueError(f"experts={size} must divide the {ranks} ranks that weights are sharded over")
    if size > 1 and "weights" in offload:
        raise ValueError("experts that ranks share stay on their device: leave 'weights' out of offload")


def is_layer_of_experts(module: Any) -> bool:
    """True if a module is a layer of experts that ranks can share: of transformers, or an `Experts`."""
    of_interface = ("is_transposed", "has_gate", "has_bias", "num_experts", "down_proj")
    return all(hasattr(module, name) for name in of_interface) or family_of(module) is not None


def _none_found(model: nn.Module) -> str:
    """The reason why a model has no layers that are known."""
    kinds = {type(m).__name__ for m in model.modules() if "expert" in type(m).__name__.lower()}
    held = {type(m).__name__ for m in model.modules() for name, _ in m.named_children() if "expert" in name.lower()}
    found = ", ".join(sorted(kinds or held))
    how = "none of its layers goes through transformers' use_experts_implementation, and none is a cp.Experts"
    return f"{how}: {f'{found} hold experts in a way of their own; ' if found else ''}write them as cp.Experts"


def _check_layer(layer: Any, name: str, size: int) -> None:
    """Raise a ValueError where a layer is not what `run` takes it for."""
    family = family_of(layer)
    experts = layer.num_experts if family is None else widths_of(layer).experts
    if experts % size:
        raise ValueError(f"experts={size}: {name} has {experts} experts, which {size} ranks do not share evenly")
    if family is None:
        up = "gate_up_proj" if layer.has_gate else "up_proj"
        known = [up, "down_proj", *([f"{up}_bias", "down_proj_bias"] if layer.has_bias else [])]
        holders = [layer]
    else:
        known, holders = [family.up, family.down], [place.module for place in places(layer).values()]
    all_of = {key: p for key, p in layer.named_parameters(remove_duplicate=False)}
    inside = {p for module in holders for p in module.parameters()}
    held = {key: p for key, p in all_of.items() if p in inside}
    if {*held} != {*known} or any(p.shape[0] != experts for p in held.values()):
        shapes = ", ".join(f"{key} {tuple(p.shape)}" for key, p in held.items())
        raise ValueError(
            f"experts={size}: {name} must hold {', '.join(known)} of its {experts} experts, and nothing else "
            f"(adapters, quantized weights, a gate with weights); it holds {shapes or 'nothing'}"
        )
    others = [value for module in holders for value in (*module.buffers(), *vars(module).values())]
    if any(isinstance(x, Tensor) for x in others) or any("forward" in vars(module) for module in (layer, *holders)):
        raise ValueError(
            f"experts={size}: {name} has buffers or other tensors beside its weights, or a forward of its own, which "
            "no rank would use"
        )
    if isinstance(layer, Experts) or (means_the_same(type(layer)) if family else _agrees(layer)):
        return
    theirs = "the class of its name that is known" if family else "transformers' batched_mm_experts_forward"
    raise ValueError(
        f"experts={size}: {name}, a {type(layer).__name__}, gives other numbers than {theirs}, whose meaning ranks "
        "share: write it as cp.Experts"
    )


def _gate_of(layer: Any) -> str:
    """The name of what a layer runs between its products, with the numbers that it reads: equal for equal ones."""
    if isinstance(layer, Experts):
        return layer.cp_gate
    numbers = {k: v for k, v in vars(layer).items() if k[0] != "_" and k != "training" and isinstance(v, _NUMBERS)}
    config: Any = getattr(layer, "config", None)  # a gate may read it, too
    told = numbers, config and sorted(config.to_dict().items()), str(layer) if family_of(layer) else ""
    known = hashlib.sha1(repr(told).encode()).hexdigest()
    name = f"{type(layer).__module__}.{type(layer).__qualname__} {known[:16]}"
    GATES.setdefault(name, _gate(layer))
    return name


def _gate(layer: Any) -> Gate:
    """It alone, which holds no weights."""
    if family := family_of(layer):
        return family.gate(layer)
    bare = _bare(layer)
    return bare._apply_gate if bare.has_gate else bare.act_fn


def _bare(layer: Any, **weights: nn.Parameter) -> Any:
    """A copy of a layer with other weights."""
    bare = copy.copy(layer)
    bare._parameters, bare._forward_hooks, bare._forward_pre_hooks = dict(weights), {}, {}
    return bare


@torch.no_grad()
def _agrees(layer: Any) -> bool:
    """True if a layer gives, with small weights, what the op gives of them, and its gate treats each row alone."""
    from transformers.integrations.moe import batched_mm_experts_forward  # an optional package; the layer is of it

    draw = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Any:
        return nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu"))

    C, F, up = 6, 4, "gate_up_proj" if layer.has_gate else "up_proj"
    G = 2 * F if layer.has_gate else F
    shapes = {up: (C, G) if layer.is_transposed else (G, C), "down_proj": (F, C) if layer.is_transposed else (C, F)}
    if layer.has_bias:
        shapes |= {f"{up}_bias": (G,), "down_proj_bias": (C,)}
    weights = {name: made(4, *shape) for name, shape in shapes.items()}
    bare, gate = _bare(layer, **weights), _gate(layer)
    bare.num_experts, bare.cp_group, bare.cp_gate = 4, "", "trial"
    x, chosen, weight = made(5, C), torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [1, 0]], device="cpu"), made(5, 2)
    rows = made(5, G)
    try:
        GATES["trial"] = gate
        theirs, ours = batched_mm_experts_forward(bare, x, chosen, weight), run(bare, x, chosen, weight)
        alone, before = torch.cat([gate(row[None]) for row in rows]), rows.clone()
        by_rows = torch.allclose(gate(rows), alone) and torch.equal(rows, before)  # which the backward reads
        return by_rows and torch.allclose(theirs, ours, rtol=1e-4, atol=1e-5)
    finally:
        del GATES["trial"]
