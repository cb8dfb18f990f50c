"""Run every method on the same gradients and compare: ``python -m experiments.compare``.

Methods are those of conf/sparsifier, built as in training, on simulated ranks. Gradients are drawn from known
distributions, or recorded from a real training (the stream `recorded`, configured by KEY=VALUE).

    python -m experiments.compare --methods topk,cltk,micro --streams normal,recorded --world-sizes 4,16
    python -m experiments.compare --max-gb 8 model=resnet20 dataset=cifar10 dataset.root=DIR

Writes compare.csv (a row per method, stream and number of workers), compare.md and figures; after Ctrl-C, those of the
finished part.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.progress import Progress

from experiments.config.command_line import Parser, add_out, add_settings, comma_list, run_command
from experiments.config.ranges import LARGEST_SEED
from experiments.runs.files import check_folder
from experiments.tools.compare.files import files
from experiments.tools.compare.measure import ComparisonSettings, measure
from experiments.tools.shared.drawings import write_files
from experiments.tools.shared.gradient_sources import RECORDED, SHAPES, TITLES
from experiments.tools.shared.methods import known_methods, select_names
from experiments.tools.shared.options import comma_list_or_none, to_density, to_positive, whole_number
from experiments.tools.shared.report_opening import opening
from experiments.tools.shared.selection_times import REPEATS, wide_spread


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 2 for a mistake, 1 if a method failed, 130 after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return run_command(lambda: _run(words))


def _run(words: list[str]) -> int:
    options = parser().parse_intermixed_args(words)
    settings = check_options(options)
    check_folder(options.out)
    with _progress_bar() as show_progress:
        done = measure(settings, show_progress)
    title = "All methods on the same gradients"
    head = opening(title, "experiments.compare", words, max(settings.world_sizes))
    spread = wide_spread(done.timed)
    write_files(files(done, settings, head), options.out, notes={"selection": spread})
    for line in [*spread, *done.failures]:
        print(line)
    return 130 if done.interrupted else int(bool(done.failures))


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, int], None]]:
    """Show on a terminal the last finished measurement, and how many there are."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("measuring")

        def show(name: str, total: int) -> None:
            progress.update(bar, description=name, total=total, advance=1)

        yield show


def check_options(options: argparse.Namespace) -> ComparisonSettings:
    """Return the settings of the command line. Raises: UserError."""
    methods = select_names(options.methods, known_methods(), "methods")
    given = vars(options) | {
        "methods": methods,
        "streams": select_names(options.streams, list(TITLES), "streams"),
        "world_sizes": sorted(set(options.world_sizes)),
        "densities": [each for each in options.densities if each != options.density],
        "num_steps": options.steps,
        "recorded_training": options.overrides,
        "selection_lengths": options.select_numel,
    }
    return ComparisonSettings(**{each.name: given[each.name] for each in fields(ComparisonSettings)})


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser("experiments.compare", description=__doc__)
    words, number, numbers = comma_list(str), whole_number(), comma_list(whole_number())
    lengths, default = comma_list_or_none(number), "100000,1000000,5000000,20000000"
    options: list[tuple[str, Any, Any, str | None, str]] = [
        ("--methods", words, [], "A,B", "names of conf/sparsifier; all by default"),
        ("--streams", words, [], "A,B", f"of {', '.join([*SHAPES, RECORDED])}; all by default"),
        ("--world-sizes", numbers, "2,4,8,16,32,64", "N,N", "numbers of workers (%(default)s)"),
        ("--density", to_density, 0.01, None, "target density of every method, in (0, 1] (%(default)s)"),
        (
            "--densities",
            comma_list(to_density),
            [],
            "P,P",
            "more target densities, for error over compression on the last stream",
        ),
        ("--numel", number, 50_000, None, "length d of drawn gradients (%(default)s)"),
        ("--steps", number, 60, None, "steps of each run (%(default)s)"),
        ("--seed", whole_number(0, LARGEST_SEED), 0, None, "of drawn gradients (%(default)s)"),
        ("--select-numel", lengths, default, "D,D", "lengths of timed selections, or the word none (%(default)s)"),
        ("--repeats", number, REPEATS, None, "steps behind each median time (%(default)s)"),
        ("--max-gb", to_positive, 1.0, None, "most memory for gradients (%(default)s)"),
    ]
    for name, kind, usual, metavar, help in options:
        parser.add_argument(name, type=kind, default=usual, metavar=metavar, help=help)
    add_out(parser, "results/figures/compare")
    help = "the training to record, as for experiments.train; its default model and data when none is given"
    add_settings(parser, help=help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
