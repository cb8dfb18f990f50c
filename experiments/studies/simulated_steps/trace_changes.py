"""Traces of a model changed: other seconds of computation, layers in place of tensors."""

import itertools
from collections.abc import Callable
from dataclasses import replace

from micro.planning.traces import Layer, Trace


def rescaled(trace: Trace, compute_s: float) -> Trace:
    """Return a trace whose step without communication takes so long, its proportions kept."""
    factor = compute_s / trace.compute_s
    layers = tuple(
        replace(layer, ready_s=factor * layer.ready_s, used_s=None if layer.used_s is None else factor * layer.used_s)
        for layer in trace.layers
    )
    backward_s = max(factor * trace.backward_s, layers[-1].ready_s)
    forward_s, update_s = factor * trace.forward_s, factor * trace.update_s
    return replace(trace, layers=layers, forward_s=forward_s, backward_s=backward_s, update_s=update_s)


def as_published(trace: Trace) -> Trace:
    """Return a trace whose forward takes half as long as backward and whose update takes no time."""
    return replace(trace, forward_s=trace.backward_s / 2, update_s=0.0)


def by_layer(trace: Trace) -> Trace:
    """Return a trace in which the parameters of one module, neighbours in backward order, are one."""
    layers = []
    for _, members in itertools.groupby(trace.layers, key=lambda layer: layer.name.rpartition(".")[0]):
        group = list(members)
        used = [layer.used_s for layer in group if layer.used_s is not None]
        num_bytes = sum(layer.num_bytes for layer in group)
        layers.append(Layer(group[0].name, num_bytes, group[-1].ready_s, min(used, default=None)))
    return replace(trace, layers=tuple(layers))


def by_tensor(trace: Trace) -> Trace:
    """Return the trace as it is: each parameter for itself."""
    return trace


# What travels as one: the parameters of a layer, or each parameter by itself.
GRAINS: dict[str, Callable[[Trace], Trace]] = {"layer": by_layer, "tensor": by_tensor}
