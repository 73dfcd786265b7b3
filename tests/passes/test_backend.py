"""The ways to ask for a rewrite, and what is refused before, while and after compiling."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cp_rewrite as cp
from cp_rewrite import Reason
from cp_rewrite.entry import Backend

TOKENS = {"ids": 1, "pos": 1}


class Packed(nn.Module):
    """Embedding, one packed causal attention, projection."""

    def __init__(self, transforms: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out, self.transforms = nn.Embedding(16, 8), nn.Linear(8, 4), transforms

    def forward(self, ids: Tensor, pos: Tensor) -> Tensor:
        x = self.embed(ids)
        doc = (pos == 0).cumsum(1)
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        index = torch.arange(ids.shape[1])
        keep = (doc[:, None, :, None] == doc[:, None, None, :]) & (index[:, None] >= index)
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=keep).transpose(1, 2).flatten(2)
        return self.out(torch.fft.fft(y, dim=1).real if self.transforms else y)


def make_sharding(mesh: Any = 1, **options: Any) -> cp.Sharding:
    values: dict[str, Any] = {"inner": "eager", **options}
    return cp.Sharding(mesh, TOKENS, cp.PositionIds("pos"), **values)


def make_batch(*lengths: int) -> dict[str, Tensor]:
    pos = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"ids": pos % 7 + 1, "pos": pos}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_backend_by_name(inner: str) -> None:
    model, batch, sharding = Packed(), make_batch(5, 9), make_sharding(inner=inner)
    options: Any = {"sharding": sharding}
    compiled = torch.compile(model, backend="cp_rewrite", fullgraph=True, options=options)
    with sharding.shard(batch) as local:
        out = compiled(**local)
    torch.testing.assert_close(sharding.unshard(out, 1), model(**batch))


def test_unknown_options_are_errors() -> None:
    model, batch, sharding = Packed(), make_batch(5, 9), make_sharding(inner="inductor")
    cases: list[tuple[Any, type[Exception], str]] = [
        ({"sharding": sharding, "layout": 1}, ValueError, r"unknown keys \['layout'\]"),
        ({"sharding": sharding, "mode": "fast"}, ValueError, "mode must be one of default,"),
        (
            {"sharding": sharding, "mode": "max-autotune"},
            ValueError,
            "captures a CUDA graph",
        ),
        ({"sharding": 4}, TypeError, "needs options="),
        ({}, TypeError, "needs options="),
    ]
    for options, kind, says in cases:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="cp_rewrite", options=options)
        with pytest.raises(kind, match=says), sharding.shard(batch) as local:
            compiled(**local)


def test_error_while_compiling_is_the_exception_itself_and_is_not_kept() -> None:
    model, batch, sharding = Packed(), make_batch(5, 9), make_sharding()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with pytest.raises(RuntimeError, match=r"runs inside `with sharding\.shard") as raised:
        compiled(**batch)
    assert str(raised.value) == "a model rewritten by cp_rewrite runs inside `with sharding.shard(batch) as local:`"
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is RuntimeError
    assert str(again) == str(raised.value)
    with sharding.shard(batch) as local:
        torch.testing.assert_close(sharding.unshard(compiled(**local), 1), model(**batch))


def test_backend_wants_a_sharding() -> None:
    with pytest.raises(TypeError, match=r"must be a cp_rewrite\.Sharding"):
        cp.backend(4)  # type: ignore[arg-type]


def test_decorated_function_and_module_take_the_global_batch() -> None:
    model, batch = Packed(), make_batch(5, 9)
    sharding = make_sharding()
    expected = model(**batch)

    @cp.context_parallel(sharding, gather_outputs=True)
    def forward(ids: Tensor, pos: Tensor) -> dict[str, Any]:
        return {"out": model(ids=ids, pos=pos), "size": 3}

    result = forward(**batch)
    torch.testing.assert_close(result["out"], expected)
    assert result["size"] == 3
    decorated = cp.context_parallel(sharding)(Packed())
    assert decorated(**batch).shape == (1, 14, 4)


def test_decorated_method_takes_the_global_batch() -> None:
    sharding = make_sharding()

    class Decorated(Packed):
        @cp.context_parallel(sharding, gather_outputs=True)
        def forward(self, ids: Tensor, pos: Tensor) -> Tensor:
            return Packed.forward(self, ids, pos)

    batch = make_batch(5, 9)
    torch.testing.assert_close(Decorated()(**batch), Packed()(**batch))


def test_what_can_not_be_decorated_is_named() -> None:
    sharding = make_sharding()
    for target, says in ((Packed, "decorates a function, a forward method or a module"), (3, "got 3")):
        with pytest.raises(TypeError, match=says):
            cp.context_parallel(sharding)(target)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="is context-parallel already"):
        cp.context_parallel(sharding)(cp.context_parallel(sharding)(Packed()))
    with pytest.raises(TypeError, match=r"must be a cp_rewrite\.Sharding"):
        cp.context_parallel(Packed())  # type: ignore[arg-type]
    batch = make_batch(5, 9)
    with pytest.raises(TypeError, match="is context-parallel: pass ids by keyword"):
        cp.context_parallel(sharding)(Packed())(batch["ids"], pos=batch["pos"])


def test_mode_is_for_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(Packed(), backend=cp.backend(make_sharding()), mode="max-autotune")
    with (
        pytest.raises(
            ValueError, match=r"^torch\.compile's mode and options are for inner='inductor', not for 'eager'"
        ),
        make_sharding().shard(make_batch(5, 9)) as local,
    ):
        compiled(**local)
    seen: list[Any] = []

    def compile_fx(gm: torch.fx.GraphModule, example_inputs: list[Any], config_patches: dict[str, Any]) -> Any:
        seen.append(config_patches)
        return gm

    monkeypatch.setattr(importlib.import_module("cp_rewrite.entry"), "lookup_backend", lambda _: compile_fx)
    sharding, mode = make_sharding(inner="inductor"), "max-autotune-no-cudagraphs"
    options: Any = {"sharding": sharding, "mode": mode, "epilogue_fusion": False}
    ways: list[dict[str, Any]] = [
        {"backend": cp.backend(sharding), "mode": mode},
        {"backend": "cp_rewrite", "options": options},
        {"backend": cp.backend(sharding), "options": {"max_autotune": True}},
    ]
    for way in ways:
        torch._dynamo.reset()
        with sharding.shard(make_batch(5, 9)) as local:
            torch.compile(Packed(), fullgraph=True, **way)(**local)
    assert all(patches["max_autotune"] for patches in seen)
    assert [patches.get("epilogue_fusion") for patches in seen] == [None, False, None]


def test_a_compiled_model_is_not_compiled_again() -> None:
    """Dynamo would trace into it, and run its graph by another backend on this rank's tokens."""
    sharding, batch = make_sharding(), make_batch(5, 9)
    decorated = cp.context_parallel(sharding)(Packed())
    for around in (decorated, lambda **kwargs: decorated(**kwargs)):
        with pytest.raises(RuntimeError, match="compiled already: call it as it is"):
            torch.compile(around, backend="eager")(**batch)
    assert decorated(**batch).shape == (1, 14, 4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: cp.explain(None, make_sharding()), "model must be a module or a function"),  # type: ignore[arg-type]
        (lambda: cp.explain(Packed(), 4), "sharding must be a cp_rewrite.Sharding, got 4"),  # type: ignore[arg-type]
        (lambda: cp.check(len, make_sharding(), {}), "model must be an nn.Module"),  # type: ignore[arg-type]
        (lambda: cp.check(Packed(), 4, {}), "sharding must be a cp_rewrite.Sharding"),  # type: ignore[arg-type]
        (lambda: cp.check(Packed(), make_sharding(), []), "batch must map names"),  # type: ignore[arg-type]
        (lambda: cp.sum_gradients([], None), "sharding must be a cp_rewrite.Sharding"),  # type: ignore[arg-type]
        (lambda: cp.token_mean(torch.ones(()), 1, 4), "sharding must be a cp_rewrite.Sharding"),  # type: ignore[arg-type]
        (lambda: cp.token_mean(3.0, 1, make_sharding()), "total must be a .* tensor, got 3.0"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        call()


def test_outside_of_a_batch_there_is_no_plan() -> None:
    compiled = torch.compile(Packed(), backend=cp.backend(make_sharding()), fullgraph=True)
    with pytest.raises(Exception, match=r"with sharding.shard\(batch\)"):
        compiled(**make_batch(5, 9))


def test_calls_with_other_tokens_than_the_batch_in_flight_raise() -> None:
    sharding = make_sharding()
    compiled = torch.compile(Packed(), backend=cp.backend(sharding), fullgraph=True)
    batch, other = make_batch(5, 9), make_batch(7, 7)
    with (
        sharding.shard(batch),
        pytest.raises(Exception, match="ids has 20 tokens at dim 1, but the model is called inside a"),
    ):
        compiled(**make_batch(20))
    with sharding.shard(batch) as local:
        compiled(**local)
        with pytest.raises(
            ValueError, match="ids has 20 tokens at dim 1, but the model is called inside a batch whose parts"
        ):
            compiled(**make_batch(20))
        out = compiled(**local)
    with sharding.shard(other), pytest.raises(ValueError, match=r"ids is of another batch.*model\(\*\*local\)"):
        compiled(**local)
    with pytest.raises(ValueError, match=r"call unshard\(\) before the next batch is cut"):
        sharding.unshard(out, 1)


def test_one_token_a_rank_is_named() -> None:
    report = cp.explain(Packed(), make_sharding(4))(**make_batch(3))
    (refusal,) = report.refusals
    assert refusal.reason is Reason.TOKEN_INPUT
    assert "a rank has 1 token" in refusal.detail
    assert cp.explain(Packed(), make_sharding(4, pad_to_multiple=2))(**make_batch(3)).ok


def test_a_world_size_is_for_dry_runs() -> None:
    sharding = make_sharding(2)
    compiled = torch.compile(Packed(), backend=cp.backend(sharding), fullgraph=True)
    with pytest.raises(Exception, match="pass a DeviceMesh to run"), sharding.shard(make_batch(5, 9)) as local:
        compiled(**local)


def test_refusal_reaches_the_caller_with_reason_line_and_hint() -> None:
    sharding = make_sharding()
    compiled = torch.compile(Packed(transforms=True), backend=cp.backend(sharding), fullgraph=True)
    for _ in range(2):
        with pytest.raises(cp.RewriteRefused) as refused, sharding.shard(make_batch(5, 9)) as local:
            compiled(**local)
        (refusal,) = refused.value.refusals
        assert refusal.reason is Reason.TOKEN_MIXING
        assert "test_backend.py" in refusal.where
        assert "torch.fft.fft(y" in str(refused.value)
        copied = pickle.loads(pickle.dumps(refused.value))
        assert str(copied) == str(refused.value)
        assert copied.refusals == (dataclasses.replace(refusal, node=None),)


def test_not_strict_warns_and_leaves_the_graph() -> None:
    model, sharding = Packed(transforms=True), make_sharding(strict=False)
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    batch = make_batch(14)
    with pytest.warns(UserWarning, match="TOKEN_MIXING"), sharding.shard(batch) as local:
        torch.testing.assert_close(compiled(**local), model(**batch))


def test_all_reasons_come_at_once() -> None:
    def model(ids: Tensor, pos: Tensor) -> Tensor:
        x = F.one_hot(ids, 16).float()[:, None]
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=ids[:, None, :, None] == ids[:, None, None, :])
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True).flip(2)

    report = cp.explain(model, make_sharding(4))(**make_batch(8))
    assert not report.ok
    assert {r.reason for r in report.refusals} >= {Reason.MASK_WRONG_SOURCE, Reason.DROPOUT}


