"""Which method reaches dense's accuracy first on a link: ``python -m experiments.advise``.

Puts together measured trainings, which say after how many epochs each method came to a share of dense's final accuracy
and at which density, and the predicted step of a model on a link. Nothing is trained or timed.

    python -m experiments.advise --link-mbit 100,1000 --workers 8
    python -m experiments.advise --trace trace.json --select select.json --link-mbit 100 --latency-us 200 --level 99

The trace of a model is what `experiments.profile backward` measured, the times of selection what `profile select` did.
Writes advice.md, advice.csv and a figure over the rate of the link.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.config.command_line import Parser, add_out, run_command
from experiments.config.option_types import comma_list, to_path, to_positive, whole_number
from experiments.reports.figure_parts import write_files
from experiments.reports.output import check_folder
from experiments.reports.report_opening import opening
from experiments.studies.advice.evidence import LEVELS, load_evidence
from experiments.studies.advice.files import files, report
from experiments.studies.advice.prediction import Setting, forms_of, predict
from experiments.studies.simulated_steps.method_choices import MEMORY_GB_S
from experiments.studies.simulated_steps.networks import load_measured
from micro.planning.traces import Trace

TRACE = Path("results/published/traces/resnet18.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 for a mistake, 130 after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    return run_command(lambda: _run(words), stopped="nothing was written")


def _run(words: list[str]) -> int:
    options = parser().parse_args(words)
    check_folder(options.out)
    evidence = load_evidence(options.evidence, options.level, options.task)
    trace = load_measured(Trace, options.trace)
    setting = Setting(trace, options.workers, options.latency_us / 1e6, options.select, options.memory_gb_s)
    forms = forms_of(evidence, setting)
    answers = {1e6 * mbit: predict(forms, 1e6 * mbit) for mbit in options.link_mbit}
    head = opening("Which method reaches dense's accuracy first", "experiments.advise", words, options.workers)
    page = report(evidence, setting, answers, head)
    print(page)
    write_files(files(evidence, setting, answers, forms, page), options.out)
    return 0


def parser() -> Parser:
    """Return what reads the command line."""
    parser = Parser("experiments.advise", description=__doc__)
    add = parser.add_argument
    rates = comma_list(to_positive)
    add("--link-mbit", type=rates, required=True, metavar="RATE,RATE", help="of each worker's link, in Mbit/s")
    add("--latency-us", type=to_positive, default=50.0, metavar="US", help="of a message (%(default)s)")
    add("--workers", type=whole_number(2), default=4, metavar="N", help="(%(default)s)")
    add("--trace", type=to_path, default=TRACE, metavar="FILE", help="of a model; a published one by default")
    add("--select", type=to_path, metavar="FILE", help="table of experiments.profile select; a formula by default")
    help = "bandwidth of memory in that formula, in GB/s; the default is an assumption (%(default)s)"
    add("--memory-gb-s", type=to_positive, default=MEMORY_GB_S, help=help)
    help = "summary.csv that experiments.figures wrote of your runs; the published by default"
    add("--evidence", type=to_path, metavar="FILE", help=help)
    add("--task", metavar="MODEL-DATASET", help="of the evidence; the one of which most is known by default")
    add("--level", type=int, choices=LEVELS, default=95, help="percent of dense's final accuracy (%(default)s)")
    add_out(parser, "results/advice")
    return parser


if __name__ == "__main__":
    sys.exit(main())
