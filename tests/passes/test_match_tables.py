"""Masks that are read off a buffer of the model: the triangle of nanoGPT and of GPT-Neo."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchRuntimeError
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite import MaskMismatch, PackedMask, Reason, Refusal
from cp_rewrite.passes.values.state import Table
from tests.helpers.matching import BATCH, PACKED
from tests.helpers.pool import Pool
from tests.passes.mask_spellings import DOCUMENTS

SIZE = 32
TRIANGLE = torch.ones(SIZE, SIZE).tril()


class Buffered(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Attention written out as nanoGPT and GPT-Neo do, with what `table` holds as its mask; `packed` or not."""

    def __init__(self, table: Tensor, spelling: str = "nanogpt", packed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, 16)
        self.register_buffer("bias", table.view(1, 1, SIZE, SIZE), persistent=False)
        self.register_buffer("least", torch.tensor(-1e9), persistent=False)
        self.bias: Tensor
        self.least: Tensor
        self.spelling, self.packed = spelling, packed

    def forward(self, **b: Tensor) -> Tensor:
        x = self.table(b["input_ids"]).unflatten(-1, (4, 4)).transpose(1, 2)
        tokens = x.shape[2]
        scores = (x * 1.5 @ x.mT) / math.sqrt(4)
        if self.spelling == "nanogpt":
            scores = scores.masked_fill(self.bias[:, :, :tokens, :tokens] == 0, float("-inf"))
        elif self.spelling == "gpt_neo":
            keep = self.bias[:, :, tokens - tokens : tokens, :tokens].bool()
            scores = torch.where(keep, scores, self.least)
        else:
            scores = scores + self.bias[0, 0, :tokens, :tokens]
        if self.packed:
            scores = scores + torch.where(PACKED(**b), 0.0, -math.inf)
        return scores.softmax(-1) @ (x * -2)


def meaning(model: Callable[..., Any], **more: Tensor) -> str | Reason:
    """The meaning of the mask of a model's one attention node, or why it is refused."""
    names = ("input_ids", "doc_ids")
    torch._dynamo.reset()
    report = cp.explain(model, cp.Sharding(2, dict.fromkeys(names, 1), DOCUMENTS, across_documents=True))(
        **{name: BATCH[name] for name in names}, **more
    )
    (found,) = report.refusals or report.sites
    return found.reason if isinstance(found, Refusal) else found.mask


def added(keep: Tensor) -> Tensor:
    return torch.zeros(SIZE, SIZE).masked_fill(keep == 0, -math.inf)


LOCAL = TRIANGLE - TRIANGLE.tril(-3)  # as GPT-Neo makes it, with a window of 3 tokens


BANDS = [
    (TRIANGLE, (0, None)),
    (TRIANGLE.bool(), (0, None)),
    (added(TRIANGLE).bfloat16(), (0, None)),
    (LOCAL.to(torch.uint8)[None, None], (0, 2)),
    (TRIANGLE - TRIANGLE.tril(-4), (0, 3)),
    (TRIANGLE.T.tril(1), (-1, 0)),
    (torch.ones(SIZE, SIZE).tril(1), (-1, None)),
]


@pytest.mark.parametrize(("table", "bounds"), BANDS)
def test_bands_by_brute_force(table: Tensor, bounds: tuple[int | None, int | None]) -> None:
    found = Table.read("b", table)
    assert found is not None
    assert (found.low, found.high) == bounds
    low, high = (side if given is None else given for side, given in zip((-SIZE, SIZE), bounds, strict=True))
    distance = torch.arange(SIZE)[:, None] - torch.arange(SIZE)
    expected = torch.where((distance >= low) & (distance <= high), found.inside, found.outside)
    assert torch.equal(expected.to(table.dtype), table.view(SIZE, SIZE))


ONE_MORE = TRIANGLE.clone()
ONE_MORE[5, 6] = 1
NO_BANDS = [
    ONE_MORE,  # one pair that is not causal
    torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(0)),
    TRIANGLE - TRIANGLE.tril(-3) + TRIANGLE.tril(-5),  # two bands
    TRIANGLE + TRIANGLE.tril(-3),  # three numbers
    torch.ones(2, SIZE, SIZE).tril(),  # one for each head
    torch.ones(2, 4).tril(),
    torch.arange(4),
    torch.tensor([[math.nan, 0.0], [0.0, math.nan]]),
    torch.empty(0),
    torch.ones(4, 4, device="meta").tril(),
    nn.Parameter(TRIANGLE),
]


@pytest.mark.parametrize("table", NO_BANDS)
def test_what_is_no_band(table: Tensor) -> None:
    assert Table.read("b", table) is None


def test_one_number() -> None:
    assert Table.read("b", torch.full((3,), 2.0)) == Table("b", 2.0, 2.0)


def write_by_numpy(table: Tensor) -> None:
    table.numpy()[..., -1, 0] += 1


