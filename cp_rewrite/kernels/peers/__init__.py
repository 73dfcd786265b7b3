"""Rows exchanged through memory that all GPUs of one NVLink domain map: no messages.

Owners write rows where the readers' kernels read them (`push`), and read gradients where the readers' kernels write
them (`return_gradients`). Each direction has a `Channel`: symmetric memory that holds expanded rows, or their
gradients, behind the flags by which the ranks' kernels wait for each other (`csrc/peers.cuh`). NVLink multicast is
never used.

Shapes: R local rows, E expanded rows, C = Hkv * (D + V) columns, P ranks.
"""

from .channel import LaunchShape, first_lane, lane, side_stream
from .push import FEW_BLOCKS, WHOLE_GPU, Push, dense_rows
from .return_gradients import BESIDE, SHAPE, Return

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
