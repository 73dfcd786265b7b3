"""Small configs of the models of `transformers`, by rules that hold for all of them."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

VOCAB = 64
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim", "emb_dim", "embed_dim",
           "rnn_hidden_size", "attention_hidden_size")  # fmt: skip
_INNER = ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "d_inner", "hidden_dim", "inner_dim", "encoder_ffn_dim",
          "decoder_ffn_dim", "ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size",
          "shared_intermediate_size",
          "moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
          "expert_ffn_hidden_size", "mlp_intermediate_size", "dff", "feed_forward_size", "expert_intermediate_size",
          "moe_ffn_hidden_size", "intermediate_dim")  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
           "num_decoder_layers",
           "num_encoder_layers")  # fmt: skip
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
          "num_encoder_attention_heads", "num_decoder_attention_heads")  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "num_selected_experts")
_OTHERS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_key_value_heads": 2,
    "n_kv_heads": 2,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "max_sequence_length": 256,
    "original_max_position_embeddings": 256,
    "type_vocab_size": 2,
    "sliding_window": 7,
    "attention_chunk_size": 8,
    "initializer_range": 0.2,  # attention far from uniform, so that a wrong key shows
    "init_std": 0.2,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "head_dim": 8,
    "d_kv": 8,
    "query_pre_attn_scalar": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "mamba_d_state": 8,
    "mamba_d_head": 8,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_d_ssm": 64,
    "state_size": 8,
    "chunk_size": 8,
    "time_step_rank": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_topk": 8,
    # Every kind of layer in two layers, and windows and blocks that are shorter than the documents.
    "use_sliding_window": True,
    "max_window_layers": 1,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "attn_layer_indices": [1],
    "local_attention": 14,
    "attention_window": 8,
    "attention_window_size": 8,
    "sliding_window_size": 7,
    "keep_window_size": 8,
    "local_radius": 7,
    "block_size": 8,
    "global_block_size": 4,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "index_kpool": 4,
}
SMALL: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(_INNER, 48),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_PER_TOKEN, 2),
    **_OTHERS,
}
"""Field -> value, in configs that have the field."""

_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_PART = {name: value for name, value in SMALL.items() if name not in ("sliding_window", "query_pre_attn_scalar")}
FAMILIES: dict[str, dict[str, Any]] = {
    "bigbird_pegasus": {"attention_type": "original_full"},
    "big_bird": {"attention_type": "original_full"},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {
        kind: {**_ROPE, "mrope_section": [2, 1, 1]} for kind in ("full_attention", "sliding_attention")}},
    "cpmant": {"dim_head": 8, "dim_ff": 48},
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": 0.0}},
    "deepseek_v4": {"num_hidden_layers": 4, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "layer_types": [
        "sliding_attention", "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "esmc": {"num_key_value_heads": 4},
    "gemma3": {"text_config": {**_PART, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
               "vision_config": {**_PART, "image_size": 8, "patch_size": 4}, "mm_tokens_per_image": 4},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 1, "laurel_rank": 8,
                     "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]},
    "gemma4": {"text_config": {
                   "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8,
                   "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0,
                   "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48,
                   "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "use_cache": False},
               "vision_config": None, "audio_config": None, "image_token_id": 60, "video_token_id": 61,
               "audio_token_id": 62},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 7},
    "gptj": {"rotary_dim": 4},
    "inkling_text": {"swa_head_dim": 8, "rel_extent": 64},
    "jetmoe": {"kv_channels": 8},
    "kimi_linear": {"linear_head_dim": 8},
    "layoutlm": {"max_2d_position_embeddings": 64},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "luke": {"entity_vocab_size": 64, "entity_emb_size": 16},
    "mamba2": {"head_dim": 8, "num_heads": 8, "n_groups": 1},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "nemotron_h": {"ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8},
    "paligemma": {"text_config": {**_PART, "model_type": "gemma"}, "projection_dim": 32,
                  "vision_config": {**_PART, "model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4}},
    "neomme": {"head_dim": 16, "hidden_size": 64},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                       "indexer_compress_ratio": 4, "hc_lowrank": 8, "ngram_vocab_size_base": 64},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"],
                 "attention_head_size": 8},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {"pronunciation_embed_dim": 16, "shape_embed_dim": 16, "pronunciation_vocab_size": 64,
                 "shape_vocab_size": 64},
    "fsmt": {"src_vocab_size": 64, "tgt_vocab_size": 64, "langs": ["en", "de"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "attention_hidden_size": 64,
              "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zamba2": {"attention_hidden_size": 64, "layers_block_type": ["linear_attention", "hybrid"], "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
"""Model type -> what its small config needs besides."""


def small_config(kind: Any, **options: Any) -> Any:
    """A config of class `kind`, its configs of parts small too; without dropout."""
    known = kind().to_dict()
    values = {name: value for name, value in SMALL.items() if name in known}
    values |= {
        name: 0.0 for name, value in known.items() if "drop" in name and (value is None or isinstance(value, float))
    }
    values |= layers_of(kind, known)
    if "kv_lora_rank" in known:  # keys and values are expanded for every head
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name, part in getattr(kind, "sub_configs", {}).items():
        if hasattr(part, "model_type"):
            values[name] = small_config(part).to_dict()
    values |= FAMILIES.get(kind.model_type, {}) | options
    return kind(**values)


def layers_of(kind: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """The number of layers, and their kinds where a config of class `kind` lists them: a layer for each combination
    that its default has, and one for each kind besides that the code of its models tells apart."""
    counts = [name for name in _LAYERS if name in known]
    lists = {name: values for name, values in known.items() if isinstance(values, list) and counts}
    lists = {name: values for name, values in lists.items() if len(values) == known[counts[0]]}
    lists = {name: values for name, values in lists.items() if name in NAMED or 1 < len({*values}) < 5}
    rows = [*dict.fromkeys(zip(*lists.values(), strict=True))]
    for at, name in enumerate(lists):
        for other in [each for each in sorted(named_in(kind) & NAMED.get(name, set())) if each not in known[name]]:
            rows.append((*rows[-1][:at], other, *rows[-1][at + 1 :]))
    if not rows:
        return {}
    rows += rows[-1:] * (2 - len(rows))
    columns = [[*column] for column in zip(*rows, strict=True)]
    return dict.fromkeys(counts, len(rows)) | dict(zip(lists, columns, strict=True))


NAMED = {
    "layer_types": {"full_attention", "sliding_attention", "chunked_attention", "minimax_m3_sparse", "hybrid_sliding",
                    "linear_attention", "hybrid"},
    "mlp_layer_types": {"dense", "sparse"},
}  # fmt: skip
"""Field of a config -> kinds of layers that may stand in it."""


@functools.cache
def named_in(kind: Any) -> set[str]:
    """The kinds of layers that the code of a config's models compares with, and what they are told apart from."""
    try:
        code = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return set()
    found = {*re.findall(r'[=!]= "(\w+)"', inspect.getsource(code))}
    if found & {"sliding_attention", "linear_attention"}:
        found.add("full_attention")
    return found | ({"dense", "sparse"} if found & {"dense", "sparse"} else set())


def class_of(name: str) -> Any:
    """A class of transformers by name."""
    transformers: Any = importlib.import_module("transformers")
    return getattr(transformers, name)
