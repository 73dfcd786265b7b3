"""The trial of kernels of recurrences, with the reference in the kernels' place, and Triton's cache played."""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels.states import select
from cp_rewrite.kernels.states.select import verdict_of
from cp_rewrite.ops.states import by_kernels, trial
from cp_rewrite.ops.states import ops as pieces
from cp_rewrite.ops.states.maps import Options
from cp_rewrite.planning.batch_plan import plan_batch
from cp_rewrite.planning.plan_input import States
from tests.helpers.recurrences import inputs_of
from tests.ops.test_states_pieces import tables_of

ops: Any = torch.ops.cp_rewrite
VERSIONS = {
    "fla-core": "0.6.0", "flash-qla": "0.1.3", "tilelang": "0.1.15", "cuda-core": "1.2.0",
    "nvidia-cuda-nvrtc": "13.0.88",
}  # fmt: skip


class Kernels:
    """As `by_kernels`, by the reference, which may be wrong by a factor. forwards: rows of each call on pieces. read:
    what each backward was given of its forward. queries: of the last one. names: of the kernels there are. broken: of
    those that can't be compiled."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.forwards: list[int] = []
        self.read: list[float] = []
        self.queries = torch.empty(0)
        self.wholes = 0
        self.names, self.ran = ["best"], ""
        self.broken: str | None = None

    def forward(self, kernels: str, kind: str, inputs: Any, t: Any, how: Any, group: str) -> Any:
        if kernels == self.broken:
            raise OSError("no compiler")
        self.forwards.append(inputs[0].shape[1])
        wide = [x.float() for x in inputs]
        found = getattr(ops, f"{kind}_on_pieces")(*wide, [*vars(t).values()], how.scale, how.l2norm, group)
        return (
            found[0].to(inputs[0].dtype),
            *found[1:3],
            [x + len(self.forwards) for x in self.not_kept(kind, inputs, True)],
        )

    not_kept = staticmethod(by_kernels.not_kept)

    def backward(
        self, _: str, kind: str, dout: Any, entries: Any, moves: Any, kept: Any, inputs: Any, t: Any, *rest: Any
    ) -> Any:
        how, group = rest
        self.read.append(float(kept[1].mean()))
        self.queries = inputs[0]
        given = dout.float(), entries, moves, [], [x.float() for x in inputs], [*vars(t).values()], kind
        found = ops.states_on_pieces_backward(*given, how.scale, how.l2norm, group)
        return [(x * self.factor).to(like.dtype) for x, like in zip(found, inputs, strict=True)]

    def whole(self, kernels: str, kind: str, inputs: Any, *_: Any) -> Tensor:
        self.ran = kernels
        self.wholes += 1
        return torch.zeros_like(inputs[2])


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[Kernels]:
    played = Kernels()
    modules = {
        "triton": SimpleNamespace(__version__="3.8.0"),
        "triton.runtime.cache": SimpleNamespace(get_cache_manager=lambda key: folder_of(tmp_path, key)),
        "fla.utils": SimpleNamespace(autotune_cache_kwargs={"cache_results": True}),
    }
    monkeypatch.setattr(select, "import_module", modules.__getitem__)
    monkeypatch.setattr(select, "version", VERSIONS.__getitem__)
    for module in (trial, pieces, pieces):
        monkeypatch.setattr(module, "by_kernels", played)
    monkeypatch.setattr(trial, "kernels_for", lambda _, x, runs: played.names * (x[0].dtype == torch.bfloat16))
    monkeypatch.setattr(by_kernels, "runs_by_kernels", lambda _, x: x[0].dtype == torch.bfloat16)
    trial._agree.cache_clear()
    yield played
    trial._agree.cache_clear()


def folder_of(root: Path, key: str) -> SimpleNamespace:
    bytes.fromhex(key)  # as Triton does
    (root / key).mkdir(exist_ok=True)
    return SimpleNamespace(cache_dir=str(root / key))


def half(heads: int = 0) -> list[Tensor]:
    inputs = [x.to(torch.bfloat16) for x in inputs_of("gated_delta_rule", 1, 9)]
    return [torch.cat([x] * heads, 2) for x in inputs] if heads else inputs


def is_right(inputs: list[Tensor]) -> bool:
    """Asked in a process of its own."""
    trial._agree.cache_clear()
    return trial.right_kernels("gated_delta_rule", inputs, 1, Options()) is not None


def test_kernels_are_tried_inside_of_a_compiled_graph(kernels: Kernels) -> None:
    inputs = [x.requires_grad_() for x in half()]
    torch.compile(lambda x: ops.gated_delta_rule(*x, None, 0.5, True) * 2, backend="aot_eager", fullgraph=True)(inputs)
    assert kernels.wholes == 1
    assert kernels.forwards == [2048, 2048, 300]


TABLES = tables_of(plan_batch([Documents.from_lengths([4, 5])], 1), States(True), 0)


def on_pieces(inputs: list[Tensor]) -> Tensor:
    return ops.gated_delta_rule_on_pieces(*inputs, TABLES, 0.5, True, "")[0]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_backward_is_given_what_its_forward_kept(compiled: bool, kernels: Kernels) -> None:
    run = torch.compile(on_pieces, backend="aot_eager", fullgraph=True) if compiled else on_pieces
    steps = [[x.requires_grad_() for x in half()] for _ in range(2)]
    outs = [run(inputs) for inputs in steps]
    assert kernels.forwards == [2048, 2048, 300, 9, 9]
    for out in outs:
        out.sum().backward()
    assert kernels.read == [1, 2, 3, 4, 5]
    assert torch.equal(kernels.queries, steps[1][0] + 5)
    assert all(x.grad is not None for inputs in steps for x in inputs)


def test_the_reference_runs_where_kernels_are_wrong(kernels: Kernels) -> None:
    kernels.factor = 1.2
    inputs = [x.requires_grad_() for x in half()]
    wide = [x.detach().float().requires_grad_() for x in inputs]
    with pytest.warns(UserWarning, match="others run, or the reference"):
        out = on_pieces(inputs)
    out.sum().backward()
    on_pieces(wide).sum().backward()
    assert kernels.forwards == [2048, 2048, 300]
    for x, expected in zip(inputs, wide, strict=True):
        torch.testing.assert_close(x.grad, expected.grad, check_dtype=False, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("l2norm", [False, True])
def test_kernels_are_tried_with_and_without_norms(l2norm: bool, kernels: Kernels) -> None:
    inputs = [x.repeat_interleave(16, -1) if i < 3 else x for i, x in enumerate(half())]
    assert trial.right_kernels("gated_delta_rule", inputs, 1, Options(0.1, l2norm)) == "best"
    assert len(kernels.forwards) == 3


def test_what_is_right_is_not_tried_again(kernels: Kernels, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_right(half())
    assert len(kernels.forwards) == 3
    assert capsys.readouterr().err.count("kernels of gated_delta_rule (best) are tuned and tried") == 1
    assert is_right(half())
    assert len(kernels.forwards) == 3
    assert not capsys.readouterr().err


def test_what_is_wrong_is_tried_by_each_process(kernels: Kernels) -> None:
    kernels.factor = 1.2
    for count in (3, 6):
        with pytest.warns(UserWarning, match=r"differ from the reference by 2\.0e-01"):
            assert not is_right(half())
        assert len(kernels.forwards) == count
    kernels.factor = 1.0
    assert is_right(half())
    assert len(kernels.forwards) == 9


@pytest.mark.parametrize("why", ["broken", "wrong"])
def test_the_next_kernels_run_where_the_best_cannot(why: str, kernels: Kernels) -> None:
    kernels.names = ["best", "next"]
    kernels.broken = "best" if why == "broken" else None
    wrong = "failed with OSError: no compiler" if why == "broken" else "differ from the reference by"
    backward = kernels.backward
    kernels.backward = lambda name, *rest: [x * (1 if name == "next" else 1.2) for x in backward(name, *rest)]  # type: ignore
    with pytest.warns(UserWarning, match=rf"kernels of gated_delta_rule \(best\) {wrong}.*others run"):
        ops.gated_delta_rule(*half(), None, 0.5, True)
    assert kernels.ran == "next"


@pytest.mark.parametrize("what", ["shapes", "triton", "fla", "settings"])
def test_a_verdict_is_of_shapes_versions_and_settings(
    what: str, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_right(half())
    assert len(kernels.forwards) == 3
    inputs = half(2 if what == "shapes" else 0)
    if what == "triton":
        monkeypatch.setattr(select.import_module("triton"), "__version__", "3.9.0")
    elif what == "fla":
        monkeypatch.setattr(select, "version", (VERSIONS | {"fla-core": "0.6.1"}).__getitem__)
    elif what == "settings":
        monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    assert is_right(inputs)
    assert len(kernels.forwards) == 6


def test_nothing_is_kept_where_tunings_are_not(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select.import_module("fla.utils"), "autotune_cache_kwargs", {"cache_results": False})
    for count in (3, 6):
        assert is_right(half())
        assert len(kernels.forwards) == count


@pytest.mark.usefixtures("kernels")
def test_processes_try_one_after_another() -> None:
    order: list[str] = []

    def second() -> None:
        with verdict_of("delta") as known:
            order.append(f"second, right {known.right}")

    with verdict_of("delta") as known:
        other = threading.Thread(target=second)
        other.start()
        with verdict_of("another shape") as apart:
            assert not apart.right
        other.join(0.3)
        order.append(f"first, right {known.right}")
        known.keep()
    other.join()
    assert order == ["first, right False", "second, right True"]
