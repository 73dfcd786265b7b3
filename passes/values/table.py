"""A buffer of a module that holds a number for each pair of places: where a causal model keeps its triangle."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn

from cp_rewrite.masks import MaskMismatch


@dataclass(frozen=True)
class Table:
    """A buffer (…, N, N) whose entry [..., i, j] is `inside` where low <= i - j <= high, else `outside`; or one of any
    shape that holds one number.

    Args:
        name: the buffer's. low, high: None: no such bound. Longer rows than N are no question here: the graph has
            compared their tokens with N.
    """

    name: str
    inside: float
    outside: float
    low: int | None = None
    high: int | None = None
    _seen: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]], compare=False)

    @staticmethod
    @torch.no_grad()
    def read(name: str, buffer: Tensor) -> Table | None:
        """What a buffer's numbers say; None where they are no such table.

        1 0 0 0
        1 1 0 0      by distance i - j = -3 … 3:   0 0 0 1 1 0 0      low 0, high 1
        0 1 1 0
        0 0 1 1
        """
        unknown = hasattr(buffer, "_cp_rewrite_unknown")  # a model on `meta` in a dry run
        if (
            unknown
            or type(buffer) not in (Tensor, nn.Buffer)
            or buffer.is_meta
            or buffer.is_complex()
            or not buffer.numel()
        ):
            return None
        seen, first = [_place_of(buffer)], buffer.flatten()[0]
        if bool((buffer == first).all()):
            return Table(name, float(first), float(first), _seen=seen)
        size = buffer.shape[-1]
        if buffer.ndim < 2 or buffer.numel() != size**2 or buffer.shape[-2] != size:
            return None
        table = buffer.reshape(size, size)
        if not bool((table[1:, 1:] == table[:-1, :-1]).all()):
            return None
        by_distance = torch.cat([table[0].flip(0), table[1:, 0]]).double().cpu()
        kept = by_distance == by_distance[size - 1]
        places, others = kept.nonzero().flatten().tolist(), by_distance[~kept].unique()
        if not places or places[-1] - places[0] + 1 != len(places) or len(others) != 1:
            return None
        low = None if places[0] == 0 else places[0] - (size - 1)
        high = None if places[-1] == 2 * size - 2 else places[-1] - (size - 1)
        return Table(name, float(by_distance[size - 1]), float(others[0]), low, high, seen)

    def check(self, buffer: Tensor) -> None:
        """Raise unless the buffer still says what it said.

        It is read again where it was written to, or is another. Writes past autograd (`.data`, `.numpy()`) leave no
        trace: its numbers are compared in every call, with a table that equal ones share. On a GPU nothing waits for
        that: the comparison asserts there.
        """
        place = _place_of(buffer)
        changed = f"{self.name} was proven as a mask by its numbers, and holds others now: torch.compiler.reset()"
        if place not in self._seen:
            if Table.read(self.name, buffer) != self:
                raise MaskMismatch(changed)
            self._seen[:] = [place]
            return
        if buffer.is_cuda:
            torch._assert_async((buffer.detach() == self._expected(buffer)).all(), changed)
        elif not torch.equal(buffer.detach(), self._expected(buffer)):
            raise MaskMismatch(changed)

    def _expected(self, buffer: Tensor) -> Tensor:
        """What a buffer of this table holds."""
        return _expected(self.inside, self.outside, self.low, self.high, buffer.shape, buffer.dtype, buffer.device)


@lru_cache(maxsize=8)  # layers have equal tables
def _expected(
    inside: float,
    outside: float,
    low: int | None,
    high: int | None,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    if inside == outside:
        return torch.full(shape, inside, dtype=dtype, device=device)
    size = shape[-1]
    place = torch.arange(size, device=device)
    distance = place[:, None] - place
    kept = (distance >= (-size if low is None else low)) & (distance <= (size if high is None else high))
    numbers = torch.tensor([inside, outside], dtype=torch.float64).to(device, dtype)
    return torch.where(kept, numbers[0], numbers[1]).expand(shape).contiguous()


def _place_of(buffer: Tensor) -> tuple[int, int]:
    """What changes where a tensor is another one, or was written to."""
    return buffer.data_ptr(), -1 if buffer.is_inference() else buffer._version
