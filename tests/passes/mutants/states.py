"""State that outlives a step, and code that the graph does not show: buffers, hooks, own backwards, transforms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.packed_model import VOCAB, WIDTH, PackedModel
from tests.helpers.versions import OLD


class BufferTimesSum(PackedModel):
    reason, line = "TOKEN_MIXING", "self.scale.mul_"

    def extra(self) -> None:
        self.register_buffer("scale", torch.ones(()))

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        loss = super().loss(logits, labels, num_items)
        self.scale.mul_(loss.detach())
        return loss


class CountsInView(PackedModel):
    """Nothing in the graph reads what is written through a view of the buffer; the next step does."""

    reason, line = "TOKEN_MIXING", "add_(load)"

    def extra(self) -> None:
        self.register_buffer("counts", torch.zeros(3, 4))

    def mix(self, h: Tensor) -> Tensor:
        load = F.one_hot(h[..., :4].argmax(-1), 4).sum((0, 1)).float()
        self.counts[1].add_(load)
        return h


class CountsTimesInView(CountsInView):
    reason, line = "TOKEN_MIXING", "mul_(load)"

    def mix(self, h: Tensor) -> Tensor:
        load = F.one_hot(h[..., :4].argmax(-1), 4).sum((0, 1)).float()
        self.counts.view(-1)[4:8].mul_(load)
        return h


class MarkedIds(PackedModel):
    reason, line = "TOKEN_MIXING", "self.seen.data"

    def extra(self) -> None:
        self.register_buffer("seen", torch.zeros(VOCAB))

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.seen.data[input_ids.flatten()] = 1.0
        return self.embed(input_ids)


class RunningMean(PackedModel):
    reason, line = "TOKEN_MIXING", "lerp_"

    def extra(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        self.mean.lerp_(h.detach().mean((0, 1)), 0.1)
        return h - self.mean


class HistoryOfMaxima(PackedModel):
    reason, line = "TOKEN_MIXING", "amax()"

    def extra(self) -> None:
        self.register_buffer("history", torch.ones(4))

    def mix(self, h: Tensor) -> Tensor:
        self.history[0] = h.detach().abs().amax()
        return h / self.history.max()


class BiasOfExperts(CountsInView):
    reason, line = "TOKEN_MIXING", "load.mean()"

    def mix(self, h: Tensor) -> Tensor:
        load = F.one_hot((h[..., :4] + self.counts[0]).argmax(-1), 4).sum((0, 1)).float()
        self.counts[0] += 0.01 * torch.sign(load.mean() - load)
        return h


@torch.compiler.nested_compile_region
def scaled(h: Tensor, counts: Tensor) -> Tensor:
    counts.mul_(F.one_hot(h[..., :4].argmax(-1), 4).sum((0, 1)))
    return h * 2


class BufferInRegion(CountsInView):
    reason, line = "TOKEN_MIXING", "counts.mul_"

    def mix(self, h: Tensor) -> Tensor:
        return scaled(h, self.counts)


class _Centered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] - grads[0].mean(1, keepdim=True)


@torch._dynamo.allow_in_graph
def centered(x: Tensor) -> Any:
    return _Centered.apply(x)


library = torch.library.Library("mutants_states", "DEF")
library.define("centered(Tensor x) -> Tensor")
library.impl("centered", _Centered.apply, "CompositeImplicitAutograd")


class OwnBackward(PackedModel):
    reason, line = "TOKEN_MIXING", "grads[0].mean"

    def mix(self, h: Tensor) -> Any:
        return _Centered.apply(h)


class OwnBackwardOfFunction(PackedModel):
    reason, line = "NO_LOCALITY_RULE", "centered(h)"

    def mix(self, h: Tensor) -> Any:
        return centered(h)


class OwnBackwardOfOp(PackedModel):
    reason, line = "NO_LOCALITY_RULE", "mutants_states.centered"

    def mix(self, h: Tensor) -> Tensor:
        return torch.ops.mutants_states.centered(h)


class HookOnGradient(PackedModel):
    reason, line = "TOKEN_MIXING" if OLD else "NO_LOCALITY_RULE", "h.register_hook"

    def mix(self, h: Tensor) -> Tensor:
        h.register_hook(lambda grad: grad - grad.mean(1, keepdim=True))
        return h * 2


class HookOnOutput(PackedModel):
    reason, line = "TOKEN_MIXING", "output.mean"

    def extra(self) -> None:
        self.out.register_forward_hook(lambda module, args, output: output - output.mean(1, keepdim=True))


class MappedOverRows(PackedModel):
    reason, line, rows = "NO_LOCALITY_RULE", "torch.vmap", 2

    def mix(self, h: Tensor) -> Tensor:
        return torch.vmap(lambda row: row - row.mean(0))(h)


class GradientOfSum(PackedModel):
    reason, line = "NO_LOCALITY_RULE", "torch.func.grad"

    def mix(self, h: Tensor) -> Tensor:
        return h + torch.func.grad(lambda x: x.cumsum(1).square().sum())(h)


class BranchOnSum(PackedModel):
    reason, line = "TOKEN_MIXING", "torch.cond"

    def mix(self, h: Tensor) -> Any:
        return torch.cond(h.sum() > 0, lambda x: x * 2, lambda x: x * 3, (h,))


class StridedLikeAnother(PackedModel):
    """The same call on a tensor of the same shape, but of other strides, takes other entries."""

    reason, line = "NO_LOCALITY_RULE", "turned.as_strided"

    def mix(self, h: Tensor) -> Tensor:
        strides = (h.shape[1] * WIDTH, WIDTH, 1)
        plain, turned = h * 1, (h * 1).mT.contiguous().mT
        y = plain.as_strided(plain.shape, strides)
        return y + turned.as_strided(turned.shape, strides)
