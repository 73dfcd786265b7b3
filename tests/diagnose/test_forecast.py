"""Forecasts of a dry run: memory beside measured peaks, times on the target machine, JSON and pages, the doctor."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite.__main__ import main
from cp_rewrite.diagnose import machine
from cp_rewrite.diagnose.config import explain_config, fit_of
from cp_rewrite.diagnose.explain import Report
from cp_rewrite.kernels.select import DeviceFacts
from cp_rewrite.planning.cost.constants import BESIDE_TENSORS
from cp_rewrite.planning.cost.memory import GIB, ExpertLayer, Layer, Needs, Share, predict, ways

WIDTH, WIDE, VOCAB = 32, 96, 48


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.experts = cp.Experts(8, WIDTH, 48, "geglu") if kind == "experts" else None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 16)).transpose(1, 2) for y in self.qkv(self.first(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        x = x + self.down(F.gelu(self.up(y)))
        if self.experts is None:
            return x
        weight, chosen = y[..., :8].flatten(0, 1).softmax(-1).topk(3)
        return x + self.experts(y.flatten(0, 1), chosen, weight).view_as(x)


class Model(nn.Module):
    """A plain packed model. `kind`: "plain", "checkpointed", "sorted" (refused), "buffer" (its mask is one),
    "experts" (beside each MLP, of which a token has 3), or "long" (more ops in a row than functions may call each
    other)."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.register_buffer("triangle", torch.ones(99, 99, dtype=torch.bool).tril())

    def forward(self, input_ids: Tensor, doc_ids: Tensor) -> Tensor:
        size = input_ids.shape[1]
        same = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
        mask = same & self.triangle[:size, :size] if self.kind == "buffer" else same.tril()
        x = self.embed(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.kind == "checkpointed" else block(x, mask)
        if self.kind == "sorted":
            x = torch.fft.fft(x, dim=1).real
        for _ in range(sys.getrecursionlimit() if self.kind == "long" else 0):
            x = -x
        return self.head(x).float().square().sum()


def report_of(kind: str = "plain", device: str = "cpu", **changes: Any) -> Report:
    with torch.device(device):
        model = Model(kind)
    names = {"input_ids": 1, "doc_ids": 1}
    options: dict[str, Any] = {"speeds": "h100", "ranks_per_node": 2, **changes}
    sharding = cp.Sharding(4, names, cp.DocumentIds("doc_ids"), **options)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([13, 40, 11]))[None]
    report = cp.explain(model, sharding)(input_ids=torch.zeros_like(ids), doc_ids=ids)
    assert {p.device.type for p in model.parameters()} == {device}
    return report


@pytest.fixture(scope="module")
def plain() -> Report:
    return report_of()


def needs(report: Report) -> Needs:
    assert report.target is not None
    assert report.target.needs is not None
    return report.target.needs


def taking_any(forward: Any) -> Any:
    """As decorators of transformers: Dynamo then calls the model `L['args'][0]`."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapped


@pytest.mark.long
def test_layers_of_a_decorated_model_are_told_apart(plain: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "forward", taking_any(Model.forward))
    found = needs(report_of())
    assert len(found.layers) == 2
    assert found == needs(plain)


def test_nothing_is_said_of_memory_where_layers_are_missing(plain: Report) -> None:
    target = plain.target
    assert target is not None
    assert target.of_all_layers([0, 1, 1]).needs is not None
    assert replace(target, needs=replace(needs(plain), layers=())).of_all_layers([0, 1, 1]).needs is None


@pytest.mark.long
def test_a_model_on_meta_is_explained_as_on_the_cpu(plain: Report) -> None:
    assert str(report_of(device="meta")) == str(plain)


def test_a_forecast_follows_ops_however_many_there_are(plain: Report) -> None:
    assert needs(report_of("long")).layers == needs(plain).layers


@pytest.mark.long
def test_masks_in_buffers_are_not_read_off_a_model_on_meta() -> None:
    assert report_of("buffer").ok
    assert not report_of("buffer", "meta").ok


def test_the_target_is_the_machine_that_was_asked_for(plain: Report) -> None:
    target = plain.target
    assert target is not None
    assert (target.device, target.world_size, target.ranks_per_node, target.rows) == ("h100", 4, 2, 16)
    assert len(target.attention) == 2
    site = target.attention[0]
    assert site.exchange == min(site.seconds, key=site.seconds.__getitem__)
    assert target.seconds == pytest.approx(2 * site.seconds[site.exchange])
    planned = cp.plan([13, 40, 11], 4, heads=(2, 2), head_dim=16, device="h100", ranks_per_node=2)
    assert site.across == planned.node_rows.max() * planned.model.kv_bytes > 0
    assert site.inside + site.across >= planned.recv_rows.max() * planned.model.kv_bytes
    assert "from other nodes" in str(planned)
    assert "machine   4 × h100 on 2 nodes: attention " in str(plain)
    assert re.search(r"memory    0\.\d MiB ", str(plain))
    assert target.as_dict()["planned_for"] == "2/1 heads of 16, needed; narrower rows that travel count as key heads"
    assert f"planned for {target.planned_for}" in str(plain)


@pytest.mark.long
def test_what_a_layer_keeps_is_read_off_the_graph(plain: Report) -> None:
    """Enters, normed, qkv, attention's out, the projection (the second norm reads it), normed, up, gelu."""
    kept = WIDTH * (1 + 1 + 3 + 1 + 1 + 1) + 2 * WIDE
    found, again = needs(plain), needs(report_of("checkpointed"))
    weights = sum(p.numel() for p in Block("plain").parameters())
    assert [(x.kept, x.enters, x.widest, x.queries, x.keys) for x in found.layers] == [
        (kept, WIDTH, WIDE, WIDTH, 2 * WIDTH)
    ] * 2
    assert [x.parameters for x in found.layers] == [weights] * 2
    assert (found.parameters, found.kept, found.logits) == (2 * VOCAB * WIDTH, WIDTH, VOCAB)
    assert again == found.checkpointed()


