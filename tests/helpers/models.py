"""Small models with fixed random weights: transformers' own, two written here in the styles of other code bases, and
one that compiles fast."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 64
END = 2  # ends documents
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": END,
    "initializer_range": 0.2,  # attention far from uniform, so that a wrong key shows
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
_DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_LONGROPE: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
                             "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 6.0, 8.0]}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """A model of transformers: class name without `Config` and head, what its small config adds, how attention runs."""

    family: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    head: str = "ForCausalLM"
    attention: str = "sdpa"


RECIPES: dict[str, Recipe] = {
    "llama": Recipe("Llama"),
    "qwen2": Recipe("Qwen2"),
    "qwen3": Recipe("Qwen3", {"head_dim": 8}),
    "mistral": Recipe("Mistral", {"sliding_window": 7}),
    "gemma2": Recipe("Gemma2", {"head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8}),
    "gemma3": Recipe("Gemma3", {"head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8, "num_hidden_layers": 4,
                                "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "phi3": Recipe("Phi3"),
    "olmo2": Recipe("Olmo2"),
    "granite": Recipe("Granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "starcoder2": Recipe("Starcoder2", {"sliding_window": 7, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "gpt_neox": Recipe("GPTNeoX"),
    "smollm3": Recipe("SmolLM3", {"num_hidden_layers": 4}),
    "cohere2": Recipe("Cohere2", {"sliding_window": 7, "head_dim": 8,
                                  "layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek_v3": Recipe(
        "DeepseekV3",
        {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
         "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 1, **_EXPERTS},
    ),
    "qwen3_moe": Recipe("Qwen3Moe", {"num_experts": 4, "head_dim": 8, **_EXPERTS}),
    "qwen3_moe_aux_loss": Recipe("Qwen3Moe", {"num_experts": 4, "head_dim": 8, **_EXPERTS, **_ROUTED}),
    "qwen2_moe_aux_loss": Recipe("Qwen2Moe", {"num_experts": 4, "shared_expert_intermediate_size": 24, **_EXPERTS,
                                              **_ROUTED}),
    "mixtral_aux_loss": Recipe("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, **_ROUTED}),
    "olmoe_aux_loss": Recipe("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, **_ROUTED}),
    "gpt_oss_aux_loss": Recipe("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
                                          "sliding_window": 7, **_ROUTED}, attention="eager"),
    "lfm2": Recipe("Lfm2", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
                            "conv_L_cache": 4}),
    "mixtral": Recipe("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": Recipe("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 7},
                      attention="eager"),
    "llama_eager": Recipe("Llama", attention="eager"),
    "gemma2_eager": Recipe("Gemma2", {"head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8,
                                      "attn_logit_softcapping": 2.0}, attention="eager"),
    "modernbert": Recipe("ModernBert", {"local_attention": 8, "global_attn_every_n_layers": 2},
                         head="ForMaskedLM"),
    "llama_flex": Recipe("Llama", {"head_dim": 16, "hidden_size": 64}, attention="flex_attention"),
    "gemma2_flex": Recipe(
        "Gemma2", {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16}, attention="flex_attention"
    ),
    "mistral_flex": Recipe("Mistral", {"head_dim": 16, "sliding_window": 7}, attention="flex_attention"),
    "qwen3_flex": Recipe("Qwen3", {"head_dim": 16}, attention="flex_attention"),
    "cohere2_flex": Recipe("Cohere2", {"head_dim": 16, "sliding_window": 7, "num_hidden_layers": 4},
                           attention="flex_attention"),
    "llama4": Recipe("Llama4", {"head_dim": 8, "attention_chunk_size": 8, "no_rope_layers": [1, 0], "moe_layers": [1],
                                "num_local_experts": 4, "intermediate_size_mlp": 48}),
    "gpt2": Recipe("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256, "attn_pdrop": 0.0,
                            "embd_pdrop": 0.0, "resid_pdrop": 0.0}, head="LMHeadModel"),
}  # fmt: skip
BY_LENGTH: dict[str, Recipe] = {
    "phi3_longrope": Recipe("Phi3", {"rope_parameters": _LONGROPE}),
    "llama_dynamic": Recipe("Llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 16}),
    "qwen2_dynamic": Recipe("Qwen2", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 16}),
    "hunyuan_dynamic": Recipe("HunYuanDenseV1", {"rope_parameters": {**_DYNAMIC, "alpha": 1000.0}, "head_dim": 8,
                                                 "max_position_embeddings": 16}),
    "gemma3_dynamic": Recipe("Gemma3", {"head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8,
                                        "layer_types": ["sliding_attention", "full_attention"],
                                        "max_position_embeddings": 16, "rope_parameters": {
                                            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                                            "full_attention": _DYNAMIC}}),
    "phimoe_longrope": Recipe("Phimoe", {"rope_parameters": {**_LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
                                         "num_local_experts": 4}),
}  # fmt: skip
"""RoPE that changes beyond 16 positions."""


def build_model(name: str, called: bool = True) -> nn.Module:
    """A model by name, the same weights on every call. `called`: as after a call without torch.compile."""
    torch.manual_seed(0)
    return _OWN[name]() if name in _OWN else _from_transformers(RECIPES[name], called)


def _from_transformers(recipe: Recipe, called: bool) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    if recipe.attention == "flex_attention":
        # Otherwise it calls create_block_mask(_compile=True), which torch 2.13 can't trace: it warns there.
        masking: Any = importlib.import_module("transformers.masking_utils")
        masking._is_torch_greater_or_equal_than_2_6 = False
    name = recipe.family + ("Text" if recipe.family in ("Gemma3", "Llama4") else "")
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **recipe.options}, attn_implementation=recipe.attention)
    model = getattr(transformers, recipe.family + recipe.head)(config)
    if model.loss_type is None:  # it would warn, which can't be traced
        model.loss_type = "ForCausalLM"
    if called and "output_router_logits" in recipe.options:  # its first call takes a lock, which can't be traced
        capturing: Any = importlib.import_module("transformers.utils.output_capturing")
        capturing.maybe_install_capturing_hooks(model.model)
    return model


class Output(NamedTuple):
    """Outputs of the models written here, under the names that transformers uses."""

    loss: Tensor
    logits: Tensor


def next_token_loss(logits: Tensor, labels: Tensor, shift_labels: Tensor | None, count: Tensor | None) -> Tensor:
    """Mean over all targets; with `shift_labels` and their global `count` this rank's part of it."""
    if shift_labels is None or count is None:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum") / count