WRITES: list[Callable[[Tensor], object]] = [
    lambda table: table.data.fill_(0),
    lambda table: table.data.tril_(-1),
    lambda table: table.data[..., SIZE // 2 :, :].zero_(),
    write_by_numpy,
]


@pytest.mark.parametrize("write", WRITES)
def test_writes_that_leave_no_trace_are_seen(write: Callable[[Tensor], object]) -> None:
    for table in (TRIANGLE.clone(), LOCAL.to(torch.uint8)[None, None], added(TRIANGLE).bfloat16().float()):
        known = Table.read("b", table)
        assert known is not None
        known.check(table)
        version = table._version
        write(table)
        assert table._version == version
        with pytest.raises(MaskMismatch, match="holds others now"):
            known.check(table)
    window = torch.tensor([4])
    known = Table.read("window", window)
    assert known is not None
    window.numpy()[0] = 5
    with pytest.raises(MaskMismatch):
        known.check(window)


def test_every_entry_counts() -> None:
    for table in (torch.ones(6, 6).tril(), torch.ones(6, 6).tril(1) - torch.ones(6, 6).tril(-3)):
        known = Table.read("b", table)
        assert known is not None
        for i, j in itertools.product(range(6), range(6)):
            table.data[i, j] += 1
            with pytest.raises(MaskMismatch):
                known.check(table)
            table.data[i, j] -= 1
            known.check(table)


@pytest.mark.parametrize(
    ("table", "spelling", "means"),
    [
        (TRIANGLE, "nanogpt", PackedMask(packed=False)),
        (added(TRIANGLE), "added", PackedMask(packed=False)),
        (LOCAL.to(torch.uint8), "gpt_neo", PackedMask(packed=False, window=(2, 0))),
        (ONE_MORE, "nanogpt", Reason.MASK_OPAQUE),
        (torch.ones(SIZE, SIZE).tril(-1), "nanogpt", Reason.MASK_NOT_PACKED),  # the query itself is hidden
    ],
)
def test_what_models_keep_is_read(table: Tensor, spelling: str, means: PackedMask | Reason) -> None:
    assert meaning(Buffered(table, spelling)) == (means if isinstance(means, Reason) else str(means))


def test_tables_beside_documents() -> None:
    assert meaning(Buffered(LOCAL, "gpt_neo", packed=True)) == str(PackedMask(window=(2, 0)))
    # One key to the right is seen by the table, and hidden by the other mask.
    assert meaning(Buffered(torch.ones(SIZE, SIZE).tril(1), packed=True)) == str(PackedMask())
    assert meaning(Buffered(torch.ones(SIZE, SIZE).tril(1))) == str(PackedMask(False, (None, 1), packed=False))


def test_arguments_are_no_buffers() -> None:
    """A tensor that a caller gives may say something else on the next call."""

    def model(bias: Tensor, **b: Tensor) -> Tensor:
        x = b["input_ids"][:, None, :, None].float().expand(-1, 2, -1, 4) * 1.0
        return (x @ x.mT).masked_fill(bias[: x.shape[2], : x.shape[2]] == 0, -math.inf).softmax(-1) @ x

    assert meaning(model, bias=TRIANGLE) is Reason.MASK_OPAQUE


def step_of_rank(mesh: DeviceMesh) -> dict[str, Any]:
    sharding = cp.Sharding(mesh, {"input_ids": 1, "doc_ids": 1}, DOCUMENTS, inner="eager", verify="first_step")
    model = Buffered(LOCAL.clone(), "gpt_neo", packed=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    batch = {name: BATCH[name] for name in sharding.tokens}

    def run(batch: dict[str, Tensor]) -> Tensor:
        with sharding.shard(batch) as local:
            out = compiled(**local).transpose(1, 2)
            (out.sin() * local.has_token[..., None, None]).sum().backward()
        return sharding.unshard(out, 1).detach()

    found: dict[str, Any] = {"out": run(batch)}
    cp.sum_gradients(model.parameters(), sharding)
    found["grad"] = model.table.weight.grad.clone()  # type: ignore[union-attr]
    model.zero_grad()
    model.bias.mul_(1)  # written to, with the same numbers
    found["again"] = run(batch)
    model.bias.data.triu_()
    try:
        run(batch)
    except MaskMismatch as error:
        found["unseen"] = str(error)
    model.bias.data.copy_(LOCAL)
    found["restored"] = run(batch)
    for name, change in (("longer", None), ("changed", TRIANGLE)):
        try:
            if change is not None:
                model.bias.copy_(change)
            run(batch if change is not None else {k: v.repeat_interleave(3, 1) for k, v in batch.items()})
        except (MaskMismatch, TorchRuntimeError) as error:
            found[name] = str(error)
    return found


def test_a_table_on_two_ranks(pool: Pool) -> None:
    model = Buffered(LOCAL, "gpt_neo", packed=True)
    out = model(**BATCH).transpose(1, 2)
    out.sin().sum().backward()
    for found in pool.run(2, step_of_rank):
        torch.testing.assert_close(found["out"], out.detach())
        torch.testing.assert_close(found["again"], out.detach())
        torch.testing.assert_close(found["grad"], model.table.weight.grad)
        torch.testing.assert_close(found["restored"], out.detach())
        assert "holds others now" in found["unseen"]
        assert "broadcast" in found["longer"]  # as on one process: the table is for 32 tokens
        assert found["changed"].startswith("L['self']._buffers['bias'] was proven as a mask by its numbers")
