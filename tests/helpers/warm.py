"""Imports all that processes of a pool need, and runs it once, in the one that they are forked off from.

Without a backward: a process that ran one can't fork processes that do.
"""

import contextlib
import importlib
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process that looked at CUDA can't be forked

import torch

import cp_rewrite as cp
from tests.helpers.models import build_model
from tests.helpers.untimed import leave_guards_untimed

leave_guards_untimed()
torch.set_num_threads(1)  # no thread may run when a process is forked off
for _name in ("torch._functorch.aot_autograd", "transformers.models.llama.modeling_llama"):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
_batch = dict.fromkeys(("input_ids", "position_ids", "labels"), torch.arange(8)[None])
_sharding = cp.Sharding(2, dict.fromkeys(_batch, 1), cp.PositionIds("position_ids"))
cp.explain(build_model("tiny"), _sharding)(**_batch)
torch._dynamo.reset()
