"""How long do elements wait between two updates, per parameter and method: ``python -m experiments.staleness``.

Trains with each method on simulated workers, counts the updates of every element, and writes a table, its numbers and a
figure: staleness.md, staleness.csv, staleness.pdf and .png. The words of the training are those of experiments.train.

    python -m experiments.staleness --methods dense,micro,topk --steps 200 density=0.01 model=resnet20 dataset=cifar10
"""

import sys
from collections.abc import Sequence

import pandas as pd

from experiments.config.command_line import Parser, add_out, add_settings, run_command
from experiments.config.option_types import comma_list, whole_number
from experiments.reports.figure_parts import write_files
from experiments.reports.output import check_folder
from experiments.reports.report_opening import opening
from experiments.studies.staleness.files import draw, report
from experiments.studies.staleness.measure import measured

METHODS = "dense,topk,cltk,micro"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a mistake, 130 after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return run_command(lambda: _run(words), stopped="nothing was written")


def _run(words: list[str]) -> int:
    options = parser().parse_intermixed_args(words)
    check_folder(options.out)
    parts = []
    sizes = {"num_steps": options.steps, "world_size": options.world_size}
    for method, rows in measured(options.overrides, options.methods, **sizes):
        print(f"{method}: {len(rows)} parameters over {options.steps} steps", flush=True)
        parts.append(rows)
    rows = pd.concat(parts, ignore_index=True)
    page = report(rows, opening("Steps between two updates", "experiments.staleness", words, options.world_size))
    print(page)
    title = f"Updates of elements in {options.steps} steps, {options.world_size} workers"
    write_files([("staleness", page), ("staleness", (draw(rows, title), rows))], options.out)
    return 0


def parser() -> Parser:
    """Return what reads the command line."""
    parser = Parser("experiments.staleness", description=__doc__)
    add, help = parser.add_argument, "of conf/sparsifier, in this order (%(default)s)"
    add("--methods", type=comma_list(str), default=METHODS, metavar="NAME,NAME", help=help)
    add("--steps", type=whole_number(), default=200, help="of the training (%(default)s)")
    add("--world-size", type=whole_number(), default=4, help="simulated workers (%(default)s)")
    add_out(parser, "results/figures/staleness")
    add_settings(parser, help="the training, as for experiments.train; its default model and data when none is given")
    return parser


if __name__ == "__main__":
    sys.exit(main())
