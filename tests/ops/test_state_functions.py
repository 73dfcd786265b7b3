"""Functions of transformers that pass a state through tokens: which become ops of ours, and with what numbers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch._dynamo.exc import Unsupported

import cp_rewrite as cp
from cp_rewrite.ops.states import functions
from cp_rewrite.ops.states.functions import OPS, state_ops
from cp_rewrite.refusal import source_line
from tests.helpers import state_stand_ins
from tests.helpers.packed_model import TOKENS, packed_batch

FUNCTIONS = {
    "qwen3_next": "torch_chunk_gated_delta_rule",
    "kimi_linear": "chunk_kimi_delta_attention",
    "mamba2": "mamba2_chunk_scan",
    "jamba": "mamba_selective_scan",
}


def module_of(name: str) -> Any:
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def rows_of(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def compiled(function: Callable[..., Any], given: dict[str, Any]) -> tuple[torch.Tensor, set[str]]:
    """The result of a function under torch.compile, and the ops of ours in its graph."""
    seen: set[str] = set()

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        for node in gm.graph.nodes:
            library, _, name = str(getattr(node.target, "_qualified_op_name", node.target)).partition("::")
            if library == "cp_rewrite":
                seen.add(name)
                assert Path(__file__).name in source_line(node)  # the line of the model that calls the function
        return gm.forward

    torch._dynamo.reset()
    out = torch.compile(lambda: function(**given), backend=backend, fullgraph=True)()
    return rows_of(out), seen


@pytest.mark.parametrize(("model", "name"), FUNCTIONS.items())
def test_a_function_is_one_op_inside_of_a_batch(model: str, name: str) -> None:
    function = getattr(module_of(model), name)
    op = next(op for op in OPS if name in op.names)
    given = op.trial()
    with state_ops():
        out, seen = compiled(function, given)
    assert seen == {op.call.__name__}
    torch.testing.assert_close(out, rows_of(function(**given)), rtol=1e-4, atol=1e-5)


def test_other_programs_are_compiled_as_they_are() -> None:
    function = module_of("mamba2").mamba2_chunk_scan
    given = next(op for op in OPS if "mamba2_chunk_scan" in op.names).trial()
    with state_ops():
        pass
    out, seen = compiled(function, given)
    assert not seen
    assert torch.equal(out, function(**given))


WITH_STATES = {
    "qwen3_next": {"initial_state": torch.zeros(1, 2, 4, 3)}, "kimi_linear": {"output_final_state": True},
    "mamba2": {"initial_states": torch.zeros(1, 4, 3, 4)}, "jamba": {"return_last_state": True},
}  # fmt: skip


@pytest.mark.shared
@pytest.mark.parametrize(("model", "asked"), WITH_STATES.items())
def test_initial_and_final_states_are_left_to_the_function_which_is_refused(model: str, asked: dict[str, Any]) -> None:
    function = getattr(module_of(model), FUNCTIONS[model])
    given = next(op for op in OPS if FUNCTIONS[model] in op.names).trial() | asked
    longest = 2 if model == "jamba" else 1
    rows = {
        name: x for name, x in given.items() if isinstance(x, torch.Tensor) and x.ndim > 2 and x.shape[longest] == 5
    }
    others = {name: x for name, x in given.items() if name not in rows}

    def run(weights: torch.Tensor) -> Any:
        shape = [-1 if dim == longest else 1 for dim in range(4)]
        x = {name: row.narrow(longest, 0, 1) * weights.view(shape[: row.ndim]) for name, row in rows.items()}
        return rows_of(function(**x, **others)).sum()

    explained = cp.explain(run, cp.Sharding(2, {"weights": 1}, cp.WholeRows(), inner="eager"))
    refusals = explained(weights=torch.rand(1, 96)).refusals
    assert {r.reason for r in refusals} <= {cp.Reason.TOKEN_COUNT, cp.Reason.TOKEN_MIXING}
    assert refusals


@pytest.mark.parametrize("package", ["transformers.models.other", "elsewhere"])
def test_a_function_of_the_same_name_with_other_numbers_is_left_alone(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mamba2_chunk_scan(hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, **_: Any) -> Any:
        return hidden_states * 2

    other = ModuleType(package)
    other.mamba2_chunk_scan = mamba2_chunk_scan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package, other)
    given = next(op for op in OPS if "mamba2_chunk_scan" in op.names).trial()
    with state_ops():
        out, seen = compiled(other.mamba2_chunk_scan, given)
    assert not seen
    assert torch.equal(out, given["hidden_states"] * 2)


def of_library(name: str, **given: Any) -> dict[str, Any]:
    """Arguments of a library's function, by its own names."""
    ours = {"query": "q", "key": "k", "value": "v"} if "delta" in name or "kda" in name else {"hidden_states": "x"}
    trial = next(op for op in OPS if name in op.names).trial()
    return {ours.get(key, key): value for key, value in trial.items()} | given


