"""Every wrong value of the annotation gets one error that names the argument and the choices."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.planning.cost.devices import DEVICES
from cp_rewrite.sharding import GRAPH_FIELDS
from tests.passes.test_graph_diff import fake_group

GOOD: dict[str, Any] = {"mesh": 4, "tokens": {"ids": 1, "pos": 1}, "packing": cp.PositionIds("pos")}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("mesh", 0, "mesh as a world size must be >= 1"),
        ("mesh", True, "mesh must be a DeviceMesh"),
        ("mesh", "cp", "mesh must be a DeviceMesh"),
        ("tokens", {}, "tokens must map"),
        ("tokens", ["ids"], "tokens must map"),
        ("tokens", {"ids": -1, "pos": 1}, r"tokens\['ids'\], a dim counted from the front, must be >= 0, got -1"),
        ("tokens", {"ids": True, "pos": 1}, r"tokens\['ids'\], a dim counted .* must be a whole number, got True"),
        ("tokens", {3: 1, "pos": 1}, "tokens must map names of arguments, got 3"),
        ("tokens", {"ids": 1}, "packing reads 'pos'"),
        ("block_tokens", {"h": -1}, r"block_tokens\['h'\], a dim counted from the front, must be >= 0, got -1"),
        ("local_ops", "my::op", r"local_ops must be a tuple of names of ops, as in \('my::op',\), got 'my::op'"),
        ("local_ops", ("op",), "local_ops must hold names such as 'my::op', got 'op'"),
        ("packing", cp.PositionIds(3), "packing must name an argument"),  # type: ignore[arg-type]
        ("packing", cp.CuSeqlens("cu", 5), "packing must name an argument"),  # type: ignore[arg-type]
        ("packing", cp.DocumentIds("pos", padding=1), "padding must be 0 or less, got 1"),
        ("packing", cp.EndOfDocument("pos", -1), "token_id must be >= 0, got -1"),
        ("packing", cp.StartOfDocument("pos", 1.5), "token_id must be a whole number"),  # type: ignore[arg-type]
        ("packing", cp.EndOfDocument("ends", 1), "packing reads 'ends'"),
        ("packing", "pos", "packing must be CuSeqlens"),
        ("packing", cp.CuSeqlens("pos"), "cu_seqlens are global"),
        ("layout", "zigzag", "layout must be one of contiguous, head_tail, dual_chunk, balanced"),
        ("exchange", "nccl", "exchange must be one of auto, all_gather"),
        ("kernel", "flash", "kernel must be one of auto, fa4"),
        ("inner", "tvm", "inner must be one of inductor, aot_eager, eager"),
        ("verify", "always", "verify must be one of"),
        ("strict", 1, "strict must be True or False"),
        ("keep_kv", None, "keep_kv must be True or False"),
        ("deterministic", "yes", "deterministic must be True or False"),
        ("assume_mask", "causal", "assume_mask must be a cp_rewrite.PackedMask"),
        ("balance_for", "causal", "balance_for must be a cp_rewrite.PackedMask"),
        ("chunk_size", 0, "chunk_size must be >= 1, got 0"),
        ("chunk_size", True, "chunk_size must be a whole number, got True"),
        ("heads", (64, 48), r"heads must be \(query, key/value\)"),
        ("head_dim", 0, "head_dim must be >= 1, got 0"),
        ("ranks_per_node", 3, "ranks_per_node must divide world_size 4, got 3"),
        ("ranks_per_node", False, "ranks_per_node must be a whole number, got False"),
        ("speeds", "tpu", "speeds: device must be one of h200, h100, a100, cpu, or a file"),
        ("speeds", 3e12, "speeds must be a device's name, a file made by `calibrate` or None"),
        ("pad_to_multiple", 2.0, "pad_to_multiple must be a whole number, got 2.0"),
    ],
)
def test_wrong_value_is_named(field: str, value: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        cp.Sharding(**{**GOOD, field: value})


def test_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="layouts"):
        cp.Sharding(**GOOD, layouts="balanced")  # pyright: ignore[reportCallIssue]


PLAN_FIELDS = (
    "rows", "layout", "balance_for", "chunk_size", "pad_to_multiple", "heads", "head_dim", "states", "check_batches",
)  # fmt: skip
"""Fields that only decide how batches are read and planned, and how ranks compare them."""


def test_every_field_belongs_to_graphs_or_to_plans() -> None:
    assert sorted(f.name for f in fields(cp.Sharding)) == sorted(("mesh", *GRAPH_FIELDS, *PLAN_FIELDS))
    assert cp.Sharding(**GOOD).graph_options.keys() == {*GRAPH_FIELDS}


def test_equal_annotations_are_equal_and_hash_alike() -> None:
    assert cp.Sharding(**GOOD) == cp.Sharding(**copy.deepcopy(GOOD))
    assert hash(cp.Sharding(**GOOD)) == hash(cp.Sharding(**copy.deepcopy(GOOD)))
    assert cp.Sharding(**GOOD, layout="contiguous").graph_key == cp.Sharding(**GOOD).graph_key
    assert cp.Sharding(**GOOD, chunk_size=8, pad_to_multiple=16).graph_key == cp.Sharding(**GOOD).graph_key
    assert cp.Sharding(**GOOD, exchange="needed").graph_key != cp.Sharding(**GOOD).graph_key


@pytest.mark.parametrize(("per_machine", "size"), [("2", 2), ("4", None), ("3", None), (None, None)])
def test_machines_are_those_of_torchrun(monkeypatch: pytest.MonkeyPatch, per_machine: str | None, size: int | None):
    if per_machine is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", per_machine)
    with fake_group(rank=0) as mesh:
        assert cp.Sharding(**{**GOOD, "mesh": mesh}).node_size == size
        assert cp.Sharding(**{**GOOD, "mesh": mesh}, ranks_per_node=1).node_size == 1
    assert cp.Sharding(**GOOD).node_size is None


def test_a_rank_outside_of_the_mesh_is_named() -> None:
    with fake_group(rank=1):
        fields: dict[str, Any] = {**GOOD, "mesh": DeviceMesh("cpu", [0])}
        with pytest.raises(ValueError, match=r"mesh holds ranks \[0\] and not this process, rank 1"):
            cp.Sharding(**fields)


def test_speeds_are_named_or_measured(tmp_path: Path) -> None:
    mine = replace(DEVICES["h100"], name="mine", link=1e9)
    mine.save(tmp_path / "device.json")
    assert cp.Sharding(**GOOD, speeds=str(tmp_path / "device.json")).device_speeds == mine
    replace(mine, link=0.0).save(tmp_path / "device.json")
    with pytest.raises(ValueError, match=r"speeds: link in .* must be a number > 0, got 0\.0"):
        cp.Sharding(**GOOD, speeds=str(tmp_path / "device.json"))
    given = cp.Sharding(**GOOD, speeds="a100")
    assert given.speeds == "a100"
    assert given.device_speeds is DEVICES["a100"]
    assert given.graph_key == cp.Sharding(**GOOD, speeds=DEVICES["a100"]).graph_key
    assert cp.Sharding(**GOOD).device_speeds is None


def test_dry_run_annotation_has_no_group() -> None:
    sharding = cp.Sharding(**GOOD)
    assert (sharding.world_size, sharding.rank) == (4, 0)
    with pytest.raises(ValueError, match="pass a DeviceMesh to run"):
        _ = sharding.group
