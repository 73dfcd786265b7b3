"""Other packages around the same kernel: ring-flash-attn through a small shim, and torch's own context parallel."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from methods import Setup
from packs import Pack
from torch import Tensor


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
            raise ValueError("no packed documents; FlexAttention's has them, from torch 2.14 on")
        from torch.distributed.device_mesh import init_device_mesh

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