def test_auto_goes_by_given_speeds_and_says_so() -> None:
    for speeds in ("h200", "a100"):
        report = cp.explain(Packed(), make_sharding(4, exchange="auto", speeds=speeds))(**make_batch(16))
        assert report.ok
        assert f"on {speeds} (4 ranks" in str(report)


def test_auto_goes_by_a_batch_of_many_tokens() -> None:
    """The last rank needs all of one document's rows, none of short ones. 16 tokens say nothing of later batches."""
    for lengths, says in (
        ([4096], "1024 tokens per rank, 100% of remote rows needed"),
        ([1024] * 4, "1024 tokens per rank, 0% of remote rows needed"),
        ([16], "8192 tokens per rank, 20% of remote rows needed"),
    ):
        report = cp.explain(Packed(), make_sharding(4, exchange="auto", layout="contiguous"))(**make_batch(*lengths))
        assert says in str(report)


def test_branches_on_the_token_count_are_the_rows() -> None:
    def model(ids: Tensor, pos: Tensor) -> Tensor:
        x = ids * 2.0 if ids.shape[1] <= 16 else ids * 3.0
        x = x * 2.0 if ids.shape[1] // 4 > 2 else x * 5.0
        return x + pos if ids.shape[1] % 3 == 0 else x - pos

    for world_size in (2, 3, 4):
        torch._dynamo.reset()
        sharding = make_sharding(world_size, layout="contiguous")
        compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
        for total in (12, 11, 40, 17, 16, 33, 13, 80):
            batch = make_batch(total)
            with sharding.shard(batch) as local:
                assert torch.equal(compiled(**local), model(**batch)[:, : local["ids"].shape[1]])


