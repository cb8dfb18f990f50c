"""Check the theory of top-k, or of FFT, on the gradients of a real training: ``python -m experiments.theory``.

Trains with top-k and error feedback on simulated workers and examines rank 0's accumulators (gradient + residual) in an
early, a middle and a late step: whether they are bell-shaped, whether the curve of their squared magnitudes is below
its line, whether the error of top-k is within (1 - k/d)^2, and what each way to find the largest magnitudes costs.

    python -m experiments.theory --density 0.001 model=resnet20 dataset=cifar10 dataset.root=DIR

Source of the theory: Shi, Chu, Cheung and See, arXiv 1911.08772. Writes theory.csv, theory.md and figures. --of fft
trains with FFT sparsification instead, and draws the distribution of gradients and frequencies, the values and the
error of the range-based float, the cost of each stage, and the rate of a link at which it pays.
"""

import sys
from collections.abc import Sequence

import pandas as pd
import torch
from rich.console import Console

from experiments.config.command_line import Parser, add_out, add_settings, comma_list, run_command
from experiments.runs.files import check_folder
from experiments.tools.shared.drawings import write_files
from experiments.tools.shared.methods import build_methods
from experiments.tools.shared.options import comma_list_or_none, to_density, whole_number
from experiments.tools.shared.report_opening import opening
from experiments.tools.shared.selection_times import REPEATS, wide_spread
from experiments.tools.theory import frequencies
from experiments.tools.theory.files import files, files_of_times
from experiments.tools.theory.measure import accumulators, check, operator_times


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 2 for a mistake, 130 after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return run_command(lambda: _run(words), stopped="what was written before stays")


def _run(words: list[str]) -> int:
    options = parser().parse_intermixed_args(words)
    density, world_size = options.density, options.world_size
    console = Console(stderr=True)
    check_folder(options.out)
    (reducer,) = build_methods([options.of], density).values()
    with console.status("training"):
        vectors = accumulators(options.overrides, world_size, reducer, options.steps)
    if options.of == "fft":
        with console.status("timing the stages"):
            times = frequencies.stage_times(options.numel, density, options.repeats)
        made, notes = frequencies.files(vectors, times, density), wide_spread(times)
        write_files(made, options.out, notes=dict.fromkeys(("stages", "link"), notes))
        return 0
    equal = {"equal magnitudes": torch.ones(next(iter(vectors.values())).numel())}
    rows = pd.DataFrame({"vector": name} | check(values) for name, values in (vectors | equal).items())
    for name, holds, ratio, share in rows[["vector", "holds", "worst_ratio", "worst_share"]].itertuples(index=False):
        how = "holds at every k/d checked" if holds else "is broken"
        print(f"{name}: the bound {how}, worst ratio {ratio:.4g} at k/d = {share:.3g}", flush=True)
    head = opening("The theory of top-k on recorded accumulators", "experiments.theory", words, world_size)
    write_files(files(vectors, rows, density, head), options.out)
    with console.status("timing the operators"):
        times = operator_times(options.numel, density, world_size, options.repeats)
    spread = wide_spread(times)
    write_files(files_of_times(times, density, world_size), options.out, notes={"operators": spread})
    for line in spread:
        print(line)
    return 0


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser("experiments.theory", description=__doc__)
    add, lengths = parser.add_argument, comma_list_or_none(whole_number())
    add("--world-size", type=whole_number(), default=4, help="simulated workers (%(default)s)")
    add("--of", choices=("topk", "fft"), default="topk", help="whose theory (%(default)s)")
    add("--density", type=to_density, default=0.01, help="density of top-k, in (0, 1] (%(default)s)")
    steps, help = comma_list(whole_number(0)), "steps to examine, from 0 (%(default)s)"
    add("--steps", type=steps, default="5,50,150", metavar="N,N", help=help)
    default = "100000,1000000,5000000,20000000"
    help = "lengths at which operators are timed, or none (%(default)s)"
    add("--numel", type=lengths, default=default, metavar="D,D", help=help)
    help = "steps behind each median time (%(default)s)"
    add("--repeats", type=whole_number(), default=REPEATS, help=help)
    add_out(parser, "results/figures/theory")
    add_settings(parser, help="the training, as for experiments.train; its default model and data when none is given")
    return parser


if __name__ == "__main__":
    sys.exit(main())
