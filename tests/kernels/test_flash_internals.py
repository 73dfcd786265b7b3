"""Parts of FlashAttention 4, 3 and torch's flash that we rely on: one test each, that fails by name when it changes.

Tests of a library's source read its file and need no GPU; they skip where the library is not installed. To take up
another version of FlashAttention 4: install it, run this file on a Hopper GPU, and where only
`test_fa4_is_a_version_that_was_read` fails, add the version to `fa4_internals.VERSIONS`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels.flash import fa3, fa4, fa4_internals
from cp_rewrite.kernels.flash.varlen import BackwardOverlap, Launch, launches_of
from cp_rewrite.kernels.select import Params, device_facts
from cp_rewrite.masks import PackedMask
from tests.helpers.kernel_cases import Case, make_case

PARAMS = Params(128**-0.5)
LENGTHS = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "window_size_left", "window_size_right"}


@cache
def functions_of(file: Path) -> dict[str, ast.FunctionDef]:
    """The functions of a module's source, which is not run."""
    return {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.fixture
def fa4_source() -> dict[str, ast.FunctionDef]:
    try:
        file = Path(str(distribution("flash-attn-4").locate_file("flash_attn/cute/interface.py")))
    except PackageNotFoundError:
        pytest.skip("flash-attn-4 is not installed")
    return functions_of(file)


def parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]


def calls(function: ast.FunctionDef) -> Iterator[tuple[str, ast.Call]]:
    """(what is called, the call) in the order of the source."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    for node in sorted(found, key=lambda call: (call.lineno, call.col_offset)):
        yield ast.unparse(node.func), node


def names(call: ast.Call) -> set[str]:
    """Variables that are arguments of a call, by themselves."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return {value.id for value in values if isinstance(value, ast.Name)}


# FlashAttention 4: its source.


@pytest.mark.usefixtures("fa4_source")
def test_fa4_is_a_version_that_was_read() -> None:
    assert version("flash-attn-4") in fa4_internals.VERSIONS, "nothing overlaps, and gradients are rounded"


def test_fa4_takes_the_arguments_that_it_gets(fa4_source: dict[str, ast.FunctionDef]) -> None:
    forward, backward = (parameters(fa4_source[name]) for name in ("_flash_attn_fwd", "_flash_attn_bwd"))
    both = {*LENGTHS, "softmax_scale", "softcap", "causal"}
    assert forward[:3] == ["q", "k", "v"]
    assert {*both, "out", "lse"} <= set(forward)
    assert backward[:6] == ["q", "k", "v", "out", "dout", "lse"]
    assert {*both, "dq", "dk", "dv", "deterministic"} <= set(backward)


