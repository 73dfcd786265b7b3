"""The tuned numbers of cost: what each is, its unit, and the command that measures it. Other code reads them here.

A count is how often an op passes over rows, as its source has it; the command shows predictions beside what is
measured. Seconds, and shares of a link, were measured on H200: `examples/bench/RESULTS.md` has the tables. Only speed
depends on what stands here, but all ranks must read the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

# Devices.

_Speeds = tuple[float, float, float, float, float, float, float, float, float, float, int]
SPEEDS: Mapping[str, _Speeds] = {
    # FLOP/s        bytes/s                               seconds              bytes
    # forward back  memory  link   a2a    ring   node     latency node  launch memory
    "h200": (664e12, 595e12, 4250e9, 295e9, 250e9, 200e9, 48e9, 30e-6, 60e-6, 5e-6, 140 << 30),
    "h100": (640e12, 570e12, 2950e9, 295e9, 250e9, 200e9, 48e9, 30e-6, 60e-6, 5e-6, 80 << 30),
    "a100": (190e12, 170e12, 1700e9, 200e9, 170e9, 140e9, 24e9, 30e-6, 60e-6, 6e-6, 80 << 30),
    "cpu": (50e9, 40e9, 10e9, 2e9, 2e9, 2e9, 1e9, 300e-6, 600e-6, 20e-6, 80 << 30),
}
"""Fields of a `Device`, in its order. h200: measured on 4 GPUs with NVLink. h100, a100: scaled from it by the vendor's
figures, with 80 GB. node_link: one adapter per GPU, of 400 Gbit/s (a100: 200). cpu: an order of magnitude, for
processes over gloo. Measured by `torchrun --nproc-per-node 4 -m cp_rewrite calibrate`."""

# Kernels.

TILE = 128
"""Queries, and keys, of a tile: the kernels' own."""
TILE_ROW_OVERHEAD = 2.7
"""Tiles that a row of tiles costs beside its own, as a pipeline fills and drains. With it one document of 32K tokens,
24 of mixed lengths and 64 of 512 run at one speed. Measured by `python examples/bench/kernels.py`."""
BACKWARD_FLOPS = 2.5
"""Forwards that a backward counts as: five products of matrices in the place of two."""

# Passes over rows, each a read or a write: counts. Shown by `torchrun --nproc-per-node 4
# examples/bench/exchanges.py`.

EXPANDED_PASSES = 5
"""Over the expanded rows: gathered in the forward and in the backward, dK and dV summed once."""
EXPANDED_LAUNCHES = 3
"""Kernel launches of these."""
NEEDED_PASSES, ALL_GATHER_PASSES = 21, 7
"""Over local rows: keys and values are packed, rows to be sent put behind each other, gradients rounded."""
A2A_PASSES = 8
"""Over queries, keys and values, and over outputs: heads are put together, sorted by rank, rows sorted by token; then
the same in the backward."""
A2A_COPIES = 14
"""Over keys and values, copied as if there was an exchange behind a scatter of heads."""
RING_FORWARD = 10, 17, 2
"""Over queries once, and for each step behind the first, whose output is merged in fp32; over keys and values once."""
RING_BACKWARD = 5, 5, 7, 16
"""Over queries once, and for each step, as dq is added up in fp32; over keys and values the same, for dK and dV."""

# Which exchange `auto` takes before a batch tells. Measured by `python examples/bench/plan.py`.

TOKENS_PER_RANK = 8192
"""Tokens: of a typical batch."""
FEW_TOKENS = 1024
"""Tokens of a rank: a batch with fewer says little about those that training will see."""
PACKED_SHARE, CAUSAL_SHARE = 0.2, 0.75
"""Shares of the remote rows that are read: by packed documents (on usual mixes of lengths `balanced` stays below), and
by one causal document."""
ROW_ACROSS = 1.0
"""Tenths of tiles that take as long as a row from another node: 64 and 8 heads, H200."""

# Narrower rows in the place of keys and values. Measured by `torchrun --nproc-per-node 2 examples/bench/mla.py`.

NARROW_GAIN = 0.97
"""Share of the time with keys and values: a cut is taken that is predicted to take no more. Of a whole layer 3 to 11 %
were gained where 0.91 to 0.93 were predicted, 0.4 % lost where 1.02 was."""
NARROW_PASSES = 4
"""Over what is computed again of a row: a count of reads and writes, forward and backward."""

