"""Changes of the state by each pass, and of the graph by each exchange. EXPECTTEST_ACCEPT=1 updates them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn.functional as F
from expecttest import TestCase
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import cp_rewrite as cp
from cp_rewrite import passes
from cp_rewrite.batch.active import active_plan
from cp_rewrite.passes.capture.capture import capture
from cp_rewrite.passes.graph.diff import graph_lines
from cp_rewrite.passes.graph.tokens import module_numbers
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.names import split_exchange
from cp_rewrite.torch_internals import fixed_number

from .test_graph_diff import batch, causal_with_groups, same_document

EXCHANGES = ("local", "all_gather", "needed", "push", "p2p", "a2a", "a2a+all_gather", "a2a+needed", "a2a+p2p")


@pytest.fixture(autouse=True, scope="module")
def fake_group() -> Iterator[None]:
    """The first of four processes, without the others."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


class Everything(nn.Module):
    """Something for every pass to find."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.factor = nn.Embedding(16, 32), 4

    def forward(self, ids: Tensor, doc: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(ids)
        if ids.shape[1] > 5:
            x = x + torch.arange(ids.shape[1])[:, None].cos()
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=same_document(doc).tril())
        return y.transpose(1, 2) * self.factor, y.exp().sum(), (labels > 0).sum()


def facts(state: State) -> dict[str, Any]:
    """The parts of the state that passes change, in words that are equal in each run."""
    gm, conditions = state.graph_module, state.size_conditions
    return {
        "refusals": [refusal.reason.name for refusal in state.refusals],
        "conditions": [re.sub(r"\bs\d+", "T", str(c)) for c in (conditions.conditions if conditions else ())],
        "token counts": len(state.tokens.counts),
        "module's numbers": [fixed_number(number) or "free" for number in module_numbers(gm)],
        "sites": [f"{site.node.name}: {site.mask}" for site in state.sites],
        "positions": [f"{found.node.name}: {found.kind}" for found in state.locality.positions],
        "sums that fill would change": [node.name for node in state.locality.fill_sums],
        "inserts": [f"{insert.operand.name}, for {insert.node.name}" for insert in state.locality.inserts],
        "token dims of outputs": list(state.locality.outputs),
        "outputs that are parts of sums": list(state.locality.parts),
        "decisions": [f"{decision.exchange_name}, {decision.kernel}" for decision in state.decisions],
        "masks to compare": [str(recorded.mask) for recorded in state.masks],
        "plan inputs": len(state.inputs),
        "nodes": len(graph_lines(gm)),
    }


def run_each_pass() -> str:
    sharding = cp.Sharding(
        4, dict.fromkeys(("ids", "doc", "labels"), 1), cp.DocumentIds("doc"), exchange="needed", verify="first_step"
    )
    lines: list[str] = []

    def look(gm: fx.GraphModule, _: Any) -> Any:
        state = capture(gm, sharding, active_plan(sharding))
        for run_pass in passes.PIPELINE:
            before, state = facts(state), run_pass(state)
            after = facts(state)
            changed = [f"    {what}: {before[what]} -> {after[what]}" for what in after if before[what] != after[what]]
            lines.extend([run_pass.__name__, *changed])
        return lambda *_: (torch.zeros(()),) * 3

    ids = torch.arange(24)[None] % 16
    torch._dynamo.reset()
    with sharding.shard({"ids": ids, "doc": batch()["doc"], "labels": ids}) as local:
        for name in sharding.tokens:
            torch._dynamo.mark_dynamic(local[name], 1)
        with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
            torch.compile(Everything(), backend=look, fullgraph=True, dynamic=True)(**local)
    return "\n".join(lines)


def rows_moved(exchange: str) -> list[str]:
    """The ops of the dispatcher that a rewrite inserts, in order."""
    mesh: Any = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("cp",))
    if split_exchange(exchange)[0] and exchange != "a2a":
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("outer", "inner"))
    asked: Any = {"local": "auto", "push": "needed"}.get(exchange, exchange)
    sharding = cp.Sharding(
        1 if exchange == "local" else mesh, {"q": 1, "kv": 1, "doc": 1}, cp.DocumentIds("doc"), exchange=asked
    )
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        if exchange == "push":  # which is chosen between GPUs only
            module = importlib.import_module("cp_rewrite.passes.plan_sites")
            patch.setattr(module, "_exchange_name", lambda *_: (exchange, ""))
        report = cp.explain(causal_with_groups, sharding)(**batch())
    added = [line for line in report.diff.splitlines() if re.match(r"\+.* = (cp_rewrite|_c10d_functional)\.", line)]
    return [line for line in added if "wait_tensor(" not in line]


class TestShortDiffs(TestCase):
    maxDiff = None

    def test_every_pass(self) -> None:
        self.assertExpectedInline(
            run_each_pass(),
            """\
