"""Recreate the W&B mirror of runs from their folders: ``python -m experiments.track RUN_FOLDER``."""

import argparse
import sys
from collections.abc import Sequence

from experiments.config.checks import check_values
from experiments.config.command_line import Parser, print_error, run_command, to_path
from experiments.config.errors import UserError, one_line
from experiments.config.schema import MIRRORS, TrackingConfig
from experiments.runs.files import Damaged
from experiments.runs.records import read_records
from experiments.runs.run_folder import RunFolder
from experiments.runs.status import status_of
from experiments.tracking.wandb_mirror import check_wandb, mirror


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 2 for a mistake, 1 if W&B fails, 130 after Ctrl-C."""
    return run_command(lambda: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    try:
        chosen = [(folder, _tracking(folder, options)) for folder in map(RunFolder, options.folders)]
        for folder, tracking in chosen:
            check_values(tracking, "tracking")
            check_wandb(tracking)
            with folder.locked():
                where = mirror(folder, tracking)
            print(f"{where}: upload it with: wandb sync {where}" if tracking.mode == "offline" else where)
    except UserError:
        raise
    except Exception as error:  # any error of wandb
        print_error(f"W&B: {one_line(error)}")
        return 1
    return 0


def _parser() -> Parser:
    parser = Parser(
        "experiments.track",
        description="Recreate the W&B mirror of runs from their folders, replacing the earlier one.",
        epilog="example: python -m experiments.track results/runs/* --mode offline",
    )
    parser.add_argument("folders", type=to_path, nargs="+", metavar="RUN_FOLDER", help="what a run left behind")
    parser.add_argument("--mode", choices=MIRRORS, help="the run's own, else offline")
    parser.add_argument("--project", help="the run's own, else micro")
    parser.add_argument("--entity", help="the run's own, else the user's")
    return parser


def _tracking(folder: RunFolder, options: argparse.Namespace) -> TrackingConfig:
    """Return the given options, completed by the run's settings. Raises: UserError: not a run, or damaged."""
    for path in (folder.config_path, folder.manifest_path):
        if not path.exists():
            raise UserError(f"{folder.path} has no {path.name}: name the folder of a run that has begun")
    if problem := status_of(folder).problem:
        raise UserError(f"{folder.path.name} is damaged: {problem}; run it again with resume=scratch")
    for path in filter(lambda path: path.exists(), (folder.steps_path, folder.epochs_path)):
        read_records(path)
    try:
        own = folder.config().get("tracking") or {}
    except Damaged as error:
        raise UserError(f"{error}; delete the folder and run it again") from None
    return TrackingConfig(
        name="wandb",
        mode=options.mode or own.get("mode") or "offline",
        project=options.project or own.get("project") or "micro",
        entity=options.entity or own.get("entity"),
        tags=own.get("tags") or [],
    )


if __name__ == "__main__":
    sys.exit(main())
