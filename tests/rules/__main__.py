"""`python -m tests.rules add mean`: what the proof claims of these ops (by default of all) against what ranks give.

Prints what is wrong, what is refused though it would be right, and how many trials ended how.
"""

from __future__ import annotations

import argparse

from .samples import ops
from .trials import of_op

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("ops", nargs="*", help="names in torch's table of ops, or the beginnings of some")
parser.add_argument("--samples", type=int, default=20, help="of each op")
parser.add_argument("--claims", type=int, default=4, help="of each sample")
given = parser.parse_args()
if unknown := [name for name in given.ops if not any(op.startswith(name) for op in ops())]:
    parser.error(f"{', '.join(unknown)}: torch has no samples of such ops, or `LEFT_OUT` of `samples.py` names them")
for name in sorted(ops()):
    if not given.ops or name.startswith(tuple(given.ops)):
        found = of_op(name, given.samples, given.claims)
        print(name, dict(found.counts), flush=True)
        for line in (*found.wrong, *(f"missing: {x}" for each in found.missing.values() for x in each)):
            print("   ", line, flush=True)
