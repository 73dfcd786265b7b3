"""Command line: `python -m cp_rewrite recipe …`, `memory …`, `explain …`, `plan …`, `doctor` and `calibrate …`."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import socket
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cp_rewrite.planning.cost.constants import SPEEDS
from cp_rewrite.planning.names import LAYOUTS

from . import __version__
from .arguments import whole_number

if TYPE_CHECKING:
    # Imported where it is used, as what brings numpy: `--version` answers without these.
    from cp_rewrite.diagnose.explain import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0; 1 for a model that is refused or does not fit, or a machine with problems; or 2 after
    one line on stderr about a bad argument."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, OSError, ImportError) as error:
        print(f"cp_rewrite {arguments.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cp_rewrite", description=__doc__)
    parser.add_argument("--version", action="version", version=f"cp_rewrite {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("plan", help="plan one row of packed documents and compare layouts and exchanges")
    p.add_argument("--lengths", required=True, help="document lengths in tokens: 3104,3200,… or a file of them")
    p.add_argument("--world-size", type=int, required=True, help="ranks")
    p.add_argument("--layout", default="all", help=f"one of {', '.join(LAYOUTS)}, or all (default)")
    p.add_argument("--total", type=int, help="tokens of the row, if more than the lengths' sum")
    p.add_argument("--chunk-size", type=int, default=1, help="cut documents only at multiples of so many tokens")
    p.add_argument("--pad-to-multiple", type=int, default=1, help="round tokens per rank up to a multiple of it")
    p.add_argument("--full", action="store_true", help="attention sees the whole document, not only its past")
    p.add_argument("--window", help="left,right in tokens; no limit on the left: --window=-1,64")
    p.add_argument("--heads", default="64,8", help="query heads, key/value heads (default 64,8)")
    p.add_argument("--head-dim", type=int, default=128)
    p.add_argument("--device", default="h200", help=f"{', '.join(SPEEDS)}, or a file made by calibrate")
    p.add_argument("--ranks-per-node", type=int, help="ranks that share fast links (default: all)")
    p.add_argument("--nodes", type=int, help="machines that the ranks are on, equally many on each (default: 1)")
    p.add_argument("--plot", help="write a picture of the cheapest plan to this file")
    p.set_defaults(run=_plan)
    e = commands.add_parser("explain", help="what would be rewritten in a model of transformers, from its config alone")
    _add_target(e)
    e.add_argument("--lengths", required=True, help="document lengths in tokens: 3104,3200,… or a file of them")
    e.add_argument("--layers", type=int, help="layers to look at (default: the first of each kind, at least 2)")
    e.add_argument("--checkpointed", action="store_true", help="every layer under gradient checkpointing")
    e.add_argument("--tile", action="store_true", help="Sharding(tile='auto')")
    e.add_argument("--diff", action="store_true", help="print the graph diff too")
    e.add_argument("--json", action="store_true", help="print JSON: the keys of Report.as_dict")
    e.add_argument("--html", help="write a page of HTML to this file")
    e.set_defaults(run=_explain)
    m = commands.add_parser("memory", help="the peak of one GPU in training, and what would make it fit")
    _add_target(m)
    m.add_argument("--tokens", type=int, help="tokens of a row, taken as one document")
    m.add_argument("--lengths", help="document lengths of a row instead: 3104,3200,… or a file of them")
    m.add_argument("--checkpointed", action="store_true", help="every layer under gradient checkpointing")
    m.add_argument("--tile", action="store_true", help="Sharding(tile='auto')")
    m.add_argument("--loss-alone", action="store_true", help="a model that returns no logits")
    m.add_argument("--offload", nargs="+", default=(), choices=["checkpoints", "weights"], help="what lies on the host")
    m.add_argument("--experts", default="1", help="ranks that share one set of experts, or auto (default 1)")
    m.add_argument(
        "--reshard-after-forward",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="blocks' weights are dropped behind their forward, as parallelize does unless told (default: yes)",
    )
    m.add_argument("--prefetch", type=int, default=1, help="blocks whose weights are asked for ahead (default 1)")
    m.add_argument("--data-parallel", type=int, default=1, help="groups that weights are sharded over too (default 1)")
    m.add_argument("--json", action="store_true", help="print JSON")
    m.set_defaults(run=_memory)
    r = commands.add_parser(
        "recipe", help="what to do for a model to train on so many GPUs, and the command that does it"
    )
    r.add_argument("model", help="a folder with a config.json, or a name that transformers finds")
    r.add_argument("--gpus", type=int, required=True, help="all GPUs")
    r.add_argument("--gpu", default="h200", help=f"{', '.join(SPEEDS)}, or a file made by calibrate")
    r.add_argument("--nodes", type=int, default=1, help="machines that the GPUs are in (default 1)")
    r.add_argument("--tokens", type=int, help="tokens of a row, taken as one document")
    r.add_argument("--lengths", help="document lengths of a row instead: 3104,3200,… or a file of them")
    r.add_argument("--json", action="store_true", help="print JSON")
    r.set_defaults(run=_recipe)
    d = commands.add_parser("doctor", help="what of this machine stands in the way: versions, kernels, links, limits")
    d.set_defaults(run=_doctor)
    c = commands.add_parser("calibrate", help="measure kernel, memory and link speeds for the cost model, once")
    c.add_argument("--output", default="device.json", help="file to write (default device.json)")
    c.add_argument("--name", help="name of the device (default: what torch calls it)")
    c.set_defaults(run=_calibrate)
    return parser


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a folder with a config.json, or a name that transformers finds")
    parser.add_argument("--world-size", type=int, default=2, help="ranks of the context-parallel group (default 2)")
    parser.add_argument("--gpu", default="h200", help=f"{', '.join(SPEEDS)}, or a file made by calibrate")
    parser.add_argument("--nodes", type=int, default=1, help="machines that the ranks are spread over (default 1)")


def _plan(arguments: argparse.Namespace) -> int:
    """Print the cheapest plan, and a table of all layouts if there are several."""
    from cp_rewrite.masks import PackedMask  # late, as the next
    from cp_rewrite.planning.plan import compare, plan

    lengths = _lengths(arguments.lengths)
    heads = _pair("--heads", arguments.heads)
    window = None if arguments.window is None else _pair("--window", arguments.window)
    mask = PackedMask(causal=not arguments.full, window=window)
    whole_number("--world-size", arguments.world_size)
    per_node = _ranks_per_node(arguments)
    layouts = LAYOUTS if arguments.layout == "all" else (arguments.layout,)
    plans = {
        layout: plan(
            lengths,
            arguments.world_size,
            layout,
            mask,
            heads,
            arguments.head_dim,
            total=arguments.total,
            chunk_size=arguments.chunk_size,
            pad_to_multiple=arguments.pad_to_multiple,
            device=arguments.device,
            ranks_per_node=per_node,
        )
        for layout in layouts
    }
    best = min(plans.values(), key=lambda p: min(p.seconds.values()))
    print(best)
    if len(plans) > 1:
        print()
        print(compare(plans))
    if arguments.plot:
        best.plot(arguments.plot)
        print(f"\npicture: {arguments.plot}")
    return 0


def _ranks_per_node(arguments: argparse.Namespace) -> int | None:
    """Ranks of a node by `--nodes` or `--ranks-per-node`; None: all ranks share a node."""
    if arguments.nodes is None:
        return arguments.ranks_per_node
    if arguments.ranks_per_node is not None:
        raise ValueError("--nodes and --ranks-per-node say the same: give one of them")
    if arguments.world_size % whole_number("--nodes", arguments.nodes):
        raise ValueError(f"--nodes must divide --world-size {arguments.world_size}, got {arguments.nodes}")
    return arguments.world_size // arguments.nodes


def _report(arguments: argparse.Namespace, lengths: Sequence[int], layers: int | None = None) -> Report:
    """The report of a model by its config, of a row of these documents. layers: as many as there are, where None."""
    from cp_rewrite.diagnose.config import explain_config  # late: plan needs no torch compiler

    with _tracing():
        return explain_config(
            arguments.model,
            lengths,
            arguments.world_size,
            layers,
            nodes=arguments.nodes,
            checkpointed=arguments.checkpointed,
            speeds=arguments.gpu,
            tile="auto" if arguments.tile else None,
        )


def _explain(arguments: argparse.Namespace) -> int:
    """Print the report, and what would make it fit. Returns 1 where the model is refused."""
    _check_there(arguments.model)
    from cp_rewrite.diagnose.config import fit_of  # late: plan needs no torch compiler

    lengths = _lengths(arguments.lengths)
    report = _report(arguments, lengths, arguments.layers)
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report)
    if report.target is not None and not arguments.json:
        print("".join(f"{line}\n" for line in fit_of(report.target).advice), end="")
    if arguments.diff and not arguments.json:
        print(f"\n{report.diff}")
    if arguments.html:
        per_node = arguments.world_size // arguments.nodes
        from cp_rewrite.planning.plan import plan  # late, as in `_plan`

        picture = plan(lengths, arguments.world_size, device=arguments.gpu, ranks_per_node=per_node)
        Path(arguments.html).write_text(report.as_html(arguments.model, picture))
    return 0 if report.ok else 1


def _memory(arguments: argparse.Namespace) -> int:
    """Print the peak of one GPU, and what would make it fit. Returns 1 where it does not, or the model is refused."""
    _check_there(arguments.model)
    from cp_rewrite.diagnose.config import fit_of  # late: plan needs no torch compiler

    whole_number("--data-parallel", arguments.data_parallel)
    report = _report(arguments, _row(arguments))
    if report.target is None:
        print(report)
        return 1
    fit = fit_of(
        report.target,
        arguments.checkpointed,
        arguments.data_parallel,
        loss_alone=arguments.loss_alone,
        offload=arguments.offload,
        experts="auto" if arguments.experts == "auto" else _number("--experts", arguments.experts),
        resharded=arguments.reshard_after_forward,
        prefetch=whole_number("--prefetch", arguments.prefetch),
    )
    print(json.dumps(fit.as_dict(), indent=2) if arguments.json else fit)
    return 0 if fit.fits else 1


def _recipe(arguments: argparse.Namespace) -> int:
    """Print what to do. Returns 1 where nothing makes it fit, or the model is refused."""
    _check_there(arguments.model)
    from cp_rewrite.diagnose.config import Recipe, recipe  # late: plan needs no torch compiler

    whole_number("--gpus", arguments.gpus)
    lengths = _row(arguments)
    with _tracing():
        found = recipe(arguments.model, lengths, arguments.gpus, arguments.nodes, speeds=arguments.gpu)
    print(json.dumps(found.as_dict(), indent=2) if arguments.json else found)
    return 0 if isinstance(found, Recipe) else 1


def _check_there(name: str) -> None:
    """Raises OSError where a name is no folder and the hub does not answer: transformers would ask it five times."""
    if Path(name).expanduser().exists():
        return
    hub: Any = importlib.import_module("huggingface_hub")
    looks_local = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if not looks_local and isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
        return
    address = urlsplit(hub.constants.ENDPOINT)
    try:
        if looks_local or hub.constants.is_offline_mode():
            raise OSError
        socket.create_connection((address.hostname, address.port or 443), timeout=1).close()
    except OSError:
        raise OSError(
            f"{name} is not there: give a folder with a config.json, or a name that transformers finds"
        ) from None


def _row(arguments: argparse.Namespace) -> list[int]:
    """Lengths of the documents that `--tokens` or `--lengths` tell."""
    if (arguments.tokens is None) == (arguments.lengths is None):
        raise ValueError("pass either --tokens or --lengths")
    return [whole_number("--tokens", arguments.tokens)] if arguments.lengths is None else _lengths(arguments.lengths)


@contextmanager
def _tracing() -> Generator[None]:
    """Warnings of other packages are not printed in front of an answer, which takes a while: stderr says so."""
    print("cp_rewrite: tracing the model's layers on this CPU, half a minute or so …", file=sys.stderr, flush=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?!cp_rewrite)")
        disabled, logging.root.manager.disable = logging.root.manager.disable, logging.WARNING
        try:
            yield
        finally:
            logging.root.manager.disable = disabled


def _doctor(_: argparse.Namespace) -> int:
    """Print what was found, problems first. Returns 1 where there are any."""
    from cp_rewrite.diagnose.machine import examine  # late: plan needs no kernels

    findings = examine()
    problems = [finding for finding in findings if finding.remedy]
    print(f"cp_rewrite {__version__}: {len(problems) or 'no'} problem{'s' * (len(problems) != 1)}")
    print("\n".join(map(str, findings)))
    return 1 if problems else 0


def _calibrate(arguments: argparse.Namespace) -> int:
    """Measure, and write the speeds to a file; under torchrun on rank 0 only."""
    if not Path(arguments.output).absolute().parent.is_dir():
        raise ValueError(f"--output must be a file in a folder that there is, got {arguments.output!r}")
    from cp_rewrite.diagnose.machine import measure  # late: plan needs no torch

    device = measure(arguments.name)
    if device is None:  # another rank writes
        return 0
    device.save(arguments.output)
    print(Path(arguments.output).read_text(), end="")
    print(f"wrote {arguments.output}: use it as --device {arguments.output}")
    return 0


def _lengths(text: str) -> list[int]:
    """Lengths written out, or those in a file of that name; separated by commas or blanks."""
    if Path(text).is_file():
        text = Path(text).read_text()
    words = text.replace(",", " ").split()
    bad = [word for word in words if not word.lstrip("-").isdigit()]
    if bad or not words:
        found = repr(bad[0]) if bad else "nothing"
        raise ValueError(f"--lengths must be whole numbers such as 3104,3200, or a file of them; got {found}")
    return [int(word) for word in words]


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{name} must be a whole number or auto, got {text!r}")
    return whole_number(name, int(text))


def _pair(name: str, text: str) -> tuple[int, int]:
    """Two numbers written as 64,8."""
    try:
        first, second = (int(word) for word in text.split(","))
    except ValueError as error:
        raise ValueError(f"{name} must be two whole numbers such as 64,8; got {text!r}") from error
    return first, second


if __name__ == "__main__":
    sys.exit(main())
