"""The base class of attachments: a reducer attached to a model, its saved state, and statistics of the last step."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from micro.comm.group import GroupComm
from micro.comm.ranks import instants_of
from micro.drivers.driver import Driver
from micro.drivers.gradient_watch import GradientWatch
from micro.drivers.loss_scale import LossScale, scale_of
from micro.drivers.parameter_watch import parameter_watch
from micro.drivers.settings import Settings
from micro.drivers.step import BucketStates, Clip, ModelStep
from micro.drivers.summary import StepSummary
from micro.feedback.momentum import MomentumCorrection
from micro.reducers.base import Reducer
from micro.reducers.stats import StepStats
from micro.reducers.wrapping import innermost
from micro.values.clipping import check_clip


class BaseAttachment(Driver):
    """A reducer that is attached to the gradients of a model.

    Attributes:
        steps: the reductions of the present step.
    """

    comm: GroupComm
    steps: ModelStep

    def _start(
        self,
        reducer: Reducer,
        comm: GroupComm,
        settings: Settings,
        *,
        kept: Mapping[str, Tensor],
        reduced: Mapping[str, Tensor],
        compares: bool,
        clip_: Clip,
    ) -> None:
        """Set up what all attachments share.

        Args:
            kept: parameters that may have saved state, by name.
            reduced: the parameters that are reduced.
            compares: whether to check that a loop does not remove or scale gradients after backward.
        """
        self.reducer, self.comm = reducer, comm
        self._on_step, self._is_paused = settings.on_step, False
        self._states = BucketStates(reducer, kept)
        self._loss_scale = LossScale(scale_of(settings.scaler))
        self._device = next(iter(reduced.values())).device
        self._now = instants_of(self._device, timed=settings.timed)
        compares = compares and not self._loss_scale.is_used
        self._watch = GradientWatch(
            reduced, compares=lambda: compares and self._keeps_residuals(), accumulates=self._loss_of_accumulating
        )
        self.steps = ModelStep(
            reducer,
            self._states,
            comm,
            self._device,
            loss_scale=self._loss_scale,
            whole_model=settings.whole_model,
            clip=settings.clip,
            clip_=clip_,
            error_of=self._error_of,
            parameters=reduced,
        )

        parameter_watch.add(self)

    def _keeps_residuals(self) -> bool:
        return any(residual.numel() for residual in self.residuals())

    def _loss_of_accumulating(self) -> str | None:
        """Return the setting that loses mass if averaged gradients are accumulated, '' or None; see GradientWatch."""
        if self.clip is not None:
            return "clip="
        feedback = getattr(innermost(self.reducer), "feedback", None)
        if isinstance(feedback, MomentumCorrection):
            return "feedback momentum"
        return "" if self._keeps_residuals() else None

    @abstractmethod
    def averages(self, parameter: Tensor) -> bool:
        """Return whether gradients of ``parameter`` are averaged, if it is trained."""

    @abstractmethod
    def present_parameters(self) -> Mapping[str, Tensor]:
        """Return the model's present parameters by name, without those that its wrapper ignores."""

    @abstractmethod
    def _error_of(self, findings: Any) -> Any:
        """Return the error of a step with non-finite values; all ranks call this."""

    @property
    def stats(self) -> tuple[StepStats, ...]:
        """The statistics of the last step, one per reduced vector.

        On DDP in the order in which they were reduced; on FSDP of this rank's shards, in the model's order.
        """
        return tuple(self.steps.stats)

    @property
    def skipped(self) -> bool:
        """Whether the last step had NaN or Inf, so that the whole update is zero; equal on all ranks.

        Momentum and weight decay still move the weights unless the loop skips ``optimizer.step()``. With a scaler the
        update is Inf, and the scaler skips the step.
        """
        return self.steps.skipped

    @property
    def summary(self) -> StepSummary:
        """The statistics of the last step over all vectors that this rank reduced.

        Raises:
            ValueError: no step was taken yet.
        """
        if not self.stats:
            raise ValueError("there is no step yet to be summarized: call backward first")
        return StepSummary(self.stats, self.steps.exposed_s)

    @property
    def bucket_names(self) -> list[tuple[str, ...]]:
        """The parameters of each reduced vector: of DDP's buckets or of FSDP's modules, in the order of ``stats``."""
        return self.steps.bucket_names

    @property
    def exposed_s(self) -> float:
        """Seconds of the last backward after all gradients were computed: the communication it did not hide.

        On FSDP it is the whole exchange between nodes, which follows the backward. NaN on an accelerator, unless the
        attachment is timed.
        """
        return self.steps.exposed_s

    @property
    def clip(self) -> float | None:
        """The largest norm of the gradient; may be changed between steps, equally on all ranks."""
        return self.steps.clip

    @clip.setter
    def clip(self, limit: float | None) -> None:
        check_clip(limit)
        self.steps.clip = limit

    def residuals(self) -> list[Tensor]:
        """Return this rank's residuals, not copied: a vector per bucket or FSDP module, empty without residual."""
        return self._states.residuals()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Reduce nothing in this context: gradients stay this rank's own, and residuals do not change.

        Use it for a backward whose gradients are discarded: of a discriminator while the generator is trained, or for
        logging. Otherwise their unsent part would stay in the residuals and be added to later steps. All ranks pause
        the same backwards. Remove the gradients by zero_grad(): otherwise they are part of the next step, and on FSDP
        an optimizer's step before it is refused. DDP's ``model.no_sync()`` does the same if it includes the forward;
        FSDP's ``set_requires_gradient_sync(False)`` keeps gradients that zero_grad() does not remove.
        """
        was, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: residuals by parameter name, and the states of the parts. Save one per rank.

        It also has format, version, rank, world size, step, and the method with all settings. All values are plain data
        and tensors, which ``torch.load(weights_only=True)`` reads.
        """
        head = self._header(self._states.step)
        return {**head, "loss_scale": self._loss_scale.value, "buckets": self._states.save()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned on the same rank; buckets may have changed since.

        Density, start_step, seed, nonfinite and clip may differ.

        Raises:
            ValueError: the state is of another rank, world size or method, of a newer version, or has parameters that
                the model does not have, or has with another shape.
        """
        self.check_state(saved)
        self._states.load(saved["buckets"])
        self._loss_scale.value = saved.get("loss_scale", 1.0)
        if not self._loss_scale.is_used:  # gradients are not scaled any more
            self._states.rescale_(1 / self._loss_scale.value)
            self._loss_scale.value = 1.0

    def _stop_watching(self) -> None:
        self._watch.close()
        self.steps.close()
        parameter_watch.remove(self)
