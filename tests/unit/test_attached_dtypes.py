"""micro.attach with parameters that are not float32, on a group of one rank in the process of the test."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from micro.comm import Comm
from micro.ddp.buckets import Bucket
from tests.products import grid

pytestmark = pytest.mark.usefixtures("one_rank")


class ComplexNet(nn.Module):
    """Complex parameters beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.waves = nn.Parameter(torch.randn(40, 50, dtype=torch.complex64))
        self.phases = nn.Parameter(torch.randn(50, dtype=torch.complex64))
        self.readout = nn.Linear(40, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed: Tensor = self.readout((self.waves * (inputs.to(torch.complex64) + self.phases)).sum(1).abs())
        return mixed


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(50, generator=torch.Generator().manual_seed(step))
    loss: Tensor = model(inputs).square().sum()
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def kept(attachment: micro.Attachment) -> dict[str, Tensor]:
    """Return the residuals by parameter name."""
    buckets = attachment.state_dict()["buckets"]
    return {name: piece for bucket in buckets for name, piece in bucket["memory"]["residual"].items()}


@grid(scope=["bucket", "tensor", "model"], unused=[False, True])
def test_nothing_of_a_complex_gradient_is_lost(scope: str, unused: bool) -> None:
    model = DistributedDataParallel(ComplexNet(), find_unused_parameters=unused)
    attachment = micro.attach(model, micro.SparseReducer(micro.Micro(), density=0.1), scope=scope)
    plain, applied, computed = ComplexNet(), dict[str, Tensor](), dict[str, Tensor]()
    for step in range(3):
        for total, net in ((computed, plain), (applied, model.module)):
            net.zero_grad()
            loss_of(plain if net is plain else model, step).backward()
            for name, gradient in gradients(net).items():
                total[name] = total.get(name, 0) + gradient
    for name, residual in kept(attachment).items():
        whole = torch.view_as_real(computed[name]) if computed[name].is_complex() else computed[name]
        sent = torch.view_as_real(applied[name]) if applied[name].is_complex() else applied[name]
        torch.testing.assert_close(residual.view_as(whole) + sent, whole, rtol=1e-4, atol=1e-3)
        assert residual.any()
    assert any(gradient.any() for gradient in applied.values())


def test_a_state_with_complex_parameters_is_restored() -> None:
    model = DistributedDataParallel(ComplexNet())
    attachment = micro.attach(model, micro.SparseReducer(micro.Micro(), density=0.1))
    for step in range(2):
        loss_of(model, step).backward()
    restored = micro.attach(DistributedDataParallel(ComplexNet()), attachment.reducer)
    restored.load_state_dict(attachment.state_dict())
    for mine, theirs in zip(restored.residuals(), attachment.residuals(), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)


def test_a_bucket_that_does_not_fit_its_layout_is_refused_before_a_kernel_writes_to_it() -> None:
    layout, grad = micro.Layout.flat(10, "weight"), torch.ones(20)
    with pytest.raises(ValueError, match="bucket of 'weight' holds 20 elements, its parameters 10"):
        Bucket(layout, grad, grad, None).check()
    reducer = micro.SparseReducer(micro.Micro(), density=0.5)
    with pytest.raises(ValueError, match="must have the residual's 10 elements, got 20"):
        reducer.reduce_(reducer.start(layout, torch.float32, torch.device("cpu")), grad, Comm())