GATES = {"use_gate_in_kernel": True, "A_log": torch.tensor([0.3, -0.5]), "use_beta_sigmoid_in_kernel": True}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("chunk_gated_delta_rule", {}),
    "scale": ("chunk_gated_delta_rule", {"scale": 0.3, "chunk_size": 16}),
    "gates": ("chunk_gated_delta_rule", {**GATES, "dt_bias": torch.tensor([0.7, -0.1]), "state_v_first": True}),
    "both_signs": ("chunk_gated_delta_rule", {**GATES, "allow_neg_eigval": True}),
    "offsets": ("chunk_gated_delta_rule", {"cu_seqlens": torch.tensor([0, 2, 5])}),
    "kimi_gates": ("chunk_kda", {**GATES, "dt_bias": torch.linspace(-1, 1, 8)}),
    "skips": ("mamba_chunk_scan_combined", {"D": torch.rand(4, 3)}),
    "chunk_first": ("mamba_chunk_scan_combined", {"chunk_size": 3}),
}


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in state_stand_ins.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(functions, "_modules", 0)  # as many as in the last test


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.usefixtures("libraries")
def test_a_librarys_function_is_one_op_with_all_that_it_is_given(call: str) -> None:
    name, more = CALLS[call]
    function, given = getattr(state_stand_ins, name), of_library(name, **more)
    given = {"chunk_size": 4, **given} if name == "mamba_chunk_scan_combined" else given  # a number comes first
    with state_ops():
        out, seen = compiled(function, given)
    assert len(seen) == 1
    torch.testing.assert_close(out, rows_of(function(**given)), rtol=1e-4, atol=1e-5)


UNREAD: dict[str, tuple[str, dict[str, Any]]] = {
    "initial_state": ("chunk_gated_delta_rule", {"initial_state": torch.zeros(1, 2, 4, 3)}),
    "output_final_state": ("chunk_kda", {"output_final_state": True}),
    "lower_bound": ("chunk_kda", {"lower_bound": -5.0}),
    "z": ("mamba_chunk_scan_combined", {"z": torch.rand(1, 5, 4, 3)}),
    "seq_idx": ("mamba_chunk_scan_combined", {"seq_idx": torch.zeros(1, 5, dtype=torch.int32)}),
    "return_last_state": ("selective_scan_fn", {"return_last_state": True}),
}


@pytest.mark.parametrize("argument", UNREAD)
@pytest.mark.usefixtures("libraries")
def test_arguments_that_are_not_read_are_named(argument: str) -> None:
    name, more = UNREAD[argument]
    given = of_library(name, **more)
    with state_ops(), pytest.raises(Unsupported, match=f"cp_rewrite reads no call of {name} with {argument}"):
        compiled(getattr(state_stand_ins, name), given)


