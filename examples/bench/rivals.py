"""Other packages: ring-flash-attn around the same kernel through a small shim, and torch's own context parallel, for
SDPA and for FlexAttention.

    torchrun --nproc-per-node 2 examples/bench/rivals.py [--kernel fa4]     FlexAttention's results beside one GPU's
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from methods import Alone, Setup
from packs import Pack
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import flex_attention as flex


def install_shim() -> None:
    """`flash_attn.flash_attn_interface`, which ring-flash-attn imports, answered by FlashAttention 4."""
    if "flash_attn.flash_attn_interface" in sys.modules:
        return
    import flash_attn
    import flash_attn.cute.interface as fa4

    def window(causal: bool, left: int, right: int) -> dict[str, Any]:
        sides = (None if side < 0 else side for side in (left, right))
        return dict(zip(("window_size_left", "window_size_right"), sides, strict=True), causal=causal)

    def varlen_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any,
        max_seqlen_k: Any, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Any = None, return_softmax: bool = False,
    ) -> Any:  # fmt: skip
        out, lse, *_ = fa4._flash_attn_fwd(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max(int(max_seqlen_q), 256),
            max_seqlen_k=max(int(max_seqlen_k), 256), softmax_scale=softmax_scale, return_lse=True,
            **window(causal, window_size_left, window_size_right),
        )  # fmt: skip
        return out, lse, None, None

    def varlen_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: float,
        softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
        softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    ) -> None:  # fmt: skip
        fa4._flash_attn_bwd(
            q, k, v, out, dout, softmax_lse.contiguous(), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max(int(max_seqlen_q), 256), max_seqlen_k=max(int(max_seqlen_k), 256),
            softmax_scale=softmax_scale, dq=dq, dk=dk, dv=dv, **window(causal, window_size_left, window_size_right),
        )  # fmt: skip

    def dense(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("only the variable-length entry points are answered")

    shim: Any = ModuleType("flash_attn.flash_attn_interface")
    shim._flash_attn_varlen_forward, shim._flash_attn_varlen_backward = varlen_forward, varlen_backward
    shim._flash_attn_forward = shim._flash_attn_backward = dense
    sys.modules["flash_attn.flash_attn_interface"] = shim
    flash_attn.flash_attn_interface = shim  # type: ignore[attr-defined]
    # Its adapters import names that transformers no longer has; nothing here needs them.
    adapters: Any = ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = dense
    sys.modules["ring_flash_attn.adapters"] = adapters


class _Autograd:
    """A method made of one differentiable call."""

    def __init__(self, name: str, inputs: tuple[Tensor, ...], dout: Tensor) -> None:
        self.name, self.dout = name, dout
        self.inputs = tuple(x.requires_grad_() for x in inputs)

    def call(self) -> Tensor:
        raise NotImplementedError

    def forward(self) -> object:
        self.out = self.call()
        return self.out

    def backward(self) -> object:
        return torch.autograd.grad(self.out, self.inputs, self.dout, retain_graph=True)


class RingLlama3(_Autograd):
    """ring-flash-attn, `llama3_flash_attn_varlen_func`: contiguous chunks, KV all-gathered by groups of heads."""

    def __init__(self, pack: Pack, setup: Setup) -> None:
        install_shim()
        from ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens

        cu = torch.tensor([0, *pack.lengths], device="cuda").cumsum(0).int()
        self.sizes = llama3_flash_attn_prepare_cu_seqlens(cu, True, setup.rank, setup.world_size)
        self.stride = max(1, setup.heads_kv // 2)
        rows = pack.tokens // setup.world_size
        inputs = setup.draw(rows, setup.heads), setup.draw(rows, setup.heads_kv), setup.draw(rows, setup.heads_kv)
        super().__init__("ring-flash-attn llama3", inputs, setup.draw(rows, setup.heads))

    def call(self) -> Tensor:
        from ring_flash_attn import llama3_flash_attn_varlen_func

        *sizes, local = self.sizes
        return llama3_flash_attn_varlen_func(
            *self.inputs, *sizes, heads_k_stride=self.stride, local_k_slice=local, causal=True, group=dist.group.WORLD
        )


class RingZigzag(_Autograd):
    """ring-flash-attn, `zigzag_ring_flash_attn_varlen_func`: two chunks per document and rank; every document is
    padded to a multiple of 2 P, as it demands."""

    def __init__(self, pack: Pack, setup: Setup) -> None:
        install_shim()
        from ring_flash_attn import zigzag_ring_flash_attn_varlen_func

        self.function: Any = zigzag_ring_flash_attn_varlen_func
        unit = 2 * setup.world_size
        local = [-(-length // unit) * 2 for length in pack.lengths]
        self.cu = torch.tensor([0, *local], device="cuda").cumsum(0).int()
        self.most = max(local)
        rows = sum(local)
        inputs = setup.draw(rows, setup.heads), setup.draw(rows, setup.heads_kv), setup.draw(rows, setup.heads_kv)
        super().__init__("ring-flash-attn zigzag", inputs, setup.draw(rows, setup.heads))

    def call(self) -> Tensor:
        return self.function(*self.inputs, self.cu, self.most, causal=True, group=dist.group.WORLD)


class TorchContextParallel(_Autograd):
    """`torch.distributed.tensor.experimental.context_parallel` around SDPA: one document only, keys repeated for all
    heads, the flash or cuDNN kernel that SDPA picks."""

    def __init__(self, pack: Pack, setup: Setup) -> None:
        if len(pack.lengths) > 1:
            raise ValueError("no packed documents; FlexAttention's has them")
        self.mesh = init_device_mesh("cuda", (setup.world_size,))
        # The context cuts its buffers and wants at least one; q, k and v are cut already.
        self.dummy = torch.zeros(2 * setup.world_size, device="cuda")
        shape = 1, setup.heads, pack.tokens // setup.world_size, setup.dim
        q, k, v, dout = (torch.randn(shape, device="cuda").to(setup.dtype) for _ in range(4))
        super().__init__("torch context_parallel", (q, k, v), dout)

    def call(self) -> Tensor:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        with (
            sdpa_kernel(backends, set_priority=True),
            context_parallel(self.mesh, buffers=[self.dummy], buffer_seq_dims=[0]),
        ):
            return torch.nn.functional.scaled_dot_product_attention(*self.inputs, is_causal=True)

    def backward(self) -> object:
        from torch.distributed.tensor.experimental import context_parallel

        with context_parallel(self.mesh, buffers=[self.dummy], buffer_seq_dims=[0]):
            return super().backward()


class _Flex(nn.Module):
    """The module whose keys and values torch gathers before it is called."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return compiled(flex.flex_attention)(q, k, v, enable_gqa=True, **options)


