"""Carry out one run of a command: as one of its ranks, or by starting them."""

import sys
import traceback

from experiments.config.errors import RunFailed, UserError
from experiments.config.schema import TrainConfig
from experiments.config.stopping import handled, raise_stop
from experiments.launching.failures import RankFailure
from experiments.launching.process_lifetime import leave
from experiments.launching.rank_environment import RankEnvironment
from experiments.reports.measures import METRICS
from experiments.runs.git_state import other_code
from experiments.runs.output import check_outputs
from experiments.runs.records import last_row
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.runs.stop_signals import stop_signals
from experiments.training.devices import NoOwnGpu
from experiments.training.preflight import check_run, check_start
from experiments.training.runner import HostProblem, execute, join
from micro import NonFiniteGradient


def carry_out(config: TrainConfig, ranks: RankEnvironment | None) -> float | None:
    """Check a run and carry it out, if it is not done; return its last measure.

    Args:
        ranks: which rank this process is, where something else started it.

    Raises:
        UserError: the run cannot start, or its ranks cannot meet.
        RunFailed: it began and failed.
    """
    if ranks is None:
        check_run(config)
    else:  # the rest is checked on each host when the ranks have met
        check_start(config)
    with handled(raise_stop):
        if stop_signals.number:  # received after the last step of a run before this one
            raise_stop(stop_signals.number, None)
        if ranks is None or ranks.rank == 0:
            check_outputs([config])
        ran = _ran(config, ranks)
    folder = folder_of(config)  # ranks have found out on which device they are
    if ranks is None or ranks.rank == 0:
        print(f"{'done' if ran else 'already done'}: {folder.path}")
        if not ran and (line := other_code([folder])):
            print(f"note: {line}", file=sys.stderr)
    return _measured(folder)


def _ran(config: TrainConfig, ranks: RankEnvironment | None) -> bool:
    """Carry out a run; return False if it was finished before. Raises: as carry_out."""
    try:
        return join(config, ranks) if ranks else execute(config)
    except (NoOwnGpu, HostProblem):  # on all ranks alike, and nothing is written yet
        raise
    except (UserError, RankFailure, NonFiniteGradient) as error:
        if ranks and not isinstance(error, UserError):
            _leave_as_rank()
        raise RunFailed(f"{folder_of(config).path.name}: {error}") from error
    except Exception:
        if ranks:
            _leave_as_rank()
        raise


def _leave_as_rank() -> None:
    """End a rank that failed at once: a normal exit would wait for a peer that may be gone."""
    traceback.print_exc()
    leave(1)


def _measured(folder: RunFolder) -> float | None:
    row = last_row(folder.epochs_path)
    return next((row[metric.key] for metric in METRICS if row.get(metric.key) is not None), None)
