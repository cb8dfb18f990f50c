"""The networks of conf/networks.yaml, and the message for a mistake in one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.config.errors import UserError
from experiments.config.networks import LinkValues, NetworkPreset, Nodes, known_networks, load_network
from experiments.planning.costs import Flat
from experiments.tools.simulate.networks import network_choices, nodes_of
from tests.refusals import NOTHING, refused

GOOD = "name: x\ninterconnect: y\nsource: z\n"
FIT = "{world_size: 8, alpha_s: 1e-3, beta_s: 1e-9}"


def completed(preset: NetworkPreset) -> NetworkPreset:
    """Return a network of one link with what its file leaves open."""
    return replace(preset, link=LinkValues(alpha_s=5e-5, rate_bps=1e9, overhead=preset.link.overhead))


@pytest.mark.parametrize("name", known_networks())
def test_every_network_can_be_used(name: str) -> None:
    """It has a source, costs more with more ranks, meets its fits, which are of all ranks' bytes."""
    preset = load_network(name)
    assert preset.source
    for fit in preset.fits:
        op, size = ("all_reduce", 1e6) if preset.fitted == "all_reduce" else ("gather_rows", 1e6 / fit.world_size)
        assert preset.network(fit.world_size).seconds(op, size) == pytest.approx(fit.alpha_s + 1e6 * fit.beta_s)
    of_ranks = (preset if preset.fits else completed(preset)).network
    seconds_of = [of_ranks(n).seconds("all_reduce", 1e6) for n in (1, 2, 256, 2048)]
    assert seconds_of[0] == 0
    assert seconds_of == sorted(seconds_of)
    if preset.nodes:
        network = preset.node_network(preset.nodes, "hierarchical", 2048)
        assert (network.world_size, network.ranks_per_node) == (2048, preset.nodes.ranks_per_node)
        assert network.seconds("all_reduce", 1e8) < Flat(network.inter, 2048).seconds("all_reduce", 1e8)
        assert nodes_of(preset, "ring", "v100_pcie", 2) == replace(preset.nodes, intra="v100_pcie", ranks_per_node=2)


def test_links_equal_papers_and_specifications() -> None:
    """A published cluster, inverted for a ring of 16; six links of NVLink; 1448 of 1538 bytes of Ethernet."""
    link = load_network("k80_10gbe").link_of(64)
    assert (link.alpha_s, link.beta_s) == pytest.approx((32.4e-6, 1.97e-9 * 8 / 15))
    for name, rate in (("v100_nvlink", 6 * 25e9), ("pcie_10gbe", 10e9 / 8 * 1448 / 1538)):
        assert 1 / load_network(name).link_of(8).beta_s == pytest.approx(rate, rel=1e-6)
    assert completed(load_network("ideal")).link_of(4).beta_s == pytest.approx(8e-9 * 1514 / 1448, rel=1e-6)


K80, IN_NODES = load_network("k80_10gbe"), Nodes(intra="v100_pcie", ranks_per_node=4)


def two_level(**given: Any) -> Callable[[], object]:
    return lambda: list(network_choices("k80_10gbe", [None], (8,), two_level=True, **given))


@pytest.mark.parametrize(
    ("call", "key", "given"),
    [
        (lambda: K80.node_network(IN_NODES, "ring", 6), "nodes of 4", 6),
        (two_level(ranks_per_node=4), "--intra", "k80_10gbe"),
        (two_level(intra="v100_pcie"), "--ranks-per-node", "k80_10gbe"),
        (lambda: load_network("ideal").network(4), "alpha_s", "ideal"),
        (lambda: load_network("k80"), "network", "k80"),
        (lambda: load_network("nowhere.yaml"), "nowhere.yaml", NOTHING),
    ],
)
def test_what_is_no_network_is_refused(call: Callable[[], object], key: str, given: object) -> None:
    refused(call, key, given, error=(UserError, ValueError))


@pytest.mark.parametrize(
    ("text", "key", "given"),
    [
        (f"{GOOD}fits: [{FIT}]\nfit: 1", "fit", "did you mean 'fits'?"),
        (f"{GOOD}fits: [{FIT}, {FIT}]", "world_size of fits", "8, 8"),
        (f"{GOOD}link: {{}}\nnodes: {{ranks_per_node: 0, intra: v100_pcie}}", "nodes: ranks_per_node", 0),
        ("a: [", "mine.yaml", NOTHING),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path: Path, text: str, key: str, given: object) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert str(path) in refused(lambda: load_network(path), key, given, error=UserError)