def test_fa4_backward_runs_over_other_globals(fa4_source: dict[str, ast.FunctionDef]) -> None:
    """A plain function of the module, whose code and positional defaults are all of it."""
    backward = fa4_source["_flash_attn_bwd"]
    assert not backward.decorator_list
    assert not backward.args.kwonlyargs
    assert all(name in fa4_source for name in ("_bwd_preprocess", "_bwd_postprocess_convert"))
    assigned = {
        node.id for node in ast.walk(backward) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    assert not assigned & {"_bwd_preprocess", "_bwd_postprocess_convert"}


def test_fa4_backward_reads_keys_after_its_preprocess_only(fa4_source: dict[str, ast.FunctionDef]) -> None:
    """Before, and in it, k, v, dk and dv are looked at for their shapes, or made."""
    steps = list(calls(fa4_source["_flash_attn_bwd"]))
    at = [name for name, _ in steps].index("_bwd_preprocess")
    keys = {"k", "v", "dk", "dv"}
    before = {name for name, call in steps[: at + 1] if names(call) & keys}
    assert before <= {"_validate_tensor", "torch.empty_like", "torch.zeros_like"}
    assert not any("compile_cache" in name for name, _ in steps[:at])


def test_fa4_backward_rounds_last(fa4_source: dict[str, ast.FunctionDef]) -> None:
    """dq, dk and dv, from fp32, and nothing is launched after."""
    steps = [step for step in calls(fa4_source["_flash_attn_bwd"]) if "compile_cache" in step[0] or "_bwd_" in step[0]]
    assert [name for name, _ in steps][-3:] == ["_bwd_postprocess_convert"] * 3
    assert [ast.unparse(call.args[1]) for _, call in steps[-3:]] == ["dq", "dk", "dv"]


def test_fa4_rounding_takes_its_sums_and_their_tiles(fa4_source: dict[str, ast.FunctionDef]) -> None:
    """Arguments of the rounding in the order that `fa4_internals` takes them: `rest` begins after the fourth."""
    convert = fa4_source["_bwd_postprocess_convert"]
    positional = parameters(convert)
    assert positional[:5] == ["accum", "output", "scale", "cu_seqlens", "seqused"]
    assert positional[8] == "block_size"
    assert {"cluster_size", "cu_total_m_blocks", "hdim_multiple_of"} <= set(positional)
    for name, call in calls(fa4_source["_flash_attn_bwd"]):
        if name == "_bwd_postprocess_convert":
            named = {keyword.arg for keyword in call.keywords}
            assert len(call.args) > 8
            assert {"cu_total_m_blocks", "hdim_multiple_of"} <= named


def test_fa4_keeps_its_kernels_by_function(fa4_source: dict[str, ast.FunctionDef]) -> None:
    """The library's functions are plain, each over the cache that is its attribute, as `fa4_internals.noting` copies
    them."""
    for name in ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert"):
        assert not fa4_source[name].decorator_list
        called = [node for node, _ in calls(fa4_source[name]) if ".compile_cache[" in node]
        assert called == [f"{name}.compile_cache[compile_key]"] * (2 if name == "_flash_attn_fwd" else 1)


def test_fa4_kernels_take_a_layers_own_tensors_first(fa4_source: dict[str, ast.FunctionDef]) -> None:
    """The first arguments of each kernel, which `kernels/flash/fa4_internals.py` replaces. The forward's first one is
    of MLA."""
    given = {
        name: [node.value for node in ast.walk(fa4_source[name]) if isinstance(node, ast.Assign)
               and ast.unparse(node.targets[0]) == "call_args"]
        for name in ("_flash_attn_fwd", "_flash_attn_bwd")
    }  # fmt: skip
    first = {name: [ast.unparse(x) for value in values if isinstance(value, ast.List) for x in value.elts]
             for name, values in given.items()}  # fmt: skip
    assert first["_flash_attn_fwd"][:5] == [
        "q_call", "k_call", "v_call", "out.detach() if not is_split_kv else out_partial",
        "lse_partial if is_split_kv else lse",
    ]  # fmt: skip
    assert first["_flash_attn_bwd"][:9] == [
        "q.detach()", "k.detach()", "v.detach()", "dout", "lse_log2", "dpsum", "dq_accum",
        "dk if not dKV_postprocess else dk_accum", "dv if not dKV_postprocess else dv_accum",
    ]  # fmt: skip
    for name, own in (
        ("_bwd_preprocess", ["out", "dout", "dpsum", "lse", "lse_log2", "dq_accum"]),
        ("_bwd_postprocess_convert", ["accum", "output"]),
    ):
        (call,) = (call for node, call in calls(fa4_source[name]) if ".compile_cache[" in node)
        assert [ast.unparse(x) for x in call.args[: len(own)]] == own


def test_fa4_takes_any_rows_of_lse(fa4_source: dict[str, ast.FunctionDef]) -> None:
    """The forward's kernel writes them at any address, the backward's first one reads them there."""
    (layout,) = (
        call for name, call in calls(fa4_source["_flash_attn_fwd"])
        if name == "validate_output_layout" and ast.unparse(call.args[0]) == "lse"
    )  # fmt: skip
    assert ast.unparse(layout.keywords[0].value) == "4"
    made = ast.unparse(fa4_source["make_fake_bwd_tensors"])
    assert "mLSE = fake_tensor(Float32, shape(sq), divisibility=1)" in made


def test_fa4_backward_clears_the_sums_of_keys_only(fa4_source: dict[str, ast.FunctionDef]) -> None:
    """A repeated backward makes zeros for dk and dv of grouped heads; no other memory is cleared where nothing has to
    be deterministic."""
    made: dict[str, set[str]] = {}
    for node in ast.walk(fa4_source["_flash_attn_bwd"]):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made.setdefault(ast.unparse(node.value.func), set()).add(ast.unparse(node.targets[0]))
    assert made["torch.zeros"] == {"dk_accum", "dv_accum", "dQ_semaphore", "dK_semaphore", "dV_semaphore"}
    assert {"dpsum", "lse_log2"} <= made["torch.empty"]


# FlashAttention 4: what it does on a Hopper GPU.


def hopper_case(heads_kv: int = 2) -> tuple[Case, Launch, Any]:
    """Grouped heads, the one launch over their pieces, and the library's backward."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    facts = device_facts(torch.device("cuda"))
    if facts.major != 9 or "flash_attn.cute" not in facts.modules:
        pytest.skip("needs a Hopper GPU and flash-attn-4")
    case = make_case(
        Documents.from_lengths([700, 33, 1, 1500, 301, 128]), PackedMask(), rank=1, layout="dual_chunk",
        heads=(8, heads_kv), dims=(128, 128), dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    (launch,) = launches_of(case.tables, case.q.shape[0])
    return case, launch, fa4._interface()._flash_attn_bwd


def run_fa4(
    case: Case, launch: Launch, k: Tensor, v: Tensor, backward: Any, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """dq, dk, dv of `backward`; these are -7 where it does not write."""
    params = Params(128**-0.5, deterministic=True)
    out, lse = fa4.forward(case.q, case.k, case.v, case.tables, params)
    dq, dk, dv = (torch.full_like(x, -7) for x in (case.q, case.k, case.v))
    dk, dv = dk.to(dtype), dv.to(dtype)
    backward(
        case.q, k, v, out, case.dout, lse, softmax_scale=params.scale, deterministic=True, dq=dq, dk=dk, dv=dv,
        **fa4._arguments(launch),
    )  # fmt: skip
    return [dq, dk, dv]


@pytest.mark.gpu
def test_fa4_reads_keys_late_and_writes_their_gradients_early() -> None:
    """Keys are NaN until it needs them; gradients are kept when it says that they are written."""
    case, launch, backward = hopper_case()
    expected = run_fa4(case, launch, case.k, case.v, backward)
    k, v = (torch.full_like(x, torch.nan) for x in (case.k, case.v))
    written: list[Tensor] = []

    def keys_arrive() -> None:
        k.copy_(case.k)
        v.copy_(case.v)

    def run(*inputs: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, **options: Any) -> None:
        def keep() -> None:
            written.extend((dk.clone(), dv.clone()))

        overlap = BackwardOverlap((dk, dv), keys_arrive, keep)
        fa4_internals.run_backward(backward, overlap, *inputs, dq=dq, dk=dk, dv=dv, **options)

    got = run_fa4(case, launch, k, v, run)
    for name, want, found in zip(("dq", "dk", "dv"), expected, got, strict=True):
        assert torch.equal(want, found), f"{name}: a step reads keys before `_bwd_preprocess` is done"
    for name, want, found in zip(("dk", "dv"), expected[1:], written, strict=True):
        assert torch.equal(want, found), f"{name} is written after its rounding"


@pytest.mark.gpu
def test_fa4_sums_are_what_it_rounds() -> None:
    """fp32 gradients, rounded by torch, are the library's own: the order of the sums in a tile is read off rightly."""
    case, launch, backward = hopper_case()

    def run(*inputs: Tensor, **options: Any) -> None:
        fa4_internals.run_backward(backward, None, *inputs, **options)

    expected = run_fa4(case, launch, case.k, case.v, backward)
    got = run_fa4(case, launch, case.k, case.v, run, torch.float32)
    for name, want, found in zip(("dq", "dk", "dv"), expected, got, strict=True):
        assert torch.equal(want, found.to(want.dtype)), name


@pytest.mark.gpu
@pytest.mark.parametrize("heads_kv", [2, 8])
def test_fa4_calls_made_again_are_the_librarys(heads_kv: int) -> None:
    """Bit for bit, of a second layer's tensors; as the library makes them, whose Python does not run again."""
    case, launch, backward = hopper_case(heads_kv)
    tensors = [case.q, case.k, case.v, case.dout]
    for _ in range(2):
        q, k, v, dout = tensors
        out, lse = fa4.forward(q, k, v, case.tables, PARAMS)
        grads = fa4.backward(dout, q, k, v, out, lse, case.tables, PARAMS)
        expected = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
        seen = slice(launch.stop)
        part = lse[:, seen].contiguous()
        fa4._interface()._flash_attn_fwd(
            q[seen], k[: launch.keys[1]], v[: launch.keys[1]], softmax_scale=PARAMS.scale, out=expected[0][seen],
            lse=part, **fa4._arguments(launch),
        )  # fmt: skip
        assert torch.equal(out, expected[0])
        assert torch.equal(lse[:, seen], part)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        keys = slice(launch.keys[1])
        backward(
            q[seen], k[keys], v[keys], out[seen], dout[seen], part, softmax_scale=PARAMS.scale, dq=dq[seen],
            dk=dk[keys], dv=dv[keys], **fa4._arguments(launch),
        )  # fmt: skip
        # Blocks add to dq in no order of their own, and where heads are grouped to dk and dv.
        close = partial(torch.testing.assert_close, rtol=0.02, atol=0.02)
        close(grads[0][seen], dq[seen])
        for want, found in zip((dk, dv), grads[1:], strict=True):
            (close if heads_kv < 8 else partial(close, rtol=0, atol=0))(found[keys], want[keys])
        tensors = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(0.5 * x) for x in tensors
        ]
    assert len([call for call in launch.kept.values() if call]) == 2