def test_a_decision_that_is_returned_is_refused() -> None:
    report = cp.explain(lambda ids, pos: (ids * 2.0, ids.shape[1] <= 16), make_sharding(4))(**make_batch(40))
    assert [r.reason for r in report.refusals] == [Reason.POSITION_GENERATOR]


def test_copies_of_a_batch_are_the_batch() -> None:
    sharding = make_sharding(2)
    compiled = torch.compile(lambda ids, pos: ids * 2.0 + pos, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(make_batch(12)) as local:
        assert torch.equal(compiled(**{**local, "pos": local["pos"].clone()}), compiled(**local))


def test_sums_that_can_not_leave_out_filling_rows_are_refused_at_run_time() -> None:
    sharding = make_sharding(2, layout="contiguous", resolve=False)

    def model(ids: Tensor, pos: Tensor) -> Tensor:
        return F.soft_margin_loss(ids / 7, pos + 1.0, reduction="sum")

    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(make_batch(8)) as local:
        assert compiled(**local) == model(**local)
    with sharding.shard(make_batch(7)) as local, pytest.raises(ValueError, match="the 1 rows that fill up"):
        compiled(**local)


def test_what_the_inner_compiler_decides_by_the_plan_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo would fail over such a guard; a batch for which it does not hold is an error."""

    def deciding(self: Any, gm: Any, example_inputs: Any, mode: Any) -> Callable[..., Any]:
        sizes = [size for x in example_inputs if isinstance(x, Tensor) for size in x.shape]
        assert all(size < 30 for size in sizes if isinstance(size, torch.SymInt))
        return gm.forward  # type: ignore[no-any-return]

    monkeypatch.setattr(Backend, "_inner", deciding)
    model, sharding = Packed(), make_sharding()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True, dynamic=True)
    for lengths in ((5, 9), (2, 4, 3, 5)):
        batch = make_batch(*lengths)
        with sharding.shard(batch) as local:
            torch.testing.assert_close(compiled(**local), model(**batch))
    with sharding.shard(make_batch(20, 25)) as local, pytest.raises(ValueError, match=r"another graph .* < 30"):
        compiled(**local)
