"""Local steps know which parameters they exchange: those outside of the model, added or replaced are refused."""

from functools import partial

import torch
from torch import Tensor, nn

import micro
from micro.comm.ranks import Comm
from tests.local_training import SGD, Run, backward, flat, network, simulated
from tests.refusals import refused


def test_a_parameter_outside_of_the_model_is_refused_or_each_rank_s_own() -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        model, head = network(), nn.Linear(2, 3).double()
        optimizer = SGD([*model.parameters(), *head.parameters()])
        make = partial(micro.LocalSteps, model, optimizer, micro.DenseReducer(), every=1, comm=comm)
        refused(make, "shape (3, 2) outside of the model", "ModuleList", "own=")
        refused(lambda: make(own=head), "own", "Linear")
        with make(own=head.parameters()):
            backward(model, 0, comm.rank)
            head.weight.grad = torch.full((3, 2), comm.rank + 1.0).double()
            optimizer.step()
        return flat(model), flat(head)

    (one, head), (other, other_head) = simulated(2, work)
    assert torch.equal(one, other)
    assert not torch.equal(head, other_head)


def test_a_part_of_the_model_may_be_each_rank_s_own() -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        model = network()
        with torch.no_grad():
            model.b.bias += comm.rank  # type: ignore[union-attr, operator]
        optimizer = SGD(model.parameters())
        own = model.b.parameters()  # type: ignore[union-attr, operator]
        with micro.LocalSteps(model, optimizer, micro.DenseReducer(), every=2, comm=comm, own=own) as local:
            for step in range(3):
                backward(model, step, comm.rank)
                optimizer.step()
            local.finish()
        return flat(model.a), flat(model.b)  # type: ignore[arg-type]

    (one, own), (other, others) = simulated(2, work)
    assert torch.equal(one, other)
    assert not torch.equal(own, others)


def test_a_group_from_outside_that_is_added_later_ends_the_steps() -> None:
    with Run(Comm()) as run:
        head = nn.Linear(2, 3).double()
        run.optimizer.add_param_group({"params": head.parameters()})
        run.train(0)
        head.weight.grad = torch.ones(3, 2).double()
        refused(run.optimizer.step, "shape (3, 2) outside of the model", error=RuntimeError)


def test_a_layer_that_is_replaced_is_refused() -> None:
    with Run(Comm()) as run:
        run.model.b = nn.Linear(6, 2).double()
        for call in (run.optimizer.step, run.local.finish):
            refused(call, "'b.weight' is trained now", error=RuntimeError)
