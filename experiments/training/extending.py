"""Go on from a finished run with fewer epochs: ``resume=extend``.

The records and the last checkpoint of the finished run are copied into the folder of the longer run, as if that had
been stopped there. It then resumes as usual, and ends with the weights of a run that was never stopped.
"""

import shutil

from experiments.config.errors import UserError
from experiments.config.keys import from_yaml
from experiments.config.schema import TrainConfig
from experiments.runs.before_start import finished_with_other_epochs
from experiments.runs.checkpoints import Checkpoint, begin, published, usable
from experiments.runs.files import write_atomic, write_json, writing
from experiments.runs.manifest import manifests_of
from experiments.runs.run_folder import RunFolder, folder_of
from experiments.training.optimizers import learning_rate

_NOTHING_KEPT = (
    "kept no checkpoint of its end: repeat it with python -m experiments.sweep rerun {} checkpoint.at_end=true"
)


def end_to_extend(config: TrainConfig) -> Checkpoint | None:
    """Return the end of the finished run from which ``resume=extend`` goes on; None if the run has begun already.

    Raises:
        UserError: there is no such run, or a run with more epochs would have other weights at that point.
    """
    own = folder_of(config)
    if config.resume != "extend" or own.is_done() or published(own):
        return None
    problems = []
    for epochs, folder in finished_with_other_epochs(config).items():
        if epochs < config.epochs:
            found, _ = usable(folder)
            problem = _difference(config, folder, found[0]) if found else _NOTHING_KEPT.format(folder.path)
            if not problem:
                return found[0]
            problems.append(f"{folder.path.name} with epochs={epochs} {problem}")
    none = f"{config.output} has no finished run with these settings and fewer epochs"
    raise UserError(f"resume=extend: {(problems or [none])[0]}; without it the run trains from the first step")


def _difference(config: TrainConfig, folder: RunFolder, end: Checkpoint) -> str:
    """Return what a run with more epochs would have done otherwise until the end of a finished one; empty: nothing."""
    before, rounds = from_yaml(folder.config_path), config.rounds
    for step in range(end.step):
        epoch = step * before.epochs / end.step
        rates = learning_rate(before, epoch), learning_rate(config, epoch)
        if rates[0] != rates[1]:
            shape = f"lr_shape={config.lr_shape} depends on the number of epochs"
            return f"had other learning rates: {shape} ({rates[0]:.3g} in step {step}, got {rates[1]:.3g})"
    at_once = rounds.delay == 0 and rounds.mix == 1 and rounds.fragments == 1
    if rounds.every and (end.step % rounds.every or not at_once):
        return f"exchanged its weights at its end, which is not the end of a round (rounds.every={rounds.every})"
    return ""


def copy_end(end: Checkpoint, folder: RunFolder) -> None:
    """Copy manifests, records and the last checkpoint of a finished run, the checkpoint last. Raises: CannotWrite."""
    source = RunFolder(end.path.parent.parent)
    for manifest in manifests_of(source):
        write_json(folder.next_attempt() / folder.manifest_path.name, manifest)
    for name in end.records:
        write_atomic(folder.path / name, (source.path / name).read_bytes())
    draft = begin(folder)
    with writing(draft):
        shutil.copytree(end.path, draft, dirs_exist_ok=True)
        draft.rename(folder.checkpoints_path / end.path.name)
