"""A dry run from a config alone: no weights, the layers that show each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from cp_rewrite.__main__ import main

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
    out = capsys.readouterr().out
    assert out.startswith("4 attention sites, 0 refusals")  # the last layer is the first without a window
    assert "same document & causal & window (6, 0) | needed" in out
    assert "+packed_attention_default" in out


@pytest.mark.parametrize("layers", ["0", "5"])
def test_layers_that_the_config_lacks_are_an_error(layers: str, gemma3: str, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", gemma3, "--lengths", "13,1,7", "--layers", layers]) == 2
    assert f"layers must be from 1 to the config's 4, got {layers}" in capsys.readouterr().err


def test_folder_without_a_config_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(tmp_path), "--lengths", "13"]) == 2
    assert "cp_rewrite explain: " in capsys.readouterr().err
