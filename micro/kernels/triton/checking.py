"""Whether a GPU runs the kernels."""

import torch

from micro.kernels.triton.absorbing import absorb_

OLDEST = (8, 0)  # compute capability for which the kernels are compiled in the tests


def check(device: torch.device) -> None:
    """Run a kernel on ``device``.

    Raises:
        RuntimeError: the GPU is too old, or what it computes is wrong.
        Exception: whatever Triton, the driver or the C compiler raise.
    """
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < OLDEST:
        raise RuntimeError(f"compute capability must be at least {OLDEST}, got {capability}")
    residual, grad = (torch.arange(40, dtype=torch.float32, device=device) for _ in range(2))
    found = absorb_(residual, grad)
    if found is not None or residual.tolist() != [2.0 * i for i in range(40)] or any(grad.tolist()):  # host sync: once
        raise RuntimeError(f"a sum of two vectors is wrong: {residual.tolist()}")
