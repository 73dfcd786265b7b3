"""A dry run from a config alone: no weights, the layers that show each kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cp_rewrite.__main__ import main
from cp_rewrite.diagnose.config import RULE, explain_config, fit_of
from cp_rewrite.planning.cost.constants import BESIDE_TENSORS
from cp_rewrite.planning.cost.devices import DEVICES
from cp_rewrite.planning.cost.memory import NEWER_TORCH, predict

CAUSAL = "same document & causal"
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 3 layers with a window and 1 without."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = transformers.Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=7,
        layer_types=kinds,
    )
    folder = tmp_path_factory.mktemp("gemma3")
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.long
def test_command_explains_a_model_by_its_config(gemma3: str, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", gemma3, "--lengths", "13,1,7", "--diff"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert "tracing the model's layers" in err
    assert out.startswith("4 attention sites, 0 refusals")  # the last layer is the first without a window
    assert "same document & causal & window (6, 0) | needed" in out
    assert "+packed_attention_default" in out
    assert "note      explained with use_cache=False, where the config says True" in out


def test_sites_are_those_of_the_target(tmp_path: Path):
    """Between GPUs of a node rows are written beside the kernel: a dry run without GPUs weighs that, too. Kernels are
    those of the target, not of this machine."""
    transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128
    ).save_pretrained(tmp_path)  # fmt: skip
    report = explain_config(str(tmp_path), [100_000, 20_000, 11_072], 8)
    assert report.target is not None
    (attention, *_) = report.target.attention
    assert {site.exchange for site in report.sites} == {attention.exchange}
    assert f"predicted {1e3 * attention.seconds[attention.exchange]:.2f} ms" in str(report)
    assert {site.kernel for site in report.sites} == {"fa4"}
    assert "kernels are those of an h200 in bfloat16" in str(report)
    assert "needs a CUDA GPU" not in str(report)


def test_masks_in_buffers_are_read_off_what_the_model_writes_there(tmp_path: Path):
    """GPT-Neo keeps its triangles in buffers."""
    transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, window_size=7, max_position_embeddings=256,
        attention_types=[[["global", "local"], 1]], bos_token_id=1, eos_token_id=2, architectures=["GPTNeoForCausalLM"]
    ).save_pretrained(tmp_path)  # fmt: skip
    report = explain_config(str(tmp_path), [13, 1, 7], 2, speeds="a100", kernel="aten_flash")
    assert report.ok, str(report)
    assert [site.mask for site in report.sites] == [CAUSAL, f"{CAUSAL} & window (6, 0)"]
    assert {site.kernel for site in report.sites} == {"aten_flash"}  # though it is named, and is not for CPUs


@pytest.mark.parametrize("layers", ["0", "5"])
def test_layers_that_the_config_lacks_are_an_error(layers: str, gemma3: str, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", gemma3, "--lengths", "13,1,7", "--layers", layers]) == 2
    assert f"layers must be from 1 to the config's 4, got {layers}" in capsys.readouterr().err


def test_folder_without_a_config_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(tmp_path), "--lengths", "13"]) == 2
    assert "cp_rewrite explain: " in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "other"), "--lengths", "13"]) == 2
    assert "other is not there: give a folder" in capsys.readouterr().err


@pytest.mark.long
def test_a_recipe_is_the_least_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its command is one that the example reads; with less done the model does not fit."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    transformers.LlamaConfig(vocab_size=8192, **sizes, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    asked = ["--gpus", "4", "--tokens", str(1 << 20), "--json"]
    assert main(["recipe", str(tmp_path), *asked]) == 0
    ample = json.loads(capsys.readouterr().out)
    assert (ample["mesh"], ample["checkpointed"], ample["tile"], ample["offload"]) == (
        {"dp": 4, "cp": 1},
        False,
        None,
        [],
    )
    assert ample["peak_without_reshard"] > ample["peak"]
    small = tmp_path / "small.json"
    replace(DEVICES["h100"], device_bytes=BESIDE_TENSORS + (4 << 30)).save(small)
    assert main(["recipe", str(tmp_path), *asked, "--gpu", str(small)]) == 0
    tight = json.loads(capsys.readouterr().out)
    assert tight["peak"] <= tight["room"] == 4 << 30
    assert (tight["checkpointed"], tight["tile"]) == (True, "auto")
    assert tight["longest_row"] >= 1 << 20
    assert tight["command_mesh"] == {"cp": 4}
    assert "--checkpointing --tile" in tight["command"]
    assert 'tile="auto"' in tight["code"]
    plain = explain_config(str(tmp_path), [1 << 20], 4, speeds=str(small), checkpointed=True).target
    assert plain is not None
    assert plain.needs is not None
    assert predict(plain.needs, replace(plain.share(), accumulated=False)).peak > plain.room
    replace(DEVICES["h100"], device_bytes=BESIDE_TENSORS + (1 << 20)).save(small)
    assert main(["recipe", str(tmp_path), *asked[:-1], "--gpu", str(small)]) == 1
    assert "does NOT fit" in capsys.readouterr().out


@pytest.mark.long
def test_a_recipe_takes_the_fewest_options_before_the_fewest_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Where nothing has to be done on four ranks, four share a row, though two could with checkpoints. The output says
    the rule, how close it is, and which mesh is whose."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    transformers.LlamaConfig(vocab_size=64, **sizes, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    tokens = 1 << 20
    target = explain_config(str(tmp_path), [tokens], 4).target
    assert target is not None
    assert target.needs is not None
    share = replace(target.share(), accumulated=False)
    on_two = replace(share, rows=tokens // 2, expanded=2 * share.expanded)
    least, room = predict(target.needs, share).peak, predict(target.needs, on_two).peak - 1
    assert least < room
    assert predict(target.needs.checkpointed(), on_two).peak < room
    small = str(tmp_path / "small.json")
    replace(DEVICES["h200"], device_bytes=BESIDE_TENSORS + room).save(small)
    assert main(["recipe", str(tmp_path), "--gpus", "4", "--tokens", str(tokens), "--gpu", small]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"mesh (dp, cp) = (1, 4): 4 GPUs share a row of {tokens:,} tokens; nothing else needed\n")
    assert f"{RULE}; one option more may let fewer\n" in said
    assert f"fits, {(room - least) / 2**30:.1f} GiB left" in said
    assert "mesh of its own" not in said  # it is the same
    replace(DEVICES["h200"], device_bytes=BESIDE_TENSORS + room + 1).save(small)
    assert main(["recipe", str(tmp_path), "--gpus", "4", "--tokens", str(tokens), "--gpu", small]) == 0
    said = capsys.readouterr().out
    assert "mesh (dp, cp) = (2, 2): 2 GPUs share a row" in said
    assert "with a mesh of its own: all 4 GPUs share the 2 rows of a batch" in said
    assert "--rows 2" in said


@pytest.mark.long
def test_forecasts_and_recipes_know_experts_that_ranks_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 4096, "vocab_size": 64}
    config = transformers.Qwen3MoeConfig(**sizes, **experts, head_dim=32, architectures=["Qwen3MoeForCausalLM"])
    config.save_pretrained(tmp_path)
    target = explain_config(str(tmp_path), [64], 8).target
    assert target is not None
    assert target.needs is not None
    per_layer = 12 * 3 * 64 * 4096
    assert [each.parameters for each in target.needs.expert_layers] == [per_layer] * 2
    alone, shared = fit_of(target, checkpointed=True).memory, fit_of(target, checkpointed=True, experts=4).memory
    assert alone.gathered - shared.gathered == 2 * per_layer * 3 // 4  # of the first layer, in its backward
    assert (alone.weights, alone.optimizer) == (shared.weights, shared.optimizer)
    for ask, words in {
        (8, ()): "must divide a layer's experts that ranks can share: the model has 12",
        (3, ()): "must divide the 8 ranks that weights are sharded over",
        (4, ("weights",)): "leave 'weights' out of offload",
    }.items():
        with pytest.raises(ValueError, match=words):
            fit_of(target, experts=ask[0], offload=ask[1])
    small = tmp_path / "small.json"
    replace(DEVICES["h100"], device_bytes=BESIDE_TENSORS + (alone.peak + shared.peak) // 2).save(small)
    words = [str(tmp_path), "--tokens", "64", "--gpu", str(small)]
    assert main(["memory", *words, "--world-size", "8", "--checkpointed"]) == 1
    fits = f"parallelize(experts=4) with {NEWER_TORCH}: {shared.peak / 2**20:.1f} MiB, fits"
    assert fits in capsys.readouterr().out
    assert main(["memory", *words, "--world-size", "8", "--checkpointed", "--experts", "4"]) == 0
    capsys.readouterr()
    assert fit_of(target, experts="auto").share.experts == 4
    slow = replace(target, speeds=replace(target.speeds, latency=1.0))
    assert fit_of(slow, experts="auto").share.experts == 1
    assert fit_of(target, experts="auto", offload=("weights",)).share.experts == 1
    quick = tmp_path / "quick.json"
    replace(DEVICES["h100"], latency=1e-9, all_to_all=1e15, device_bytes=BESIDE_TENSORS + (4 << 30)).save(quick)
    assert main(["memory", *words[:-1], str(quick), "--world-size", "8", "--experts", "auto"]) == 0
    assert f"weights sharded over 8, experts=4 with {NEWER_TORCH}; fp32 weights" in capsys.readouterr().out
    assert main(["memory", *words[:-1], str(quick), "--world-size", "8", "--nodes", "4", "--experts", "auto"]) == 0
    assert f"weights sharded over 8, experts=2 with {NEWER_TORCH}; fp32 weights" in capsys.readouterr().out
    assert main(["memory", *words, "--world-size", "8", "--experts", "all"]) == 2
    assert "--experts must be a whole number or auto, got 'all'" in capsys.readouterr().err
    assert main(["recipe", *words, "--gpus", "8"]) == 0
    said = capsys.readouterr().out
    assert "4 ranks share experts" in said
    assert "mp_policy=half, experts=4)  # with torch 2.13 or newer" in said
    assert "train_checkpoint.py" not in said
