"""A callback for the Trainer of transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from micro.checkpoints.resizing import average
from micro.comm.objects import gather_objects
from micro.ddp import Attachment, attach
from micro.reducers.base import Reducer


class MicroCallback(TrainerCallback):
    """Attach a reducer to the Trainer's model, from the start of a training to its end.

        trainer.add_callback(MicroCallback(trainer, micro.SparseReducer(micro.Micro(), density=0.01)))

    Every rank adds a file of its own to the Trainer's checkpoints, ``micro_rank0.pt`` and so on, beside the Trainer's
    own ``rng_state_0.pth``; ``trainer.train(resume_from_checkpoint=...)`` goes on from them.

    Args:
        trainer: whose ``train`` is noted, for it tells callbacks not from which checkpoint it resumes.
        reducer, settings: as for micro.attach. The scaler is the Trainer's, which has one with fp16=True.
        resize: average the states of another number of ranks, and do not refuse them.

    Attributes:
        attachment: what is attached, None before the first training.

    Raises:
        ValueError: out of ``train``, where there is one process only (its model is in no DistributedDataParallel), or
            the checkpoint has no files, or such as do not fit; see micro.attach.
        FileNotFoundError: it has none of this rank.
    """

    def __init__(self, trainer: Trainer, reducer: Reducer, *, resize: bool = False, **settings: Any) -> None:
        self.attachment: Attachment | None = None
        self._trainer = trainer
        self._reducer = reducer
        self._resize = resize
        self._settings = settings
        self._resumes_from: Path | None = None
        self._train = trainer.train
        trainer.train = self._noting_train

    def _noting_train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **settings: Any) -> Any:
        found = resume_from_checkpoint
        if found is True:
            found = get_last_checkpoint(self._trainer.args.output_dir)
        self._resumes_from = Path(found) if found else None
        return self._train(resume_from_checkpoint, *args, **settings)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Attach to the model, which Accelerate has wrapped by now, and load this rank's file."""
        if self.attachment is not None:  # of an attempt that failed, or of a training before
            self.attachment.close()
        settings = {"scaler": self._trainer.accelerator.scaler, **self._settings}
        self.attachment = attach(self._trainer.model_wrapped, self._reducer, **settings)
        if self._resumes_from is not None:
            self.attachment.load_state_dict(self._read(self._resumes_from, self.attachment))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Add this rank's file to the checkpoint."""
        if self.attachment is not None and not args.save_only_model:
            own = self._trainer._get_output_dir(trial=getattr(self._trainer, "_trial", None))
            first = gather_objects(own, self.attachment.group)[0]  # in a search rank 0 alone knows the trial's folder
            folder = Path(str(first)) / f"checkpoint-{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.attachment.state_dict(), _file(folder, self.attachment.comm.rank))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Close the attachment; its statistics stay."""
        if self.attachment is not None:
            self.attachment.close()

    def _read(self, folder: Path, attachment: Attachment) -> dict[str, Any]:
        rank, world_size = attachment.rank, attachment.world_size
        files = sorted(folder.glob("micro_rank*.pt"))
        if not files:
            raise ValueError(
                f"{folder} has no files micro_rank*.pt: it was saved without this callback, or not to its end; resume "
                "from another checkpoint"
            )
        saved_size = _load(files[0])["world_size"]
        if saved_size == world_size:
            return _load(_file(folder, rank))
        if not self._resize:
            raise ValueError(
                f"{folder} is of {saved_size} ranks, this group has {world_size}: start as many, or average "
                "them with MicroCallback(..., resize=True)"
            )
        return average([_load(_file(folder, old)) for old in range(saved_size)], world_size)[rank]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"micro_rank{rank}.pt"


def _load(path: Path) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return saved