@cache
def compiled(function: Any) -> Any:
    """Compiled for each shape and rank anew."""
    torch._dynamo.config.recompile_limit = 256
    torch._functorch.config.donated_buffer = False  # the backward runs more than once
    return torch.compile(function, dynamic=False, fullgraph=True)


def block_mask(pack: Pack, block: int, device: torch.device) -> Any:
    """Causal documents. `create_block_mask` asks for every pair of tokens; compiling it takes minutes."""
    lengths = torch.tensor(pack.lengths, device=device)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths).int()

    def same_document_and_causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= starts[query])

    first = torch.arange(0, pack.tokens, block, device=device)
    last = first + block - 1
    # Queries of a block see, together, all keys from the first one's document on; each of them all from the last one's.
    seen = (first[None] <= last[:, None]) & (last[None] >= starts[first][:, None])
    full = (last[None] <= first[:, None]) & (first[None] >= starts[last][:, None])
    lists: list[Tensor] = []
    for blocks in (seen & ~full, full):
        lists += [
            blocks.sum(-1).int()[None, None],
            blocks.int().argsort(dim=-1, descending=True, stable=True).int()[None, None],
        ]
    return flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=same_document_and_causal)


class FlexTriton(_Autograd):
    """`_ContextParallel` of torch around compiled FlexAttention: keys and values all-gathered, their gradients
    reduce-scattered, a BlockMask made beforehand. `_PTRRLoadBalancer` deals out blocks of queries by how many blocks of
    keys they see: no rank has over 1.006 times its share of these on the packs of `packs.py`, up to 2.1 times with
    `_HeadTailLoadBalancer`. The one for each document wants lengths that are multiples of 2 P."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, pack: Pack, setup: Setup) -> None:
        try:
            from torch.distributed.tensor.experimental._context_parallel import (
                _context_parallel_shard,
                _ContextParallel,
                _PTRRLoadBalancer,
            )
        except ImportError as error:
            raise ImportError(f"needs torch 2.11 or later: {error}") from error
        from torch.distributed.tensor.parallel import parallelize_module

        rows = pack.tokens // setup.world_size
        q, k, v, dout = (
            setup.draw(rows, heads).transpose(0, 1)[None].contiguous()
            for heads in (setup.heads, setup.heads_kv, setup.heads_kv, setup.heads)
        )
        super().__init__(f"torch _ContextParallel, {type(self).__name__}", (q, k, v), dout)
        mesh = init_device_mesh(q.device.type, (setup.world_size,))
        block = flex._DEFAULT_SPARSE_BLOCK_SIZE
        if pack.tokens % (block * setup.world_size):
            raise ValueError(f"tokens must be a multiple of {block} on each rank")
        whole = block_mask(pack, block, q.device)
        balancer = _PTRRLoadBalancer(whole, setup.world_size)
        (self.mask,) = _context_parallel_shard(mesh, [whole], [0], balancer)
        self.rows = balancer._generate_indices()[0].view(setup.world_size, rows)[setup.rank]
        style: Any = _ContextParallel
        self.attention = parallelize_module(_Flex(), mesh, style(seq_dim=2, attention_type=style.AttentionType.FLEX))
        try:  # Compiles, alike on all ranks.
            self.forward()
            self.backward()
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def call(self) -> Tensor:
        return self.attention(*self.inputs, block_mask=self.mask, **self.options)


class FlexFlash(FlexTriton):
    """FlexAttention with FlashAttention 4's block-sparse kernels in the place of its own."""

    options: ClassVar[dict[str, Any]] = {"kernel_options": {"BACKEND": "FLASH"}}