@pytest.mark.parametrize("name", state_stand_ins.REFERENCES)
@pytest.mark.parametrize("asked", [{}, {"cu_seqlens": torch.tensor([0, 2, 5])}], ids=["row", "offsets"])
def test_a_reference_is_one_op_only_as_far_as_it_gives_the_same(
    name: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = state_stand_ins.custom_module(name)
    function = module.chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(functions, "_modules", 0)  # as many as in the last test
    given = next(op for op in OPS if "chunk_gated_delta_rule" in op.names).trial() | asked
    del given["use_qk_l2norm_in_kernel"]  # as it is by default
    with state_ops():
        out, seen = compiled(function, given)
    assert bool(seen) == (not asked or name in ("takes_offsets", "reads_others", "norms_by_default"))
    torch.testing.assert_close(out, rows_of(function(**given)), rtol=1e-4, atol=1e-5)


def test_a_batch_opens_the_block() -> None:
    function = module_of("mamba2").mamba2_chunk_scan
    given = next(op for op in OPS if "mamba2_chunk_scan" in op.names).trial()
    with cp.Sharding(1, TOKENS, cp.DocumentIds("doc_ids")).shard(packed_batch()):
        assert compiled(function, given)[1] == {"ssd"}
    assert importlib.import_module("cp_rewrite.ops.states.functions").Blocks.count == 0


def test_of_a_librarys_kernels_those_with_offsets_reset_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla in the place of the reference: what transformers' decorator drops for the reference reaches the op."""
    hub = pytest.importorskip("transformers.integrations.hub_kernels")
    if not hasattr(hub, "use_kernel_func_from_hub_with_fallback"):
        pytest.skip("this transformers has no such decorator")

    def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, use_qk_l2norm_in_kernel=False, cu_seqlens=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError("a kernel")

    def causal_conv1d_fn(x, weight, seq_idx=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError("a kernel")

    reference = module_of("qwen3_next").torch_chunk_gated_delta_rule.__wrapped__
    model = ModuleType("transformers.models.other.modeling_other")
    for kernel, plain in ((chunk_gated_delta_rule, reference), (causal_conv1d_fn, lambda x, weight, **_: x * weight)):
        package = ModuleType("fla")
        kernel.__module__ = "fla.ops.other"
        setattr(package, kernel.__name__, kernel)
        monkeypatch.setitem(sys.modules, "fla", package)
        plain.__name__ = kernel.__name__
        setattr(model, kernel.__name__, hub.use_kernel_func_from_hub_with_fallback(kernel.__name__, "fla")(plain))
    monkeypatch.setitem(sys.modules, model.__name__, model)
    op = next(op for op in OPS if "chunk_gated_delta_rule" in op.names)
    given = op.trial()
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    with state_ops():
        call = lambda query, key, value, **rest: model.chunk_gated_delta_rule(query, key, value, **rest)  # noqa: E731
        out, seen = compiled(call, {**given, "cu_seqlens": offsets})
        x, w = torch.randn(2, 3), torch.randn(3)
        conv, _ = compiled(model.causal_conv1d_fn, {"x": x, "weight": w})
    assert seen == {"gated_delta_rule"}
    assert torch.equal(conv, x * w)
    parts = [
        {k: v[:, a:b] if isinstance(v, torch.Tensor) else v for k, v in given.items()} for a, b in ((0, 2), (2, 5))
    ]
    expected = torch.cat([reference(**part)[0] for part in parts], 1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_lightning_attention_is_one_op_inside_of_a_batch() -> None:
    minimax = module_of("minimax")
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "block_size": 4}
    layer = minimax.MiniMaxLightningAttention(minimax.MiniMaxConfig(hidden_size=8, head_dim=4, **sizes), 0)
    x = torch.randn(2, 11, 8)
    given = {"hidden_states": x, "position_embeddings": None, "attention_mask": torch.ones(2, 11)}
    with state_ops():
        out, seen = compiled(layer, given)
        assert seen == {"ssd"}
        torch.testing.assert_close(out, layer(**given)[0], rtol=1e-4, atol=1e-5)
    assert not compiled(layer, given)[1]


def test_lightning_attention_of_other_numbers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    minimax = module_of("minimax")
    other: Any = ModuleType("transformers.models.other.modeling_other")

    class MiniMaxLightningAttention(minimax.MiniMaxLightningAttention):
        def forward(self, hidden_states: torch.Tensor, *_: Any) -> Any:
            return 2 * hidden_states, None

    for found in (MiniMaxLightningAttention, minimax.MiniMaxConfig, minimax.apply_mask_to_padding_states):
        setattr(other, found.__name__, found)
    monkeypatch.setitem(sys.modules, other.__name__, other)
    plain = MiniMaxLightningAttention.forward
    with state_ops():
        assert MiniMaxLightningAttention.forward is plain
