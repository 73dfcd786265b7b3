"""Ops that are refused in some of their forms though each rank gives what one process does: what a rule could prove.

`python -m tests.rules NAME` shows the forms. An op that is not named here and is refused so fails `make sweep`.
"""

MISSING = frozenset(
    # Without a rule.
    "_upsample_bilinear2d_aa alias_copy cdist diag_embed diagonal_copy expand_copy grid_sampler_2d grid_sampler_3d "
    "logdet masked.median nanmedian "
    "narrow_copy nn.functional.adaptive_max_pool3d nn.functional.channel_shuffle nn.functional.grid_sample "
    "nn.functional.pad.reflect nn.functional.pad.replicate nn.functional.pad.replicate_negative "
    "nn.functional.pdist nn.functional.pixel_shuffle nn.functional.pixel_unshuffle norm.nuc permute_copy qr renorm "
    "rot90 select_scatter slice_scatter split_with_sizes_copy squeeze_copy take transpose_copy triangular_solve "
    "unbind_copy unfold_copy unsqueeze_copy "
    # dims=() is read as all dims, other dims of diagonals and windows of one entry as the token dim.
    # squeeze_ without dims leaves no trace of which were there.
    "squeeze flip diagonal nn.functional.local_response_norm torch.ops.aten._safe_softmax.default "
    # Refused by name, whatever the dim.
    "index_put put nonzero nonzero_static isin searchsorted "
    # Sizes that are the token count: pooled to as many as there are, interpolated to, cut into one part.
    "nn.functional.adaptive_avg_pool2d nn.functional.adaptive_avg_pool3d nn.functional.interpolate.nearest narrow "
    "split "
    # Reductions over tokens that have no way over all ranks, of numbers that happen to be the same.
    "masked.norm norm "
    # A product of three tensors, two of which have tokens in a dim that others lack.
    "nn.functional.bilinear".split()
)
