"""Recurrent states on GPUs, by kernels of fla (flash-linear-attention): what `ops/states` runs where they can."""
