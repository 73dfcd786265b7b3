"""Cutting batches on the host: shapes, documents, labels, and the errors of bad input."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cp_rewrite as cp
from cp_rewrite.batch import shard as batch_shard
from cp_rewrite.batch.active import active_plan
from cp_rewrite.batch.marks import mark_token_axes

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}


def make_sharding(**options: Any) -> cp.Sharding:
    values: dict[str, Any] = {"layout": "contiguous", **options}
    return cp.Sharding(2, TOKENS, cp.PositionIds("position_ids"), **values)


def make_batch(*lengths: int) -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.arange(positions.numel())[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.clone()}


def test_tokens_are_cut_and_the_rest_handed_over() -> None:
    batch = {**make_batch(3, 5), "temperature": 0.5}
    with make_sharding().shard(batch) as local:
        assert local["input_ids"].tolist() == [[0, 1, 2, 3]]
        assert local["position_ids"].tolist() == [[0, 1, 2, 0]]
        assert local["temperature"] == 0.5
        assert local.plan.local_size == 4


def test_a_ranks_tokens_go_to_the_meshs_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cp_rewrite.batch.shard.device_of", lambda _: torch.device("meta"))
    cu_seqlens, kept = torch.tensor([0, 3, 8]), torch.ones(2)
    batch = {"input_ids": torch.arange(8)[None], "cu_seqlens": cu_seqlens, "kept": kept, "length": 8}
    with cp.Sharding(2, {"input_ids": 1}, cp.CuSeqlens("cu_seqlens")).shard(batch) as local:
        assert [local[name].device.type for name in ("input_ids", "cu_seqlens")] == ["meta"] * 2
        assert local["input_ids"].shape == (1, 4)
        assert local["kept"] is kept
        assert local["length"] == 8
    with make_sharding().shard(make_batch(3, 5), shift_labels=True) as local:
        assert {x.device.type for x in local.values()} == {"meta"}
        assert "num_items_in_batch" in local


def test_missing_tokens_are_filled_at_the_end() -> None:
    with make_sharding(layout="head_tail").shard(make_batch(3, 4)) as local:
        assert local["input_ids"].shape == (1, 4)
    sharding = make_sharding(layout="dual_chunk")
    with sharding.shard(make_batch(3)) as local:
        assert local["input_ids"].tolist() == [[0, 0]]
        assert local["labels"].tolist() == [[0, -100]]
        assert local.has_token.tolist() == [[True, False]]


def test_fill_is_0_and_for_the_model_a_copy_of_a_ranks_last_token() -> None:
    sharding = cp.Sharding(2, {"ids": 1, "doc": 1, "x": 1}, cp.DocumentIds("doc"), "contiguous", pad_to_multiple=5)
    doc = torch.tensor([[0, 0, 0, -1, 2, 2], [-1, -1, -1, 5, 5, 5]])
    x = torch.arange(1.0, 25).view(2, 6, 2)
    with sharding.shard({"ids": torch.arange(12).view(2, 6), "doc": doc, "x": x}) as local:
        assert local.has_token.tolist() == [[True, True, True, False, False]] * 2
        assert local["ids"].tolist() == [[0, 1, 2, 0, 0], [6, 7, 8, 0, 0]]
        assert (local["x"][:, 3:] == 0).all()
        ids, docs, read = (active_plan(sharding).as_read(name, local[name], 1) for name in ("ids", "doc", "x"))
        assert ids.tolist() == [[0, 1, 2, 2, 2], [6, 7, 8, 9, 9]]
        assert docs.tolist() == [[0, 0, 0, 0, 0], [-1, -1, -1, 5, 5]]
        assert torch.equal(read, x.flatten(0, 1)[ids])


@pytest.mark.parametrize("layout", ["contiguous", "head_tail", "dual_chunk", "balanced"])
def test_chunks_and_padding_of_local_rows(layout: str) -> None:
    sharding = make_sharding(layout=layout, chunk_size=4, pad_to_multiple=16)
    with sharding.shard(make_batch(4, 12, 24)) as local:
        assert local["input_ids"].shape == (1, 32)
        assert local.plan.orders[0].sizes.sum() == 40
        assert (local.plan.orders[0].segments[0] % 4 == 0).all()
        assert local["labels"][0, local.plan.orders[0].sizes[0] :].eq(-100).all()


def test_documents_stay_on_a_machine() -> None:
    lengths = (700, 700, 700, 700, 700, 596)
    flat, near = (
        cp.Sharding(4, TOKENS, cp.PositionIds("position_ids"), ranks_per_node=size, speeds="a100") for size in (None, 2)
    )
    across: list[Any] = []
    for sharding in (flat, near):
        with sharding.shard(make_batch(*lengths)) as local:
            across.append(local.plan.schedule(cp.PackedMask()).received)
    far = np.arange(4)[:, None] // 2 != np.arange(4) // 2
    assert across[1][far].sum() < across[0][far].sum()


def test_labels_are_shifted_over_the_whole_row() -> None:
    batch = make_batch(3, 5)
    batch["labels"][0, 3] = -100
    with make_sharding().shard(batch, shift_labels=True) as local:
        assert local["shift_labels"].tolist() == [[1, 2, -100, 4]]
        assert int(local["num_items_in_batch"]) == 6


def test_plan_is_active_inside_only() -> None:
    sharding = make_sharding()
    with pytest.raises(RuntimeError, match=r"with sharding.shard\(batch\)"):
        active_plan(sharding)
    with sharding.shard(make_batch(8)):
        assert active_plan(sharding).plan.local_size == 4
        with pytest.raises(RuntimeError, match="another Sharding"):
            active_plan(make_sharding(exchange="needed"))
    with pytest.raises(RuntimeError, match=r"with sharding.shard\(batch\)"):
        active_plan(sharding)


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        ({"labels": None}, {}, "the batch has no such tensor"),
        ({"labels": np.zeros((1, 8))}, {}, r"batch\['labels'\] must be a tensor, got ndarray"),
        ({"position_ids": torch.arange(8.0)[None]}, {}, r"batch\['position_ids'\] .* whole numbers, got torch.float32"),
        ({"labels": torch.zeros(1, 7)}, {}, "token dims must have one length"),
        ({"labels": torch.zeros(8)}, {}, r"tokens\['labels'\] is dim 1"),
        ({"position_ids": torch.tensor([[0, 1, 2, 3, 7, 8, 9, 10]])}, {}, "jump to 7 at token 4"),
        ({}, {"lengths": [5, 4]}, "lengths sum to 9 tokens, but the row has 8"),
        ({}, {"lengths": [4, 4]}, r"row 0 has documents at \[\(0, 4\), \(4, 8\)\]…, .* \[\(0, 3\), \(3, 8\)\]"),
        ({}, {"lengths": [[3, 5], [8]]}, "lengths holds 2 rows, the batch 1"),
        ({}, {"lengths": [-3, 11]}, "document lengths must be >= 0"),
        ({}, {"lengths": []}, "lengths are empty"),
        ({}, {"lengths": 8}, "lengths must be a list of whole numbers, or one such list per row, got 8"),
        ({}, {"lengths": [3.0, 5.0]}, "lengths must be whole numbers, got float64"),
        ({}, {"shift_labels": True, "label_arg": "targets"}, "'targets' are to be shifted, by shift_labels=True"),
        ({}, {"shift_labels": "yes"}, "shift_labels must be True or False, got 'yes'"),
        ({"shift_labels": torch.zeros(1, 8)}, {"shift_labels": True}, "the batch has 'shift_labels' already"),
        ({"labels": torch.zeros(1, 8).byte()}, {"shift_labels": True}, "torch.uint8, which can't hold -100"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], options: dict[str, Any], says: str) -> None:
    batch = {**make_batch(3, 5), **change}
    with pytest.raises((KeyError, TypeError, ValueError), match=says), make_sharding().shard(batch, **options):
        pytest.fail("bad input was cut")


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ([1, 2], "batch must map names of arguments to values, got list"),
        ({name: value[:, :0] for name, value in make_batch(8).items()}, "1 rows of 0 tokens: nothing to cut"),
        ({**make_batch(3, 4), "labels": torch.ones(1, 7).byte()}, "torch.uint8, which can't hold -100"),
    ],
)
def test_batches_that_can_not_be_cut_are_named(batch: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says), make_sharding().shard(batch):
        pytest.fail("bad input was cut")


@pytest.mark.parametrize(
    "lengths", [(3, 5), [[3, 5]], np.array([3, 5], dtype=np.int32), torch.tensor([3, 5]), torch.tensor([[3, 5]]).int()]
)
def test_lengths_may_be_any_list_of_numbers(lengths: Any) -> None:
    with make_sharding().shard(make_batch(3, 5), lengths=lengths) as local:
        assert local.plan.rows[0].lengths.tolist() == [3, 5]


def test_workers_of_a_data_loader_cut_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cp_rewrite.batch.shard.get_worker_info", object)
    with pytest.raises(RuntimeError, match="in a DataLoader's worker"), make_sharding().shard(make_batch(8)):
        pytest.fail("a worker cut a batch")


def test_a_batch_is_cut_once() -> None:
    sharding = make_sharding()
    with sharding.shard(make_batch(4, 4)) as local:
        with pytest.raises(RuntimeError, match="inside of another"), sharding.shard(make_batch(8)):
            pytest.fail("two batches are in flight")
        assert active_plan(sharding).plan is local.plan
    with pytest.raises(ValueError, match=r"batch\['input_ids'\] was cut before"), sharding.shard(dict(local)):
        pytest.fail("a part was cut again")


def test_counts_of_targets_that_are_given_stay() -> None:
    batch = {**make_batch(3, 5), "num_items_in_batch": torch.tensor(40)}
    with make_sharding().shard(batch, shift_labels=True) as local:
        assert int(local["num_items_in_batch"]) == 40


@pytest.mark.parametrize(
    ("chunk_size", "says"),
    [
        (2, "chunk_size 2 needs documents that start at multiples of it: document 1 starts at token 3"),
        (3, r"are 4 rows each, but whole chunks of 3 need 6: chunk_size \* world_size must divide"),
    ],
)
def test_chunks_that_do_not_fit_are_named(chunk_size: int, says: str) -> None:
    sharding = make_sharding(layout="balanced", chunk_size=chunk_size)
    with pytest.raises(ValueError, match=says), sharding.shard(make_batch(3, 5)):
        pytest.fail("bad input was cut")


def test_rows_of_documents_with_one_offset_list_are_refused() -> None:
    sharding = cp.Sharding(2, {"x": 1}, cp.CuSeqlens("cu"))
    batch = {"x": torch.zeros(2, 8), "cu": torch.tensor([0, 8])}
    with pytest.raises(ValueError, match="cu_seqlens pack one row"), sharding.shard(batch):
        pytest.fail("bad input was cut")


@pytest.mark.parametrize(
    ("packing", "values"),
    [(cp.CuSeqlens("docs"), torch.tensor([0, 3, 8])), (cp.DocumentIds("docs"), torch.tensor([[0] * 3 + [1] * 5]))],
)
def test_lengths_leave_out_no_document(packing: Any, values: Tensor) -> None:
    tokens = {"x": 1, "docs": 1} if isinstance(packing, cp.DocumentIds) else {"x": 1}
    sharding, batch = cp.Sharding(2, tokens, packing), {"x": torch.zeros(1, 8), "docs": values}
    for lengths in ([3], [3, 4]):
        with pytest.raises(ValueError, match="its packing argument says"), sharding.shard(batch, lengths=lengths):
            pytest.fail("tokens of a document are taken for padding")
    with sharding.shard(batch, lengths=[3, 0, 5]) as local:
        assert local.plan.rows[0].lengths.sum() == 8


@pytest.mark.parametrize("packing", [cp.EndOfDocument("x", 7), cp.StartOfDocument("x", 7)], ids=repr)
def test_tokens_that_mark_documents_are_read(packing: Any) -> None:
    x = torch.tensor([[1, 7, 2, 7, 7, 3], [7, 1, 2, 3, 4, 7]])
    expected = {cp.EndOfDocument: [[2, 2, 1, 1], [1, 5]], cp.StartOfDocument: [[1, 2, 1, 2], [5, 1]]}[type(packing)]
    with cp.Sharding(2, {"x": 1}, packing).shard({"x": x}) as local:
        assert [row.lengths.tolist() for row in local.plan.rows] == expected


def test_documents_of_one_id_in_two_places_are_refused() -> None:
    sharding = cp.Sharding(2, {"ids": 1}, cp.DocumentIds("ids"))
    with (
        pytest.raises(ValueError, match="document id 1 stands in 2 separate runs"),
        sharding.shard({"ids": torch.tensor([[1, 1, 2, 1]])}),
    ):
        pytest.fail("bad input was cut")


def test_rows_with_other_batch_sizes_are_refused() -> None:
    batch = {"input_ids": torch.zeros(2, 8), "position_ids": torch.arange(8)[None], "labels": torch.zeros(2, 8)}
    with pytest.raises(ValueError, match=r"expand them to \(2, T\)"), make_sharding().shard(batch):
        pytest.fail("bad input was cut")


def test_unshard_checks_the_dim() -> None:
    sharding = cp.Sharding(1, {"x": 1}, cp.DocumentIds("x"))
    with sharding.shard({"x": torch.zeros(1, 6, dtype=torch.int64)}) as local:
        pass
    assert sharding.unshard(local["x"], 1).shape == (1, 6)
    assert sharding.unshard(local["x"], -1).shape == (1, 6)
    with pytest.raises(ValueError, match="dim 0 of x has 1 tokens"):
        sharding.unshard(local["x"], 0)
    with pytest.raises(ValueError, match=r"dim must be a dim of x, which has shape \(1, 6\), got 9"):
        sharding.unshard(local["x"], 9)
    with pytest.raises(TypeError, match="takes a tensor and its token dim, got list and 1"):
        sharding.unshard([1], 1)  # type: ignore[arg-type]


def test_unshard_finds_the_rows_before_the_tokens() -> None:
    """As many heads as rows would be taken for these."""
    sharding = cp.Sharding(1, {"x": 1}, cp.DocumentIds("x"))
    with sharding.shard({"x": torch.zeros(2, 6, dtype=torch.int64)}):
        pass
    heads = torch.zeros(2, 2, 6)
    assert sharding.unshard(heads, 2).shape == (2, 2, 6)
    mark_token_axes(heads, (("B",), None, ("T",)))
    for x in (heads, torch.zeros(2, 3, 6), torch.zeros(6)):
        with pytest.raises(ValueError, match="does not have the 2 rows of the batch at the dim before its tokens"):
            sharding.unshard(x, -1)


def test_rows_beyond_what_masks_are_proven_for_are_refused() -> None:
    sharding = cp.Sharding(2, {"ids": 1}, cp.CuSeqlens("cu_seqlens"))
    batch = {"ids": torch.empty((1, 2**22 + 2), dtype=torch.int8), "cu_seqlens": torch.tensor([0, 2**22 + 2])}
    with pytest.raises(ValueError, match="up to 4194304 tokens"), sharding.shard(batch):
        pass


@pytest.mark.parametrize(
    ("docs", "target", "options", "says"),
    [
        ([0, 0, 0, -1, -1, 2, 2, 2], 4, {}, r"labels\[0, 4\] is a target, .* padding, .* Set labels\[0, 4\] to -100"),
        ([0, 0, 0, -1, -1, 2, 2, 2], 0, {}, None),
        ([-1, -1, 0, 0, 0, 2, 2, 2], 2, {}, None),
        (
            [-1, -1, 0, 0, 0, 2, 2, 2],
            2,
            {"shift_labels": True},
            r"shift_labels\[0, 1\] is a target \(labels\[0, 2\] .*\), .* Set labels\[0, 2\] to -100",
        ),
    ],
)
def test_targets_at_tokens_of_no_document_are_an_error(
    docs: list[int], target: int, options: dict[str, Any], says: str | None
) -> None:
    sharding = cp.Sharding(2, {"doc_ids": 1, "labels": 1}, cp.DocumentIds("doc_ids"))
    labels = torch.full((1, 8), -100)
    labels[0, target] = 5
    with (
        pytest.raises(ValueError, match=says) if says else nullcontext(),
        sharding.shard({"doc_ids": torch.tensor([docs]), "labels": labels}, **options),
    ):
        pass


def test_targets_behind_lengths_that_end_early_are_an_error() -> None:
    rows = {"position_ids": torch.arange(4).repeat(2, 2), "labels": torch.full((2, 8), -100)}
    rows["labels"][1, 6] = 1
    with (
        pytest.raises(ValueError, match=r"labels\[1, 6\] is a target"),
        cp.Sharding(2, {"position_ids": 1, "labels": 1}, cp.PositionIds("position_ids")).shard(
            rows, lengths=[[4, 4], [4]]
        ),
    ):
        pass


@pytest.mark.parametrize(
    ("tokens", "packing", "values", "says"),
    [
        (
            1,
            cp.DocumentIds("x"),
            [0, 0, 1, 1, 0, 0],
            r"batch\['x'\]: document id 0 stands in 2 .* Number the doc",
        ),
        (1, cp.DocumentIds("x"), [0, 1, 2, 0, 1, 2], r"count up as positions do: packing=PositionIds"),
        (1, cp.PositionIds("x"), [1, 1, 2, 2, 2, 3], r"batch\['x'\]: position_ids jump .* packing=DocumentIds"),
        (0, cp.DocumentIds("x"), [0, 0, 1, 1, 2, 2], r"has one entry: its token dim is 1, if these are rows of tokens"),
        (0, cp.WholeRows(), [0, 0, 1, 1, 2, 2], r"has one entry: its token dim is 1, if these are rows of tokens"),
    ],
)
def test_what_was_meant_is_named(tokens: int, packing: Any, values: list[int], says: str) -> None:
    sharding = cp.Sharding(2, {"x": tokens}, packing)
    with pytest.raises(ValueError, match=says), sharding.shard({"x": torch.tensor([values])}):
        pytest.fail("bad input was cut")


def test_a_block_is_entered() -> None:
    block: Any = make_sharding().shard(make_batch(3, 5))
    for use in (lambda: dict(**block), lambda: block["input_ids"]):
        with pytest.raises(TypeError, match=r"`with sharding.shard\(batch\) as local: model\(\*\*local\)`"):
            use()


def test_labels_that_were_shifted_before_warn() -> None:
    batch = make_batch(12, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with make_sharding().shard(batch, shift_labels=True):
            pass
    batch["labels"] = torch.cat([batch["input_ids"][:, 1:], torch.tensor([[-100]])], 1)
    with (
        pytest.warns(UserWarning, match="shifts 'labels', which hold the next token of 'input_ids' already"),
        make_sharding().shard(batch, shift_labels=True),
    ):
        pass


def test_a_whole_row_put_into_a_ranks_part_is_named() -> None:
    batch, sharding = make_batch(3, 5), make_sharding()

    def add(input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        return input_ids + labels

    def step() -> None:
        with sharding.shard(batch) as local:
            local["labels"] = batch["labels"]
            torch.compile(add, backend=cp.backend(sharding), fullgraph=True)(**local)

    with pytest.raises(ValueError, match=r"labels has 8 tokens at dim 1, but .* parts have 4 tokens a rank"):
        step()


def test_plans_are_made_for_the_models_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []

    def plan_batch(*arguments: Any) -> Any:
        options = arguments[4]
        planned.append(options.model)
        return plain(*arguments)

    plain = batch_shard.plan_batch
    monkeypatch.setattr(batch_shard, "plan_batch", plan_batch)
    ours, usual = make_sharding(heads=(32, 32), head_dim=64), make_sharding()
    for sharding in (ours, usual):
        with sharding.shard(make_batch(3, 5)):
            pass
    assert [(model.heads, model.head_dim) for model in planned] == [((32, 32), 64), ((64, 8), 128)]
    assert ours.graph_key == usual.graph_key  # compiled graphs serve both