MEASURED = (
    (320, 65_536, False, 2, 39.9),
    (320, 65_536, False, 1, 79.4),
    (320, 262_144, True, 2, 26.8),
    (128_256, 65_536, True, 2, 34.7),
    (128_256, 131_072, True, 2, 60.5),
)
"""(vocabulary, tokens of a row, checkpointed, H200s, GiB per GPU), gradients accumulated: docs/guides/memory.md."""
ONCE: tuple[tuple[str, int, dict[str, Any], float], ...] = (
    ("1.1b", 131_072, {"tile": "auto"}, 20.5),
    ("1.1b", 131_072, {"tile": "auto", "on_host": ("checkpoints",)}, 18.6),
    ("0.9b", 131_072, {}, 16.1),
    ("8b", 262_144, {"tile": "auto"}, 108.5),
    ("8b", 524_288, {"tile": "auto", "on_host": ("checkpoints",)}, 120.9),
    ("1.1b", 131_072, {}, 29.6),
    ("8b-of-8", 65_536, {}, 30.1),
    ("8b-of-8", 131_072, {"tile": "auto"}, 33.6),
    ("experts-64", 65_536, {"tile": "auto", "on_host": ("checkpoints",)}, 30.3),
)
"""(model, tokens, what `Share` has, GiB a GPU), checkpointed, 2 H200 or H100, no accumulation; MLPs of 8b-of-8 are
tiled, experts are not."""


EIGHT = {"enters": 4096.0, "kept": 69632.0, "before_attention": 18432.0, "widest": 14336.0, "queries": 4096.0,
         "keys": 2048.0, "wide": 43008.0}  # fmt: skip
"""Sizes of a layer of Llama-3-8B, as `needs_of` reads them off its graph."""
EXPERTS_64 = Layer(570_560_768, 570_560_768, enters=2048.0, kept=87104.0, before_attention=16384.0, widest=22528.0,
                   queries=2048.0, keys=4096.0, grouped=22528.0)  # fmt: skip
"""A layer of 64 experts of which a token has 8, each 1,408 wide inside."""


