"""Check the output folders of runs before any run starts."""

from collections.abc import Iterable
from pathlib import Path

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.runs.files import check_folder
from experiments.runs.run_folder import folder_of


def check_outputs(configs: Iterable[TrainConfig], *, by_writing: bool = True) -> None:
    """Try the output folder of each run by writing; or see only whether it is a folder. Raises: UserError."""
    for output in dict.fromkeys(Path(config.output) for config in configs):
        check_folder(output, "output", by_writing=by_writing)


def distinct(jobs: list[list[str]], configs: list[TrainConfig]) -> tuple[list[list[str]], list[TrainConfig]]:
    """Return each run once: for a method that sends everything, all densities of the grid are the same run.

    Raises: UserError: two runs of another method would share a folder.
    """
    first: dict[Path, int] = {}
    for number, config in enumerate(configs):
        path = folder_of(config).path
        before = first.setdefault(path, number)
        if before != number and not config.sparsifier.sends_everything:
            differ = sorted(set(jobs[before]) ^ set(jobs[number]))
            how = f"{' '.join(differ)} makes no difference" if differ else "they are the same"
            raise UserError(f"two runs would share the folder {path.name}: {how}; name each combination once")
    return [jobs[number] for number in first.values()], [configs[number] for number in first.values()]
