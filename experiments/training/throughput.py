"""How fast a language model is trained: words in a second, and the share of a device's arithmetic that it uses."""

import time
from typing import Any

import torch

from experiments.config.schema import TrainConfig
from experiments.training.tasks import Task

SIDES = {"cpu": 1024, "cuda": 8192}  # of the matrices whose product is measured, by kind of device
TIMES = 5
BACKWARD = 3  # forward and backward take three times as many operations as forward


class Throughput:
    """Words in a second since the start of a run, and the model FLOPs utilisation.

    That is the arithmetic of forward and backward, as the model counts it, over what the devices could have done in the
    time of all steps, communication and drawing of batches included. The attention of a causal model counts as a whole,
    and what is computed twice to save memory counts once.

    Args:
        config: says how fast a device is, or that it is to be measured.
        task: of words, others have no throughput; its device is this process's, simulated workers share one.

    Source: Chowdhery et al., PaLM, 2022, arXiv 2204.02311, appendix B.
    """

    def __init__(self, config: TrainConfig, task: Task) -> None:
        self._words_per_step = config.world_size * config.accumulate * task.words_per_batch
        self._length = config.dataset.sequence_length
        self._num_devices = 1 if config.cluster.simulated else config.world_size
        self._model, self._device, self._given = task.model, task.device, config.peak_tflops
        self._dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
        self._measured: float | None = None

    def row(self, num_steps: int, seconds: float) -> dict[str, Any]:
        """Return what is recorded after so many steps in so many seconds; nothing where no words are learnt from."""
        if not self._words_per_step or not num_steps or not seconds:
            return {}
        speed = num_steps * self._words_per_step / seconds
        if self._given is None:
            return {"words_per_s": speed}
        used = BACKWARD * self._model.flops_per_word(self._length) * speed  # type: ignore[operator]
        peak = self._peak()
        source = "setting" if self._given else "product of matrices"
        return {
            "words_per_s": speed,
            "mfu": used / (peak * self._num_devices),
            "peak_tflops": peak / 1e12,
            "peak_from": source,
        }

    def _peak(self) -> float:
        """Return the operations that a device can do in a second."""
        if self._given:
            return self._given * 1e12
        if self._measured is None:
            self._measured = measured_peak(self._device, self._dtype)
        return self._measured


def measured_peak(device: torch.device, dtype: torch.dtype, *, side: int | None = None) -> float:
    """Return the operations in a second of the fastest of several products of square matrices."""
    side = side or SIDES.get(device.type, SIDES["cpu"])
    left, right = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    out = left @ right
    seconds = []
    for _ in range(TIMES):
        _wait(device)
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return 2 * side**3 / min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
