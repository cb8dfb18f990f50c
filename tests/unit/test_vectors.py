"""Buckets that are no single vector: too long for int32 indices, or without any element. On a group of one rank."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import micro
from micro import flat
from micro.ddp.buckets import cut, layouts_of
from tests.products import grid
from tests.small_models import flat_gradient

pytestmark = pytest.mark.usefixtures("one_rank")


class WithEmpty(nn.Module):
    """Layers of 16, 4, 8 and 2 elements, and parameters without elements, which DDP gives buckets of their own."""

    def __init__(self, *empty: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.empty = nn.ParameterList([nn.Parameter(torch.zeros(0, dtype=dtype)) for dtype in empty])

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x + sum(empty.sum().float() for empty in self.empty)).tanh())
        return y + sum(empty.sum().float() for empty in self.empty)


def gradient(model: nn.Module, step: int) -> Tensor:
    model.zero_grad()
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
    return flat_gradient(model).float()


def lost(model: DistributedDataParallel, attachment: micro.Attachment) -> Tensor:
    """Return what of four steps' gradients was neither applied nor kept."""
    plain = WithEmpty(*(empty.dtype for empty in model.module.empty))  # type: ignore[union-attr]
    total = sum(gradient(plain, step) - gradient(model, step) for step in range(4))
    assert isinstance(total, Tensor)
    return total.sum() - torch.cat(attachment.residuals()).sum()


@grid(
    empty=[(torch.float64,), (torch.float32,), (torch.float64, torch.bfloat16)], clip=[None, 1e6], unused=[False, True]
)
def test_a_bucket_without_elements_is_left_out(
    empty: tuple[torch.dtype, ...], clip: float | None, unused: bool
) -> None:
    model = DistributedDataParallel(WithEmpty(*empty), bucket_cap_mb=1e-5, find_unused_parameters=unused)
    with micro.attach(model, micro.SparseReducer(micro.TopK(), density=0.2), clip=clip) as attachment:
        torch.testing.assert_close(lost(model, attachment), torch.zeros(()), rtol=0, atol=1e-5)
        assert {stats.step for stats in attachment.stats} == {3}
        assert sum(stats.numel for stats in attachment.stats) == 30


def test_an_error_comes_out_of_a_backward_whose_last_bucket_has_no_elements() -> None:
    model = DistributedDataParallel(WithEmpty(torch.float64), bucket_cap_mb=1e-5)
    micro.attach(model, micro.SparseReducer(micro.TopK(), density=0.2))
    for step in range(2):
        gradient(model, step)
    with pytest.raises(micro.NonFiniteGradient):
        (model(torch.ones(3, 4)) * float("nan")).sum().backward()
    assert gradient(model, 3).isfinite().all()


@grid(unused=[False, True], settings=[{}, {"clip": 1e6}, {"scope": "tensor"}])
def test_a_bucket_that_indices_cannot_count_is_reduced_in_parts(
    unused: bool, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat, "MAX_NUMEL", 20)
    model = DistributedDataParallel(WithEmpty(), find_unused_parameters=unused)
    reducer = micro.SparseReducer(micro.TopK(), density=0.2)
    with micro.attach(model, reducer, **settings) as attachment:  # type: ignore[arg-type]
        torch.testing.assert_close(lost(model, attachment), torch.zeros(()), rtol=0, atol=1e-5)
        assert sorted(stats.numel for stats in attachment.stats) in ([10, 20], [14, 16])  # in DDP's order or reversed


def test_parts_are_cut_between_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "MAX_NUMEL", 10)
    parameters = {name: torch.zeros(n) for name, n in (("a", 4), ("b", 6), ("c", 0), ("d", 1), ("e", 10))}
    layouts = layouts_of(parameters)
    vectors = cut(layouts, torch.arange(21.0))
    assert [layout.names for layout in layouts] == [("a", "b"), ("d",), ("e",)]
    assert [vector.tolist()[0] for vector in vectors] == [0.0, 10.0, 11.0]
    assert [len(vector) for vector in vectors] == [10, 1, 10]