# FlashAttention 3, and FlashAttention 2 as torch ships it.


def test_fa3_takes_the_arguments_that_it_gets() -> None:
    """A build registers its ops when it is imported, which needs a GPU's libraries only."""
    if not fa3.has_backward():
        pytest.skip("flash_attn_interface is not installed, or has no backward")
    forward, backward = (
        [argument.name for argument in getattr(torch.ops.flash_attn_3, op).default._schema.arguments]
        for op in ("fwd", "bwd")
    )
    assert forward[:3] == ["q", "k", "v"]
    assert {*LENGTHS, "out", "softmax_scale", "softcap", "is_causal", "num_splits"} <= set(forward)
    assert backward[:6] == ["dout", "q", "k", "v", "out", "softmax_lse"]
    assert {*LENGTHS, "dq", "dk", "dv", "softmax_scale", "is_causal", "deterministic"} <= set(backward)


@pytest.mark.parametrize(
    ("op", "tensors", "last"),
    [
        ("_flash_attention_forward", "query key value", ""),
        ("_flash_attention_backward", "grad_out query key value out logsumexp", "rng_state unused"),
    ],
)
def test_torch_takes_the_arguments_that_it_gets(op: str, tensors: str, last: str) -> None:
    expected = f"{tensors} cum_seq_q cum_seq_k max_q max_k dropout_p is_causal {last}".split()
    found = [argument.name for argument in getattr(torch.ops.aten, op).default._schema.arguments]
    assert found[: len(expected)] == expected
    assert {"scale", "window_size_left", "window_size_right"} <= set(found)