@pytest.mark.long
def test_peaks_are_those_that_were_measured(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 2048, "intermediate_size": 7168, "num_hidden_layers": 16, "head_dim": 128}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**sizes, vocab_size=128_256, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    large = needs(explain_config(str(tmp_path), [4096], 2))
    assert len(large.layers) == 16
    assert large.all_parameters == pytest.approx(1.135e9, rel=0.001)
    small = replace(large, parameters=2 * 320 * 2048, trained=2 * 320 * 2048, logits=320)
    wide = replace(large.layers[0], parameters=218_112_000, trained=218_112_000, **EIGHT)
    eight = Needs((wide,) * 32, 2 * 128_256 * 4096, 2 * 128_256 * 4096, 4096, 128_256)
    untied = replace(large, parameters=525_336_576, trained=525_336_576)
    heads = {"1.1b": untied, "0.9b": small, "8b": eight}
    models = {name: replace(m, layers=tuple(replace(x, wide=0.0) for x in m.layers)) for name, m in heads.items()}
    models["8b-of-8"] = replace(eight, layers=eight.layers[:8])
    models["experts-64"] = Needs((EXPERTS_64,) * 4, 2 * 102_400 * 2048, 2 * 102_400 * 2048, 4096, 102_400)
    for name, tokens, given, measured in ONCE:
        model = models[name].of_loss().checkpointed()
        share = Share(tokens // 2, tokens // 2, 2, accumulated=False, **given)
        assert predict(model, share).peak / GIB == pytest.approx(measured, rel=0.1), (name, tokens, given)
    for vocabulary, tokens, checkpointed, ranks, measured in MEASURED:
        model = large if vocabulary > 320 else small
        model = model.checkpointed() if checkpointed else model
        peak = predict(model, Share(tokens // ranks, tokens // ranks, ranks)).peak / GIB
        assert peak == pytest.approx(measured, rel=0.1), (vocabulary, tokens)


@pytest.mark.long
def test_rows_of_experts_are_in_no_tile(tmp_path: Path) -> None:
    """Neither in the forecast nor in what runs, where an MLP is: where each stands depends on all."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "use_cache": False}
    experts: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 4}
    experts |= {"num_key_value_heads": 2, "mlp_only_layers": [1], "intermediate_size": 128, "vocab_size": 64}
    config = transformers.Qwen3MoeConfig(**sizes, **experts, architectures=["Qwen3MoeForCausalLM"])
    config.save_pretrained(tmp_path)
    layers = needs(explain_config(str(tmp_path), [64], 2)).layers
    assert [(layer.wide, layer.grouped) for layer in layers] == [(0, 4 * 2 * 48), (3 * 128, 0)]
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    names: dict[str, int] = dict.fromkeys(("input_ids", "position_ids", "labels"), 1)
    sharding = cp.Sharding(2, names, cp.PositionIds("position_ids"), tile=8)
    ids = torch.zeros(1, 64, dtype=torch.long)
    report = cp.explain(model, sharding)(input_ids=ids, position_ids=torch.arange(64)[None], labels=ids)
    assert sum("cp_rewrite.tiled" in line for line in report.after) == 1, "the MLP of the second layer"


def test_experts_that_run_as_one_op_count_where_no_ranks_share_them(plain: Report) -> None:
    count = 8 * 3 * 48 * WIDTH
    found, share = needs(report_of("experts")), Share(64, 64, 4)
    for layer, without in zip(found.layers, needs(plain).layers, strict=True):
        assert layer.experts == (ExpertLayer(8, 3, WIDTH, 2 * 48, 48, count, count, is_op=True),)
        assert (layer.kept, layer.kept_beside) == (without.kept, without.kept)
        assert (layer.parameters - without.parameters, layer.trained - without.trained) == (count, count)
    for experts in (1, 4):
        shared = replace(share, experts=experts)
        more = predict(found, shared).activations - predict(needs(plain), shared).activations
        assert more == pytest.approx(2 * 64 * found.layers[0].experts[0].kept(experts, 2), abs=1)


def test_tiles_spare_what_is_wide_in_a_layer_without_experts() -> None:
    """A layer's backward makes 40 elements a token again, of which 30 are in tiles."""
    layer = Layer(1000, 1000, enters=2.0, kept=42.0, before_attention=4.0, widest=10.0, wide=30.0, checkpointed=True)
    needs, share = Needs((layer,), 0, 0, 0.0, 0.0), Share(10**6, 10**6, 2)
    whole, tiled = (predict(needs, replace(share, tile=tile)) for tile in (None, 64))
    assert whole.at == tiled.at == "layer"
    assert tiled.workspace < whole.workspace - 2 * 30 * 10**6


def test_weights_that_stay_whole_are_those_of_all_blocks() -> None:
    """At the loss, in bf16; of those that are asked for ahead as many as are."""
    layer = Layer(1000, 1000, 1.0, 2.0, 1.0, 1.0)
    needs = Needs((layer,) * 6, 500, 500, 0.0, 1e6)  # so that the loss is the worst moment
    share = Share(64, 64, 2)
    for given, blocks in (({}, 2), ({"prefetch": 3}, 4), ({"resharded": False}, 6), ({"prefetch": 9}, 6)):
        memory = predict(needs, replace(share, **given))
        assert (memory.at, memory.gathered) == ("loss", 2 * (500 + 1000 * blocks)), given
    first = next(ways(needs, replace(share, resharded=False)))
    assert first.what == "parallelize(reshard_after_forward=True)"
    assert first.memory == predict(needs, share)


def test_options_leave_less_and_less_until_it_fits(plain: Report) -> None:
    target = plain.target
    assert target is not None
    peaks = [way.memory.peak for way in ways(needs(plain), target.share())]
    assert all(a > b for a, b in pairwise(peaks))
    assert fit_of(target).fits
    tight = fit_of(replace(target, device_bytes=peaks[1] + BESIDE_TENSORS))
    assert not tight.fits
    assert [what for what, _ in tight.options][-1] == [way.what for way in ways(needs(plain), target.share())][1]
    assert "does NOT fit" in str(tight)
    assert fit_of(target, data_parallel=2).memory.weights == fit_of(target).memory.weights // 2


def test_logits_that_are_returned_weigh_three_times(plain: Report, tmp_path: Path) -> None:
    """They are read off the graph; the first advice is to tile, which leaves them out."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=4096, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    found = needs(explain_config(str(tmp_path), [64], 2))
    assert (needs(plain).returned, found.returned, found.logits) == (False, True, 4096)
    share = Share(2**20, 2**20, 2)
    assert predict(found, share).logits - predict(found.of_loss(), share).logits == 4 * 2**20 * 4096
    names = [way.what for way in ways(found.checkpointed(), share)]
    assert "tile" in names[0]


@pytest.mark.long
def test_a_forecast_counts_the_logits_that_the_rewritten_graph_keeps(tmp_path: Path) -> None:
    """With `tile` an unmodified model's are left out; kept, all rows of them are there, in no tile."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.LlamaConfig(**sizes, vocab_size=4096, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    options: list[dict[str, Any]] = [{}, {"tile": "auto"}, {"tile": "auto", "keep_outputs": True}]
    plain, tiled, kept = (explain_config(str(tmp_path), [64], 2, **how).target for how in options)
    assert plain is not None
    assert tiled is not None
    assert kept is not None
    assert [(x.tile, x.needs and x.needs.returned) for x in (plain, tiled, kept)] == [
        (None, True), ("auto", False), ("auto", True)
    ]  # fmt: skip
    assert kept.memory == plain.memory
    assert tiled.needs is not None
    long = replace(tiled.share(), rows=2**20)
    of_all = predict(tiled.needs, replace(long, tile=None)).logits
    assert predict(tiled.needs, long).logits < of_all / 4


@pytest.mark.long
def test_reports_are_json_and_pages(plain: Report) -> None:
    pytest.importorskip("matplotlib")
    refused = report_of("sorted")
    values = json.loads(json.dumps(plain.as_dict()))
    assert {"ok", "sites", "refusals", "collectives", "inserts", "notes", "target"} <= {*values}
    assert values["target"]["memory"]["peak"] == plain.target.memory.peak  # type: ignore[union-attr]
    assert values["sites"][0].keys() == {"where", "mask", "exchange", "kernel", "why"}
    (refusal,) = json.loads(json.dumps(refused.as_dict()))["refusals"]
    assert refusal["reason"] == "TOKEN_MIXING"
    assert refusal["see"] == "docs/refusals.md#token_mixing"
    assert str(refused).count(refusal["see"]) == 1
    assert Path(__file__).name in refusal["where"]
    page = plain.as_html("a <model>", cp.plan([13, 40, 11], 4))
    assert "<h1>a &lt;model&gt;</h1>" in page
    assert 'src="data:image/png;base64,iVBOR' in page
    assert '<span class="added">+' in page
    assert "http" not in page
    page = refused.as_html()
    assert "<h3>TOKEN_MIXING</h3>" in page
    assert "x = torch.fft.fft(x, dim=1).real</b>" in page.replace("\n", "")


def test_the_doctor_names_problems_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("CP_REWRITE_CACHE", str(file / "folder"))
    assert main(["doctor"]) == 1
    first, second, *others = capsys.readouterr().out.splitlines()
    assert first.startswith(f"cp_rewrite {cp.__version__}: ")
    assert second.startswith(f"kernel cache   {file / 'folder'}: ")
    assert "set CP_REWRITE_CACHE" in others[0]
    assert any(line.startswith("torch  ") for line in others)
    assert machine.why_not_writable(tmp_path / "new") is None


def test_a_gpu_without_a_fast_kernel_is_a_problem() -> None:
    hopper = DeviceFacts((9, 0))
    found = {f.name: f for f in machine.kernel_findings(hopper)}
    assert "fa4" in found["kernel fa4"].remedy
    assert "flash_attn.cute is not installed" in found["kernel fa4"].value
    served = machine.kernel_findings(replace(hopper, modules=frozenset({"flash_attn.cute"})))
    assert not [f for f in served if f.remedy]
    assert not [f for f in machine.kernel_findings(DeviceFacts(None)) if f.remedy]


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"cp_rewrite {cp.__version__}\n"