class GPT(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """In the style of nanoGPT: learned positions from arange, one fused projection, is_causal, tied head."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2, mean: bool = False) -> None:
        super().__init__()
        self.heads, self.mean = heads, mean
        self.wte, self.wpe = nn.Embedding(VOCAB, width), nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(width),
                    "c_attn": nn.Linear(width, 3 * width),
                    "c_proj": nn.Linear(width, width),
                    "ln_2": nn.LayerNorm(width),
                    "mlp": nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                }
            )
            for _ in range(layers)
        )
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> Output:
        b, t = input_ids.size()
        pos = torch.arange(0, t, dtype=torch.long, device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(pos)
        block: Any
        for block in self.blocks:
            q, k, v = block["c_attn"](block["ln_1"](x)).split(x.size(-1), dim=2)
            q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
            x = x + block["c_proj"](y.transpose(1, 2).contiguous().view(b, t, -1))
            x = x + block["mlp"](block["ln_2"](x))
        logits = self.lm_head(self.ln_f(x))
        if self.mean and shift_labels is not None:
            return Output(F.cross_entropy(logits.view(-1, VOCAB), shift_labels.view(-1)), logits)
        return Output(next_token_loss(logits, labels, shift_labels, num_items_in_batch), logits)


class Titan(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """In the style of torchtitan's Llama: complex rotary table, repeated key heads, a block-causal mask made once."""

    freqs_cis: Tensor

    def __init__(self, width: int = 32, heads: int = 4, kv_heads: int = 2, layers: int = 2, eos: int | None = None):
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.eos = heads, kv_heads, width // heads, eos
        self.tok_embeddings = nn.Embedding(VOCAB, width)
        angles = torch.outer(torch.arange(256.0), 1.0 / 10000 ** (torch.arange(0, self.dim, 2) / self.dim))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)
        kv = kv_heads * self.dim
        self.layers = nn.ModuleDict(
            {
                str(i): nn.ModuleDict(
                    {
                        "attention_norm": nn.RMSNorm(width),
                        "wq": nn.Linear(width, width, bias=False),
                        "wk": nn.Linear(width, kv, bias=False),
                        "wv": nn.Linear(width, kv, bias=False),
                        "wo": nn.Linear(width, width, bias=False),
                        "ffn_norm": nn.RMSNorm(width),
                        "w1": nn.Linear(width, 2 * width, bias=False),
                        "w2": nn.Linear(2 * width, width, bias=False),
                        "w3": nn.Linear(width, 2 * width, bias=False),
                    }
                )
                for i in range(layers)
            }
        )
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, VOCAB, bias=False)

    def documents(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        if self.eos is None:
            return (position_ids == 0).cumsum(1)
        ends = (input_ids == self.eos).int()
        return ends.cumsum(1) - ends

    def attention(self, layer: Any, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        bs, seqlen, _ = x.shape
        q, k, v = (layer[w](x).view(bs, seqlen, -1, self.dim) for w in ("wq", "wk", "wv"))
        q, k = rotate(q, freqs_cis), rotate(k, freqs_cis)
        k, v = (repeat_kv(part, self.heads // self.kv_heads) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return layer["wo"](out.transpose(1, 2).contiguous().view(bs, seqlen, -1))

    def block(self, layer: Any, h: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        h = h + self.attention(layer, layer["attention_norm"](h), freqs_cis, mask)
        x = layer["ffn_norm"](h)
        return h + layer["w2"](F.silu(layer["w1"](x)) * layer["w3"](x))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> Output:
        doc = self.documents(input_ids, position_ids)
        index = torch.arange(input_ids.shape[1], device=input_ids.device)
        mask = (doc[:, None, :, None] == doc[:, None, None, :]) & (index[:, None] >= index[None, :])
        h, freqs_cis = self.tok_embeddings(input_ids), self.get_buffer("freqs_cis")[position_ids]
        layer: Any
        for layer in self.layers.values():
            h = self.block(layer, h, freqs_cis, mask)
        logits = self.output(self.norm(h))
        return Output(next_token_loss(logits, labels, shift_labels, num_items_in_batch), logits)


def rotate(x_BTHD: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotary embedding by complex numbers, freqs_cis (B, T, D / 2)."""
    pairs = torch.view_as_complex(x_BTHD.float().reshape(*x_BTHD.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis[:, :, None]).flatten(3).type_as(x_BTHD)


def repeat_kv(x_BTHD: Tensor, n: int) -> Tensor:
    """Each head n times in a row."""
    bs, seqlen, heads, dim = x_BTHD.shape
    return x_BTHD[:, :, :, None, :].expand(bs, seqlen, heads, n, dim).reshape(bs, seqlen, heads * n, dim)


class Tiny(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """One layer of grouped-query attention. It compiles in a quarter of Llama's time."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCAB, width), nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, VOCAB)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> Output:
        doc = (position_ids == 0).cumsum(1)
        mask = (doc[:, None, :, None] == doc[:, None, None, :]).tril()
        x = self.embed(input_ids) + position_ids[..., None].cos()
        q, kv = self.qkv(x).split(x.shape[-1], -1)
        q, kv = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, kv))
        k, v = kv.chunk(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
        logits = self.head(x + y.flatten(2))
        return Output(next_token_loss(logits, labels, shift_labels, num_items_in_batch), logits)


_OWN: dict[str, Callable[[], nn.Module]] = {
    "nanogpt": GPT,
    "nanogpt_mean_loss": functools.partial(GPT, mean=True),
    "torchtitan": Titan,
    "torchtitan_eos_mask": functools.partial(Titan, eos=END),
}
MODELS = (*RECIPES, *(name for name in BY_LENGTH if name != "phimoe_longrope"), *_OWN)  # which draws experts
_OWN["tiny"] = Tiny
_OWN.update({name: functools.partial(_from_transformers, recipe, True) for name, recipe in BY_LENGTH.items()})
