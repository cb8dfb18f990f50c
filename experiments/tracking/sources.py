"""Read runs from a W&B server into the same tidy tables as from their folders.

W&B stores numbers as JSON, so 1.0 is read back as 1, and the keys of a row lose their order. ``frames.tidy`` normalises
this, so a run's tables are equal from every source.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from experiments.config.errors import UserError, check_choice, one_line
from experiments.reports.finished_runs import FinishedRun
from experiments.reports.frames import Frames, tidy
from experiments.reports.run_configs import Selection
from experiments.runs.records import Row
from experiments.tracking.wandb_mirror import FOLDER, require_key, require_wandb

_NOT_NUMBERS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
REMEDY = "recreate the mirror with: python -m experiments.track RUN_FOLDER"


class Mirrored(NamedTuple):
    """One mirrored run; its history is read on first use."""

    name: str
    where: str
    is_finished: bool
    mirrored: Mapping[str, Any]
    history: Callable[[], Iterable[Row]]

    def finished(self) -> FinishedRun:
        """Return the run in the same form as from a folder."""
        manifest = self.mirrored.get("manifest")
        config = {key: value for key, value in self.mirrored.items() if key not in ("_wandb", "manifest", FOLDER)}
        return FinishedRun(
            config=config,
            manifest=manifest if isinstance(manifest, Mapping) else {},
            rows=self._rows,
            place=lambda kind: f"{self.where} ({kind})",
            remedy=REMEDY,
        )

    def _rows(self, kind: str) -> list[Row]:
        return [
            {key.partition("/")[2]: _as_recorded(value) for key, value in row.items() if key.startswith(f"{kind}/")}
            for row in self.history()
            if row.get(f"{kind}/step") is not None
        ]


def read(source: list[str], selection: Selection | None = None) -> Frames:
    """Read finished runs of ``--source wandb ENTITY/PROJECT``. Raises: UserError."""
    kind, project = source
    if kind == "wandb-files":
        raise UserError("--source wandb-files was removed: draw from the run folders, or upload: wandb sync DIR")
    check_choice("--source", ["wandb"], kind)
    return frames_of(_on_server(project), project, selection)


def frames_of(found: Sequence[Mirrored], place: str, selection: Selection | None = None) -> Frames:
    """Return the finished runs of some mirrors; of several mirrors of a run, the last. Raises: UserError."""
    done = {run.name for run in found if run.is_finished}
    unfinished = sorted({run.name for run in found} - done)
    runs = {run.name: run.finished() for run in sorted(found, key=lambda run: run.name) if run.is_finished}
    if not runs:
        raise UserError(f"{place} holds no finished run at W&B ({len(unfinished)} unfinished); {REMEDY}")
    if unfinished:
        print(f"left out, not finished: {', '.join(unfinished)}")
    return tidy(runs, selection)


def _on_server(project: str) -> list[Mirrored]:
    """Request the runs of ``ENTITY/PROJECT`` from W&B; rows are read on first use."""
    entity, slash, name = project.partition("/")
    if not (entity and slash and name):
        raise UserError(f"a project of W&B is ENTITY/PROJECT, got '{project}'")
    require_wandb("--source wandb")
    require_key("--source wandb", "draw from the run folders")
    import wandb

    try:
        found = list(wandb.Api().runs(project, per_page=200, lazy=False))
    except Exception as error:  # errors of network, server or wandb
        raise UserError(f"cannot read {project} from W&B: {one_line(error)}") from None

    def history_of(run: Any) -> Callable[[], Iterable[Row]]:
        @cache
        def history() -> Iterable[Row]:
            try:
                return list(run.scan_history(use_cache=False))  # a recreated mirror has other rows
            except Exception as error:
                raise UserError(f"cannot read the history of W&B run {run.id}: {one_line(error)}") from None

        return history

    return [
        Mirrored(
            name=name_of(run.config, run.id),
            where=f"W&B run {project}/{run.id}",
            is_finished=run.state == "finished",
            mirrored=run.config,
            history=history_of(run),
        )
        for run in found
    ]


def name_of(mirrored: Mapping[str, Any], run_id: str) -> str:
    """Return the name of the run's folder; W&B's id if the mirror lacks it. Agents choose other ids."""
    return str(mirrored.get(FOLDER) or run_id)


def _as_recorded(value: Any) -> Any:
    return _NOT_NUMBERS.get(value, value) if isinstance(value, str) else value