check_frame
check_size_conditions
check_checkpoints
unify_token_sizes
    token counts: 2 -> 1
fix_module_numbers
    module's numbers: ['free'] -> [4.0]
match_attention
    sites: [] -> ['y: same document & causal']
check_documents
check_token_locality
    positions: [] -> ['arange: arange']
    inserts: [] -> ['exp, for sum_1']
    token dims of outputs: [] -> [1, None, None]
    outputs that are parts of sums: [] -> [False, True, True]
plan_sites
    decisions: [] -> ['needed, reference']
move_exchanges
record_masks
    masks to compare: [] -> ['same document & causal']
guard_size_conditions
rewrite_sites
    plan inputs: 0 -> 13
    nodes: 26 -> 50
tile_rows
local_sizes
verify_graph""",
        )

    @pytest.mark.long
    def test_every_exchange(self) -> None:
        self.assertExpectedInline(
            "\n".join(line for exchange in EXCHANGES for line in (exchange, *rows_moved(exchange))),
            """\
local
+gather_rows_default: float32[S5, 32] = cp_rewrite.gather_rows(cat, cp_kv_rows_0)
+packed_attention_default = cp_rewrite.packed_attention(flatten, flatten_1, flatten_2, gather_rows_default, cp_*_0, [cp_*_0], 0.353553, 0, 'fa4', False, False, 'local', '', 1, None)
all_gather
+all_gather_into_tensor_default: float32[4*S0, 32] = _c10d_functional.all_gather_into_tensor(cat, 4, 'cp')
+gather_rows_default: float32[S5, 32] = cp_rewrite.gather_rows(wait_tensor_default, cp_kv_rows_0)
+packed_attention_default = cp_rewrite.packed_attention(flatten, flatten_1, flatten_2, gather_rows_default, cp_*_0, [cp_*_0], 0.353553, 0, 'reference', False, False, 'all_gather', 'cp', 4, None)
needed
+exchange_rows_default: float32[S5, 32] = cp_rewrite.exchange_rows(detach, detach_1, cp_*_0, 'cp', None)
+packed_attention_default = cp_rewrite.packed_attention(flatten, flatten_1, flatten_2, exchange_rows_default, cp_*_0, [cp_*_0], 0.353553, 0, 'reference', False, False, 'needed', 'cp', 4, None)
push
+push_rows_default: float32[S5, 32] = cp_rewrite.push_rows(detach, detach_1, cp_*_0, 'cp', None)
+packed_attention_default = cp_rewrite.packed_attention(flatten, flatten_1, flatten_2, push_rows_default, cp_*_0, [cp_*_0], 0.353553, 0, 'reference', False, False, 'push', 'cp', 4, None)
p2p
+ring_attention_default = cp_rewrite.ring_attention(flatten, flatten_1, flatten_2, cp_*_0, 0.353553, 0, 'reference', False, 'cp', 4, None)
a2a
+all_to_all_single_default: float32[4, S0, 24] = _c10d_functional.all_to_all_single(contiguous, [1, 1, 1, 1], [1, 1, 1, 1], 'cp')
+permute_rows_default: float32[4*S0, 24] = cp_rewrite.permute_rows(flatten_8, cp_*_0)
+gather_rows_default: float32[S5, 16] = cp_rewrite.gather_rows(cat_1, cp_kv_rows_0)
+packed_attention_default = cp_rewrite.packed_attention(unflatten_3, unflatten_4, unflatten_5, gather_rows_default, cp_*_0, [cp_*_0], 0.353553, 0, 'reference', False, False, 'local', '', 1, None)
+permute_rows_default_1: float32[4*S0, 8] = cp_rewrite.permute_rows(flatten_11, cp_*_0)
+all_to_all_single_default_1: float32[4, S0, 8] = _c10d_functional.all_to_all_single(unflatten_6, [1, 1, 1, 1], [1, 1, 1, 1], 'cp')
a2a+all_gather
+all_to_all_single_default: float32[2, S0, 32] = _c10d_functional.all_to_all_single(contiguous, [1, 1], [1, 1], 'cp')
+permute_rows_default: float32[2*S0, 32] = cp_rewrite.permute_rows(flatten_6, cp_*_0)
+all_gather_into_tensor_default: float32[4*S0, 16] = _c10d_functional.all_gather_into_tensor(cat_1, 2, 'cp')
+gather_rows_default: float32[S5, 16] = cp_rewrite.gather_rows(wait_tensor_default_1, cp_kv_rows_0)
+packed_attention_default = cp_rewrite.packed_attention(unflatten_3, unflatten_4, unflatten_5, gather_rows_default, cp_*_0, [cp_*_0], 0.353553, 0, 'reference', False, False, 'all_gather', 'cp', 2, None)
+permute_rows_default_1: float32[2*S0, 16] = cp_rewrite.permute_rows(flatten_9, cp_*_0)
+all_to_all_single_default_1: float32[2, S0, 16] = _c10d_functional.all_to_all_single(unflatten_6, [1, 1], [1, 1], 'cp')
a2a+needed
+all_to_all_single_default: float32[2, S0, 32] = _c10d_functional.all_to_all_single(contiguous, [1, 1], [1, 1], 'cp')
+permute_rows_default: float32[2*S0, 32] = cp_rewrite.permute_rows(flatten_6, cp_*_0)
+exchange_rows_default: float32[S5, 16] = cp_rewrite.exchange_rows(detach, detach_1, cp_*_0, 'cp', None)
+packed_attention_default = cp_rewrite.packed_attention(unflatten_3, unflatten_4, unflatten_5, exchange_rows_default, cp_*_0, [cp_*_0], 0.353553, 0, 'reference', False, False, 'needed', 'cp', 2, None)
+permute_rows_default_1: float32[2*S0, 16] = cp_rewrite.permute_rows(flatten_7, cp_*_0)
+all_to_all_single_default_1: float32[2, S0, 16] = _c10d_functional.all_to_all_single(unflatten_6, [1, 1], [1, 1], 'cp')
a2a+p2p
+all_to_all_single_default: float32[2, S0, 32] = _c10d_functional.all_to_all_single(contiguous, [1, 1], [1, 1], 'cp')
+permute_rows_default: float32[2*S0, 32] = cp_rewrite.permute_rows(flatten_6, cp_*_0)
+ring_attention_default = cp_rewrite.ring_attention(unflatten_3, unflatten_4, unflatten_5, cp_*_0, 0.353553, 0, 'reference', False, 'cp', 2, None)
+permute_rows_default_1: float32[2*S0, 16] = cp_rewrite.permute_rows(flatten_7, cp_*_0)
+all_to_all_single_default_1: float32[2, S0, 16] = _c10d_functional.all_to_all_single(unflatten_6, [1, 1], [1, 1], 'cp')""",
        )
