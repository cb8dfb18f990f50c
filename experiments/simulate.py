"""Predict a step on other networks, with up to thousands of workers: ``python -m experiments.simulate``.

Combines traces of models (``python -m experiments.profile backward``), models of networks (conf/networks.yaml, or a
measured table) and schedules, and computes the time of a step: nothing is trained.

    python -m experiments.simulate --trace results/published/traces/resnet50.json --workers 4,64,1024

    python -m experiments.simulate --network nvlink_25gbe --two-level

Writes tables (csv, simulate.md) and figures: speed-up over workers; timelines of backward and exchanges; the bandwidth
below which each method is faster than dense; gains of merged gradients, published and ours. With --two-level also
levels.md, and figures of speed-up and bytes with one level and two.
"""

import shlex
import sys
from collections.abc import Sequence

from experiments.config import ROOT
from experiments.config.command_line import Parser, add_out, comma_list, run_command
from experiments.runs.files import check_folder
from experiments.tools.shared.drawings import write_files
from experiments.tools.shared.options import to_density, to_known_path, to_positive, whole_number
from experiments.tools.simulate.files import files
from experiments.tools.simulate.method_choices import DENSE, MEMORY_GB_S
from experiments.tools.simulate.networks import ALGORITHMS, INTRA, RANKS_PER_NODE
from experiments.tools.simulate.setup import POWERS, QUESTIONS, compute, setup_of
from experiments.tools.simulate.steps import EXACT, GRAINS
from experiments.tools.simulate.tables import speedups

TRACES = tuple(ROOT / f"results/published/traces/{name}.json" for name in ("googlenet", "resnet50", "resnet18"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 2 for a mistake, 130 after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return run_command(lambda: _run(words), stopped="nothing was written")


def _run(words: list[str]) -> int:
    options = parser().parse_args(words)
    setup = setup_of(options)
    check_folder(options.out)
    frames = compute(setup)
    print(speedups(frames["steps"]))
    write_files(files(setup, frames, shlex.join(["python", "-m", "experiments.simulate", *words])), options.out)
    return 0


check_options = setup_of  # before the first part of a paper runs


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser("experiments.simulate", description=__doc__)
    add, names, numbers = parser.add_argument, comma_list(str), comma_list(whole_number())
    help = "traces of models; by default the published ones"
    add("--trace", type=comma_list(to_known_path), default=TRACES, metavar="FILE,FILE", help=help)
    help = "of conf/networks.yaml, a yaml of such an entry with its name, or a table (json) of experiments.profile "
    help += "link, for its own number of workers only (%(default)s)"
    add("--network", type=names, default="k80_10gbe", metavar="A,B", help=help)
    help = f"of the all-reduce, among {', '.join(ALGORITHMS)}; hierarchical: the network joins nodes; best: call by "
    help += "call the fastest of the flat ones; each network's own by default"
    add("--algorithm", type=names, default=[], metavar="A,B", help=help)
    file = "as the network's file has it, with hierarchical else"
    help = f"workers of a node, fewer are one node; {file} {RANKS_PER_NODE}"
    add("--ranks-per-node", type=whole_number(), metavar="G", help=help)
    add("--intra", metavar="NAME_OR_FILE", help=f"network within a node; {file} {INTRA}")
    help = "also in two levels: densely within a node, by each method between nodes; the network needs nodes"
    add("--two-level", action="store_true", help=help)
    help = f"numbers of workers ({','.join(map(str, POWERS))}; of a table its own)"
    add("--workers", type=numbers, metavar="N,N", help=help)
    schedules = f"layerwise,single,mgwfbp,{EXACT}"
    add("--schedules", type=names, default=schedules, metavar="A,B", help="of the dense method (%(default)s)")
    methods = f"{DENSE},micro,oktopk,topk"
    add("--methods", type=names, default=methods, metavar="A,B", help="names of conf/sparsifier (%(default)s)")
    add("--density", type=to_density, default=0.001, help="of sparse methods, in (0, 1] (%(default)s)")
    add("--grain", choices=list(GRAINS), default="layer", help="what a group is made of (%(default)s)")
    add(
        "--select", type=to_known_path, metavar="FILE", help="table of experiments.profile select; by default a formula"
    )
    help = "bandwidth of memory in that formula, in GB/s; the default is an assumption of ours, neither measured nor "
    help += "published (%(default)s)"
    add("--memory-gb-s", type=to_positive, default=MEMORY_GB_S, help=help)
    help = "what a step without communication takes, the trace's proportions kept; 'trace': as it was measured; "
    help += "'published', the default: what brings our gains of merged gradients nearest to the published ones, and "
    help += "as measured where none are"
    add("--compute-s", default="published", metavar="SECONDS", help=help)
    help = f"of {', '.join(QUESTIONS)}; all by default, and speedup always"
    add("--only", type=names, default=[], metavar="A,B", help=help)
    add_out(parser, "results/simulate")
    return parser


if __name__ == "__main__":
    sys.exit(main())