# Push: rows beside the kernel. Measured by `torchrun --nproc-per-node 2 examples/bench/attention.py --heads 32
# --heads-kv 32`; shares of links by `torchrun --nproc-per-node 4 examples/bench/peers.py`.

PUSH_LINK = 0.8
"""Share of the link that an exchange reaches beside a kernel."""
PUSH_PARTS_LINK = 0.4
"""The same beside the early part of a backward, so that predictions are what was measured."""
PUSH_TAKEN, PUSH_TAKEN_BACK = 0.12, 0.18
"""Share of the GPU that rows, and gradients, take from the kernel meanwhile."""
PUSH_BESIDE_LINK, PUSH_BESIDE_MEMORY = 0.7, 0.12
"""Shares of the link and of the memory's speed that gradients reach beside a kernel."""
PUSH_STAGE, PUSH_STAGE_BACK = 15e-6, 35e-6
"""Seconds that a stage more takes: launches, and a GPU that empties and fills."""
PUSH_STAGES_GAIN = 0.97
"""Share of the time in one stage: several are taken where they are predicted to take less."""
PUSH_SHARES: tuple[tuple[int, ...], ...] = ((1, 1), (1, 3), (1, 7), (1, 3, 4), (1, 2, 2, 3), (1, 3, 6, 6), (2, 3, 3))
PUSH_SHARES_BACK: tuple[tuple[int, ...], ...] = ((1, 1), (1, 2, 1), (1, 1, 1, 1), (1, 3, 3, 1), (1, 2, 2, 2, 1))
"""Shares of the heads that stages may have."""
PUSH_LAG = 2048
"""Rows that could arrive in the time until the first one does, 30 us."""
PUSH_CUT_ROWS = 1024
"""Rows: a cut is made where so many arrive beside work or are read in place: two launches cost more than one."""

# Recurrent states. Measured by `torchrun --nproc-per-node 2 examples/bench/states.py`.

STATE_COPIES = 86
"""How often a token's keys and values could be copied in the time that a layer takes for the token, both ways: 10.8 ms
for 16,384 tokens of one document and 64 heads of 128 on an H200, by fla's gated delta rule; FlashQLA's takes 0.65 times
as long, Kimi delta attention 1.7 times."""
SCAN_COPIES = 6.6
"""The same of a selective scan's channels, as many keys as numbers and 1 value: 7.2 ms for 16,384 tokens and 8,192
channels with 16 numbers, by the kernels of `csrc/`."""
STATE_PASS = 0.08
"""Share of that time that one more pass over a piece takes. 14.1 ms where a rank has half of one document, cut on both
sides, and 11.5 where no piece is."""

# Experts that ranks share. Measured by `torchrun --nproc-per-node 2 examples/bench/experts.py`.

TRIPS, TRIPS_AGAIN = 4, 2
"""Trips of rows to the owners of experts, or home: of forward and backward; of a forward that is run again. Counts."""
CHOICES = 8
"""Experts that a token has, where a model's config does not tell."""

# Memory and tiles of rows. Measured by `torchrun --nproc-per-node 2 examples/bench/memory.py MODEL:TOKENS:tile`.

BESIDE_TENSORS = 5 << 30
"""Bytes of a GPU that tensors do not get: CUDA's context, NCCL's buffers, gaps between the allocator's blocks, and what
a forecast misses. Of 140 GiB 137.2 were predicted and ran out of memory, 118.0 were predicted and 126.7 ran; of 80 GiB
75.7 were predicted and ran out of memory, 73.5 ran."""
LAYERS_ON_DEVICE = 3
"""Layers whose inputs are on the device where checkpoints lie on the host: the last one's, one that is read, and one on
its way. A count."""
TILE_BYTES = 2**31
"""`tile="auto"`: the widest tensor of a tile has at most so many bytes."""
TILE_ROWS = 2**15
"""`tile="auto"`: rows beyond which products get no faster."""
TILE_GAIN, TILE_GAIN_AGAIN = 4, 1.25
"""Times the bytes that come in and go out that the widest tensor inside has, for rows to run tile by tile; and in
checkpointed blocks, whose backward computes all again in any case. Usual MLPs have that."""
PRODUCTS = 0.6
"""Share of the attention kernel's forward speed that a step's matrix products reach, all that is between them among it:
419 TFLOP/s in Llama-3-8B on H200, 352 in a Llama of 1.1B on H100, attention taken out."""
