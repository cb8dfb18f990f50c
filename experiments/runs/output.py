"""Check the folder that runs are written to before any of them starts."""

from collections.abc import Iterable
from pathlib import Path

from experiments.config.errors import UserError
from experiments.config.schema import TrainConfig
from experiments.runs.disks import explained, remedy, try_to_write


def check_outputs(configs: Iterable[TrainConfig]) -> None:
    """Write a file in the output folder of each run, and remove it again. Raises: UserError: it cannot be written."""
    for output in _outputs(configs):
        try:
            try_to_write(output)
        except OSError as error:
            raise UserError(f"output={output} cannot be used: {explained(error, output)}; {remedy(error)}") from None


def check_are_folders(configs: Iterable[TrainConfig]) -> None:
    """Refuse an output that is no folder, without writing. Raises: UserError."""
    for output in _outputs(configs):
        nearest = next(path for path in (output, *output.parents, *output.absolute().parents) if path.exists())
        if not nearest.is_dir():
            raise UserError(f"output={output} cannot be used: {nearest} is no folder; choose another folder")


def _outputs(configs: Iterable[TrainConfig]) -> list[Path]:
    return [Path(output) for output in dict.fromkeys(config.output for config in configs)]
