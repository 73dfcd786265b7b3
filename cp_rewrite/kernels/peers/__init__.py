"""Rows exchanged through memory that all GPUs of one NVLink domain map: no messages.

Owners write rows where the readers' kernels read them (`Push`), and read gradients where the readers' kernels write
them (`Return`). Each direction has a `Channel`: symmetric memory that holds expanded rows, or their
gradients, behind the flags by which the ranks' kernels wait for each other (`csrc/peers.cuh`). NVLink multicast is
never used.

Shapes: R local rows, E expanded rows, C = Hkv * (D + V) columns, P ranks.
"""

from .channel import LaunchShape, first_lane, lane, side_stream
from .push import BESIDE, FEW_BLOCKS, SHAPE, WHOLE_GPU, Push, Return, dense_rows

__all__ = [
    "BESIDE",
    "FEW_BLOCKS",
    "SHAPE",
    "WHOLE_GPU",
    "LaunchShape",
    "Push",
    "Return",
    "dense_rows",
    "first_lane",
    "lane",
    "side_stream",
]
