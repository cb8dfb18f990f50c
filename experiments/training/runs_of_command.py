"""Carry out the runs of one command line, one after another, in this process and in workers that it starts."""

import sys
import traceback
from collections.abc import Sequence

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.config.stopping import handled, raise_stop
from experiments.launching.failures import RankFailure
from experiments.launching.process_lifetime import leave
from experiments.launching.rank_environment import RankEnvironment
from experiments.runs.atomic_files import DiskError
from experiments.runs.output import check_outputs
from experiments.runs.run_folder import folder_of
from experiments.runs.saved_run import other_code
from experiments.runs.stop_signals import stop_signals
from experiments.training.devices import NoOwnGpu
from experiments.training.preflight import check_runs, check_start
from experiments.training.runner import HostProblem, execute, join
from micro import NonFiniteGradient


def carry_out(configs: Sequence[TrainConfig], ranks: RankEnvironment | None) -> int:
    """Check all runs, then carry out each; return 1 if one failed.

    Args:
        ranks: which rank this process is, where something else started it.

    Raises:
        UserError: a run that could not start, or ranks that cannot meet.
    """
    if ranks is None:
        check_runs(configs)
    for config in configs if ranks else ():  # the rest is checked on each host when the ranks have met
        check_start(config)
    with handled(raise_stop):
        if ranks is None or ranks.rank == 0:
            check_outputs(configs)
        problems = _carry_out_each(configs, ranks)
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
    return int(bool(problems))


def _carry_out_each(configs: Sequence[TrainConfig], ranks: RankEnvironment | None) -> list[str]:
    """Carry out each run; return why some failed. Raises: Stopped, KeyboardInterrupt: a signal left runs undone."""
    problems: list[str] = []
    for num_before, config in enumerate(configs):
        try:
            problem = _reason_of_failure(config, ranks)
        except DiskError as error:
            problems.append(str(error))
            if num_left := len(configs) - num_before - 1:
                problems.append(f"{num_left} more runs were not started, for that disk")
            break
        problems += [problem] if problem else []
        if stop_signals.number and num_before + 1 < len(configs):  # received after the last step
            raise_stop(stop_signals.number, None)
    return problems


def carry_out_one(config: TrainConfig, ranks: RankEnvironment | None) -> str | None:
    """Carry out a checked run; return the reason of a failure, None after a success."""
    try:
        return _reason_of_failure(config, ranks)
    except DiskError as error:
        return str(error)


def _reason_of_failure(config: TrainConfig, ranks: RankEnvironment | None) -> str | None:
    """Carry out a run as ``carry_out_one`` does. Raises: DiskError: no other run can be written on that disk either."""
    try:
        ran = join(config, ranks) if ranks else execute(config)
    except (NoOwnGpu, HostProblem):  # on all ranks alike, and nothing is written yet
        raise
    except (UserError, RankFailure, NonFiniteGradient) as error:
        if ranks and not isinstance(error, UserError):
            traceback.print_exc()
            leave(1)
        reason = f"{folder_of(config).path.name}: {error}"
        if isinstance(error, DiskError) or (isinstance(error, RankFailure) and error.failure.of_disk):
            raise DiskError(reason) from None
        return reason
    except Exception:
        if ranks is None:
            raise
        traceback.print_exc()
        leave(1)  # a normal exit would wait for a peer that may be gone, and the launcher for this process
    if ranks is None or ranks.rank == 0:
        folder = folder_of(config)  # ranks have found out on which device they are
        print(f"{'done' if ran else 'already done'}: {folder.path}")
        for line in [] if ran else other_code([folder]):
            print(f"note: {line}", file=sys.stderr)
    return None
