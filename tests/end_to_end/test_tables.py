"""Tables cut to T rows, then looked up by positions: one process's loss and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cp_rewrite.planning.names import LAYOUTS
from tests.helpers.one_process import check_or_refuse, compare
from tests.helpers.packed_model import WIDTH, PackedModel
from tests.helpers.pool import Pool

Mix = Callable[["Tables", Tensor, Tensor, int], Tensor]


class Tables(PackedModel):
    """The packed model with positions added by tables, beside each other."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names

    def extra(self) -> None:
        self.cos: Tensor
        self.register_buffer("cos", torch.outer(torch.arange(40.0), torch.rand(WIDTH)).cos())
        self.places = nn.Parameter(torch.randn(40, WIDTH))

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        h = self.embed(input_ids)
        return sum((MIXES[name](self, h, position_ids, h.shape[1]) for name in self.names), h)


MIXES: dict[str, Mix] = {
    "given": lambda m, h, p, n: h * m.cos[:n][p],
    "squeezed": lambda m, h, p, n: h * m.cos[None, None][:, :, :n, ...].to(h.dtype).squeeze(1).squeeze(0)[p],
    "counted": lambda m, h, p, n: h * m.cos[:n][torch.arange(n)[None]],
    "learned": lambda m, h, p, n: h * m.places[:n][p].sin(),
    "embedding": lambda m, h, p, n: h + F.embedding(p, m.places[:n]),
    "index_select": lambda m, h, p, n: h * m.cos[:n].index_select(0, p.flatten()).view_as(h),
    "from_the_end": lambda m, h, p, n: h * m.cos[:n][p - 3],
    "in_turn": lambda m, h, p, n: h * m.places[:n],
}


def test_tables_are_looked_up() -> None:
    assert check_or_refuse(Tables([*MIXES])) is None


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(("ranks", "rows", "tokens"), [(2, 2, 15), (3, 1, 17)])
def test_all_tables_are_looked_up(pool: Pool, layout: str, ranks: int, rows: int, tokens: int) -> None:
    first = (sorted(LAYOUTS).index(layout) + ranks) % 2
    compare(pool, Tables, [*MIXES][first::2], ranks, layout, rows, tokens)


BESIDE: dict[str, Mix] = {
    "from_one_on": lambda m, h, p, n: h * m.places[1 : n + 1][p],
    "one_less": lambda m, h, p, n: h * m.places[: n - 1][p.clamp(max=5)],
    "turned": lambda m, h, p, n: h * m.places[:n].flip(0)[p],
    "summed": lambda m, h, p, n: h * m.places[:n].cumsum(0)[p],
    "scaled": lambda m, h, p, n: h * (m.places[:n] * 2)[p],
    "both": lambda m, h, p, n: h * (t := m.places[:n])[p] + t,
    "by_hidden_states": lambda m, h, p, n: h * h[0, :n][p],
    "mean": lambda m, h, p, n: h * (t := m.places[:n])[p] + t.mean(0),
    "second_dim": lambda m, h, p, n: h * m.places[:n].t()[:, p].movedim(0, -1),
    "viewed": lambda m, h, p, n: h * m.places[:n].view(n, 2, -1).view(n, -1)[p],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_other_tables_are_right_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXES, "beside", BESIDE[name])
    check_or_refuse(Tables(["beside"]))
