"""The profiler on real ranks: files that load, with everything in them that a plan needs."""

from pathlib import Path

import pytest

import models
from experiments.planning.tables import Curve, LinkTable, SelectTable
from experiments.planning.traces import Trace
from experiments.profile import main
from micro.comm.ranks import OPS
from tests.dist.processes import ranks
from tests.dist.rank_functions import called

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("ranks")]
SIZES = (64, 1024, 4096)


def check(curve: Curve) -> None:
    """Assert what every measured curve promises."""
    assert all(seconds > 0 for seconds in curve.seconds)
    assert list(curve.seconds) == sorted(curve.seconds)


def test_a_trace_has_every_parameter_once_with_rising_times(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "trace.json"
    words = ["model=mlp", "dataset=synthetic", "batch_size=8"]
    assert main(["backward", "--nproc", "2", "--steps", "3", "--out", str(path), *words]) == 0
    trace = Trace.load(path)
    model = models.build("mlp", sizes={"in_channels": 1, "num_classes": 10, "image_size": 8})
    expected = {name: parameter.numel() * parameter.element_size() for name, parameter in model.named_parameters()}
    assert {layer.name: layer.num_bytes for layer in trace.layers} == expected
    ready = [layer.ready_s for layer in trace.layers]
    assert 0 < ready[0] < ready[-1] <= trace.backward_s
    # the last layer's gradients come first, and forward needs them last
    assert trace.layers[0].name.startswith("layers.5.")
    used = {layer.name: layer.used_s or 0.0 for layer in trace.layers}
    assert 0 <= used["layers.1.weight"] < used["layers.3.weight"] < used["layers.5.weight"] < trace.forward_s
    assert (trace.model, trace.batch_size, trace.world_size, trace.num_steps) == ("mlp", 8, 2, 3)
    assert trace.update_s > 0
    assert list(path.parent.iterdir()) == [path]


def test_a_link_holds_every_collective_at_the_sizes_that_travel(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "link.json"
    joined(3, "link", "--sizes", ",".join(map(str, SIZES)), "--repeats", "3", "--out", str(path))
    link = LinkTable.load(path)
    assert set(link.collectives) == set(OPS)
    assert (link.world_size, link.backend) == (3, "gloo")
    for curve in link.collectives.values():
        check(curve)
    sizes = {op: curve.sizes for op, curve in link.collectives.items()}
    assert sizes["all_reduce"] == sizes["broadcast"] == sizes["scatter"] == SIZES
    assert sizes["gather_rows"] == sizes["gather_lists"] == SIZES[:2]  # three rows of the third exceed the largest
    assert {found.suffix for found in path.parent.iterdir()} == {".json"}


def test_a_table_of_selections_holds_every_method_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "select.json"
    words = ["--numel", "256,4096", "--methods", "micro,topk", "--density", "0.05", "--steps", "3"]
    joined(2, "select", "--out", str(path), *words)
    found = SelectTable.load(path)
    assert set(found.methods) == {"micro", "topk"}
    assert (found.world_size, found.density) == (2, 0.05)
    for curve in found.methods.values():
        check(curve)
        assert curve.sizes == (256, 4096)


def joined(world_size: int, *words: str) -> None:
    """Run the command on ranks that are there, as those that torchrun started."""
    first, *others = ranks(world_size).run_apart(called, main, *words)
    assert {ended.returncode for ended in (first, *others)} == {0}, first.stderr
    assert first.stdout.count("wrote ") == 1
    assert not any(ended.stdout for ended in others)  # rank 0 alone prints