def errors(method: FlexTriton, pack: Pack, setup: Setup) -> list[float]:
    """Largest difference of out, dq, dk and dv on this rank from one GPU's, each over the largest value."""
    alone = Alone(pack, setup)
    for whole, local in zip((alone.q, alone.k, alone.v, alone.dout), (*method.inputs, method.dout), strict=True):
        dist.broadcast(whole, 0)
        local.data.copy_(whole[method.rows].transpose(0, 1)[None])
    out: Any = alone.forward()
    grads: Any = alone.backward()
    my_out: Any = method.forward()
    my_grads: Any = method.backward()
    pairs = [
        (x[0].transpose(0, 1).float(), y[method.rows].float())
        for x, y in zip((my_out, *my_grads), (out, *grads), strict=True)
    ]
    return [float((x - y).abs().max() / y.abs().max()) for x, y in pairs]


def main() -> None:
    import argparse

    from attention import begin, made, slowest

    setup, _ = begin(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    pack = Pack("drawn", (700, 1, 130, 3000, 265))
    for factory in (FlexTriton, FlexFlash):
        method: Any = made(factory, pack, setup)
        text = method if isinstance(method, str) else [f"{slowest(error):.1e}" for error in errors(method, pack, setup)]
        if setup.rank == 0:
            print(f"{factory.__name__}: relative errors of out, dq, dk, dv: {text}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
