"""A callback for the Trainer of Hugging Face transformers."""

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

    Every rank adds a file ``micro_rank0.pt``, ``micro_rank1.pt`` ... to the Trainer's checkpoints;
    ``trainer.train(resume_from_checkpoint=...)`` loads them.

    Args:
        trainer: its method ``train`` is wrapped, because callbacks are not told which checkpoint it resumes from.
        reducer: as for micro.attach.
        settings: of micro.attach. The default scaler is the Trainer's, which exists with fp16=True.
        resize: average the states of another number of ranks instead of refusing them.

    Attributes:
        attachment: of the current or last training, None before the first.

    Raises:
        ValueError: from ``train``: there is only one process, without DistributedDataParallel; the checkpoint has no
            such files, or they do not fit; see micro.attach.
        FileNotFoundError: the file of this rank is missing.
    """

    def __init__(self, trainer: Trainer, reducer: Reducer, *, resize: bool = False, **settings: Any) -> None:
        self.attachment: Attachment | None = None
        self._trainer = trainer
        self._reducer = reducer
        self._resize = resize
        self._settings = settings
        self._resumes_from: Path | None = None
        self._train = trainer.train
        trainer.train = self._recording_train

    def _recording_train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **settings: Any) -> Any:
        found = resume_from_checkpoint
        if found is True:
            found = get_last_checkpoint(self._trainer.args.output_dir)
        self._resumes_from = Path(found) if found else None
        return self._train(resume_from_checkpoint, *args, **settings)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Attach to the model that Accelerate has wrapped, and load this rank's file."""
        if self.attachment is not None:  # left by a failed or an earlier training
            self.attachment.close()
        settings = {"scaler": self._trainer.accelerator.scaler, **self._settings}
        self.attachment = attach(self._trainer.model_wrapped, self._reducer, **settings)
        if self._resumes_from is not None:
            self.attachment.load_state_dict(self._read(self._resumes_from, self.attachment))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Add this rank's file to the checkpoint."""
        if self.attachment is not None and not args.save_only_model:
            own = self._trainer._get_output_dir(trial=getattr(self._trainer, "_trial", None))
            first = gather_objects(own, self.attachment.group)[0]  # in a search only rank 0 knows the trial's folder
            folder = Path(str(first)) / f"checkpoint-{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.attachment.state_dict(), _file(folder, self.attachment.comm.rank))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Close the attachment; its statistics stay readable."""
        if self.attachment is not None:
            self.attachment.close()

    def _read(self, folder: Path, attachment: Attachment) -> dict[str, Any]:
        rank, world_size = attachment.rank, attachment.world_size
        files = sorted(folder.glob("micro_rank*.pt"))
        if not files:
            raise ValueError(
                f"{folder} has no files micro_rank*.pt: it was saved without this callback, or incompletely; resume "
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
