"""What optimizers for sparse updates refuse, and that the study of forms has them."""

from typing import Any

import pytest
import torch
from torch import nn

import micro
from experiments.tools.sparse_adam.forms import FORMS, FlatOptimizer
from micro.drivers.arrivals import arrival_of, note, note_whole
from micro.reducers.outcome import Latest
from tests.refusals import refused
from tests.small_models import TwoHeads, backward, wrapped


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("feedback", "word"), [(micro.MomentumCorrection(), "momentum"), (micro.NoFeedback(), "nothing")]
)
def test_what_is_no_sum_of_gradients_is_refused_at_the_first_step(feedback: micro.Feedback, word: str) -> None:
    model = wrapped(TwoHeads())
    micro.attach(model, micro.SparseReducer(micro.TopK(), density=0.2, feedback=feedback))
    optimizer = micro.SparseAdamW(model.parameters())
    backward(model, 0)
    refused(optimizer.step, "feedback", word)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        *(({"lr": -1.0}, "lr"), ({"betas": (0.9, 1.0)}, "betas"), ({"max_steps": 0}, "max_steps")),
        *(({"eps": float("nan")}, "eps"), ({"weight_decay": -1}, "weight_decay"), ({"lr": torch.ones(())}, "lr")),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], word: str) -> None:
    refused(lambda: micro.SparseAdamW([nn.Parameter(torch.ones(1))], **settings), word)


def test_complex_and_sparse_gradients_are_refused_and_a_note_ends_with_its_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    parameter.grad = torch.ones_like(parameter)
    refused(micro.SparseAdamW([parameter]).step, "complex")
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    refused(micro.SparseAdamW(table.parameters()).step, "sparse")
    layout = micro.Layout(("w",), ((2,),))
    for given in (None, lambda: torch.tensor([True, False])):
        weight = torch.ones(2)
        note({"w": weight}, layout, Latest(given))
        arrival = arrival_of(weight)
        assert arrival is not None
        assert arrival.is_whole == (given is None)
    note_whole({"w": weight})
    assert arrival_of(torch.ones(2)) is None


def test_the_study_of_forms_has_this_optimizer_as_one_of_them() -> None:
    parameter = nn.Parameter(torch.zeros(200))
    optimizer = micro.SparseAdamW([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, max_steps=50)
    form = FlatOptimizer(FORMS["mean"], parameter.detach(), betas=(0.9, 0.95), density=0.1)
    moved, draw = torch.zeros(200), torch.Generator().manual_seed(0)
    for _ in range(150):
        grad = torch.randn(200, generator=draw) * (torch.rand(200, generator=draw) < 0.1)
        parameter.grad = grad.clone()
        optimizer.step()
        moved -= 0.01 * form.direction(grad)
    sent = parameter.detach() != 0
    # the form divides by the moments of ones, which is AdamW's correction at receipts
    torch.testing.assert_close(parameter.detach()[sent], moved[sent], rtol=1e-3, atol=1e-4)
