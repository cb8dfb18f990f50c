"""A callback for Lightning's Trainer. Accelerate and Fabric need none, see micro.AllRanks."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from micro.checkpoints.rank_states import AllRanks
from micro.comm.objects import gather_objects_at_first
from micro.ddp import Attachment, attach
from micro.reducers.base import Reducer


class MicroCallback(Callback):
    """Attach a reducer to the model of a DDP strategy, from the start of a fit to its end.

        Trainer(strategy="ddp", callbacks=[MicroCallback(micro.SparseReducer(micro.Micro(), density=0.01))])

    The Trainer's checkpoints contain the states of all ranks (see micro.AllRanks); a fit with ``ckpt_path`` loads them.

    Args:
        reducer: as for micro.attach.
        settings: of micro.attach. The default scaler is the strategy's.
        resize: average the states of another number of ranks instead of refusing them.

    Attributes:
        attachment: of the current or last fit, None before the first.

    Raises:
        ValueError: at the start of a fit, if the strategy has no DistributedDataParallel; see micro.attach.
    """

    def __init__(self, reducer: Reducer, *, resize: bool = False, **settings: Any) -> None:
        self.attachment: Attachment | None = None
        self._reducer = reducer
        self._resize = resize
        self._settings = settings
        self._saved: dict[str, Any] | None = None
        self._is_attached = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the model that the strategy has wrapped."""
        self._close()
        strategy = trainer.strategy
        scaler = getattr(strategy.precision_plugin, "scaler", None)  # with float16
        self.attachment = attach(strategy.model, self._reducer, **{"scaler": scaler, **self._settings})
        self._is_attached = True
        self._load()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the attachment; its statistics stay readable."""
        self._close()
        self._saved = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0, which writes the checkpoint. Lightning calls it on all ranks."""
        if self.attachment is None:
            return {}
        if self._is_attached:
            return AllRanks(self.attachment).state_dict()
        states = gather_objects_at_first(self.attachment.state_dict())  # after the fit the attachment's group is closed
        return {} if states is None else {"ranks": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint's state; before a fit, it is loaded when the fit starts."""
        self._saved = state_dict
        self._load()

    def _load(self) -> None:
        if self._saved is not None and self.attachment is not None and self._is_attached:
            AllRanks(self.attachment, resize=self._resize).load_state_dict(self._saved)
            self._saved = None

    def _close(self) -> None:
        self._is_attached = False
        if self.attachment is not None:
            self.attachment.close()
