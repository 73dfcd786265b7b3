"""The passes over a captured graph, from Dynamo's graph to one that the inner compiler gets.

`capture` (capture/) copies the graph, which is the row's (`batch/as_row.py`), and makes a `State`, which each
pass takes and hands on with what it found:

    check_frame            checks.py                 the graph begins and ends where the compiled function does
    check_size_conditions  checks.py                 what blocks that are compiled by themselves decide by a rank's
                                                     tokens must hold for the whole row
    check_checkpoints      checks.py                 blocks that are computed again read what they read before
    unify_token_sizes      graph/tokens.py           one symbol for the tokens of all inputs
    fix_module_numbers     graph/tokens.py           numbers that modules hold are constants
    match_attention        match/find_sites.py       each attention node, and what its mask means (predicate/decide.py)
    check_documents        checks.py                 attention over whole rows, where the packing names documents
    check_token_locality   locality/walk.py          nothing but attention mixes tokens; nor are filled offsets
                                                     taken for the batch's (locality/walk.py)
    plan_sites             plan_sites.py             exchange and kernel of each site
    move_exchanges         narrow.py                 what keys and values are computed from travels, where that pays
    record_masks           match/find_sites.py       masks that the first call compares, as they were
    guard_size_conditions  checks.py                 a batch for which they turn out otherwise is compiled anew
    rewrite_sites          rewrite/rewrite_sites.py  exchange and packed attention in the place of each site; what
                                                     is not the same on a shard is made so
    tile_rows              rewrite/tile_rows.py      what is wide for each token runs over some of the rows at a time;
                                                     wide outputs beside a loss are left out
    local_sizes            local_sizes.py            sizes are a rank's, where they were the row's
    verify_graph           checks.py                 the new graph is whole

Where Dynamo read the blocks of a model once, they stand in the graph once for each of their calls behind all that
(`instantiated`, instantiate.py). The first eleven only read; where one of them refuses, the graph stays as it is.
Values that passes hand on are in `values/`, what all of them ask of a graph is in `graph/`. Import as
`cp_rewrite.passes` only.
"""

if __name__ != "cp_rewrite.passes":
    raise ImportError(
        f"import this package as cp_rewrite.passes, not as {__name__}: a second copy would register twice"
    )

import logging
import time
from contextlib import ExitStack
from dataclasses import replace

from cp_rewrite.torch_internals import disable_fake_tensor_cache, fake_mode_of, hint

from .checks import (
    check_checkpoints,
    check_documents,
    check_frame,
    check_size_conditions,
    guard_size_conditions,
    verify_graph,
)
from .graph.nodes import guard_number
from .graph.tokens import module_numbers
from .instantiate import instantiate, instantiated
from .local_sizes import give_local_sizes, local_arguments, local_examples, local_sizes
from .locality.walk import check_token_locality
from .match.find_sites import match_attention, record_masks
from .narrow import move_exchanges
from .plan_sites import plan_sites
from .rewrite.rewrite_sites import rewrite_sites
from .rewrite.tile_rows import tile_rows
from .values.state import State

log = logging.getLogger(__name__)


def unify_token_sizes(state: State) -> State:
    """Guard that all token arguments have one number of tokens and of rows; refuse those that do not fit."""
    tokens = state.tokens.unified()
    return replace(state, tokens=tokens, refusals=(*state.refusals, *tokens.refusals))


def fix_module_numbers(state: State) -> State:
    """Guard that numbers of modules (heads, head dims) stay what they are: some are symbols with `dynamic=True`."""
    for value in module_numbers(state.graph_module):
        if hint(value) is not None:
            guard_number(value)
    return state


FIND = (
    check_frame,
    check_size_conditions,
    check_checkpoints,
    unify_token_sizes,
    fix_module_numbers,
    match_attention,
    check_documents,
    check_token_locality,
    plan_sites,
    move_exchanges,
    record_masks,
)
"""Passes that only read the graph: after these all refusals are known."""

CHANGE = (guard_size_conditions, rewrite_sites, tile_rows, local_sizes, verify_graph)
"""Passes that change a graph, once nothing stands against it."""

PIPELINE = FIND + CHANGE


def run_passes(state: State) -> State:
    """Run the pipeline; stop before the first change when there are refusals."""
    with ExitStack() as stack:
        mode = fake_mode_of(state.graph_module.graph.nodes)
        if mode is not None:  # of symbolic sizes its cache remembers little, and hashing them takes long
            stack.enter_context(disable_fake_tensor_cache(mode))
        for run_pass in PIPELINE:
            if run_pass in CHANGE and state.refusals:
                break
            start, ops = time.perf_counter(), len(state.graph_module.graph.nodes)
            state = run_pass(state)
            grown = len(state.graph_module.graph.nodes) - ops
            log.debug("%s: %.1f ms, %+d ops", run_pass.__name__, 1e3 * (time.perf_counter() - start), grown)
    return state


__all__ = [
    "PIPELINE",
    "State",
    "give_local_sizes",
    "guard_size_conditions",
    "instantiate",
    "instantiated",
    "local_arguments",
    "local_examples",
    "run_passes",
]
