"""The networks of conf/network, and what is said of a mistake in one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.config.errors import UserError
from experiments.studies.simulated_steps.network_choices import NodeOptions, nodes_of
from experiments.studies.simulated_steps.networks import (
    LinkValues,
    NetworkPreset,
    Nodes,
    known_networks,
    load_network,
)
from micro.operations import OPS, Op
from micro.planning.costs import Flat
from tests.refusals import NOTHING, refused

GOOD = "name: x\ninterconnect: y\nsource: z\n"
FIT = "{world_size: 8, alpha_s: 1e-3, beta_s: 1e-9}"


def completed(preset: NetworkPreset, rate_bps: float = 1e9, alpha_s: float = 5e-5) -> NetworkPreset:
    """Return a network of one link with what its file leaves open."""
    assert preset.link
    return replace(preset, link=LinkValues(alpha_s=alpha_s, rate_bps=rate_bps, overhead=preset.link.overhead))


@pytest.mark.parametrize("name", known_networks())
def test_every_network_can_be_used(name: str) -> None:
    """It is named as its file, says where it is from, and costs more with more ranks."""
    preset = load_network(name)
    assert preset.name == name
    assert preset.source
    if not preset.fits:
        preset = completed(preset)
    seconds = [preset.network(n).seconds("all_reduce", 1e6) for n in (1, 2, 256, 2048)]
    assert seconds[0] == 0
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("name", [name for name in known_networks() if load_network(name).fits])
def test_a_fit_is_met_exactly(name: str) -> None:
    """For the numbers of ranks that were fitted; bytes are those of all ranks in an all-gather."""
    preset = load_network(name)
    for fit in preset.fits:
        op, size = ("all_reduce", 1e6) if preset.fitted == "all_reduce" else ("gather_rows", 1e6 / fit.world_size)
        seconds = preset.network(fit.world_size).seconds(op, size)  # type: ignore[arg-type]
        assert seconds == pytest.approx(fit.alpha_s + 1e6 * fit.beta_s)


def test_other_numbers_of_ranks_scale_from_the_fit_below() -> None:
    """And from the first fit where there is none below."""
    preset = load_network("v100_10gbe")
    assert preset.link_of(15) == preset.link_of(8)
    assert preset.link_of(2) == preset.link_of(8)
    assert preset.link_of(2048) == preset.link_of(16) != preset.link_of(8)
    assert preset.network(64, "double_tree") == Flat(preset.link_of(16), 64, "double_tree")
    assert preset.network(64, "double_tree", rule="published") == Flat(
        preset.link_of(16), 64, "double_tree", "published"
    )


def test_figures_of_the_paper_stand_here() -> None:
    """The cluster that the published simulations scale, inverted for a ring of 16."""
    link = load_network("k80_10gbe").link_of(64)
    assert link.alpha_s == pytest.approx(32.4e-6)
    assert link.beta_s == pytest.approx(1.97e-9 * 8 / 15)


@pytest.mark.parametrize("name", [name for name in known_networks() if load_network(name).nodes])
def test_nodes_of_a_file_have_two_speeds(name: str) -> None:
    """Faster within a node than between nodes, for up to thousands of ranks."""
    preset = load_network(name)
    nodes = nodes_of(preset, None, NodeOptions())
    assert nodes
    for algorithm in ("ring", "hierarchical"):
        network = nodes.network(preset, 2048, algorithm)  # type: ignore[arg-type]
        assert (network.world_size, network.ranks_per_node) == (2048, nodes.ranks_per_node)
        assert network.intra.alpha_s < network.inter.alpha_s or network.intra.beta_s < network.inter.beta_s
        assert network.seconds("all_reduce", 1e8) < Flat(network.inter, 2048).seconds("all_reduce", 1e8) * (1 + 1e-12)
    given = NodeOptions(intra="v100_pcie", ranks_per_node=2)
    assert nodes_of(preset, None, given) == Nodes(intra=load_network("v100_pcie"), ranks_per_node=2)


def test_rates_of_derived_networks_are_those_of_their_specifications() -> None:
    """NVLink: six links of 25 GB/s; Ethernet: 1448 of 1538 bytes are payload."""
    assert 1 / load_network("v100_nvlink").link_of(8).beta_s == pytest.approx(6 * 25e9)
    assert 1 / load_network("nvlink_25gbe").link_of(8).beta_s == pytest.approx(25e9 / 8 * 1448 / 1538, rel=1e-6)
    assert 1 / load_network("pcie_10gbe").link_of(8).beta_s == pytest.approx(10e9 / 8 * 1448 / 1538, rel=1e-6)


def test_a_network_of_one_link_has_no_nodes() -> None:
    """Unless they are given, with the network within them."""
    preset = load_network("k80_10gbe")
    assert nodes_of(preset, None, NodeOptions()) is None
    for given, missing in ({"ranks_per_node": 4}, "--intra"), ({"intra": "v100_pcie"}, "--ranks-per-node"):
        options = NodeOptions(two_level=True, **given)  # type: ignore[arg-type]
        refused(lambda options=options: nodes_of(preset, None, options), missing, "k80_10gbe", error=UserError)  # type: ignore[misc]
    nodes = nodes_of(preset, None, NodeOptions(intra="v100_pcie", ranks_per_node=4, two_level=True))
    assert nodes
    assert nodes.network(preset, 2).ranks_per_node == 2, "fewer workers are one node"


@pytest.mark.parametrize("op", OPS)
def test_nodes_of_one_kind_of_link_are_flat(op: Op) -> None:
    """The network within, where all ranks are in one node; the network between, where each is in its own."""
    intra, inter = load_network("v100_pcie"), load_network("v100_10gbe")
    for world_size in (1, 3, 8):
        one = Nodes(intra=intra, ranks_per_node=8).network(inter, world_size)
        assert one.seconds(op, 1e6) == pytest.approx(intra.network(world_size).seconds(op, 1e6))
    for world_size in (1, 8, 100):
        alone = Nodes(intra=intra, ranks_per_node=1).network(inter, world_size)
        assert alone.seconds(op, 1e6) == pytest.approx(inter.network(world_size).seconds(op, 1e6))


def test_nodes_are_full() -> None:
    """Or there is one."""
    intra = load_network("v100_pcie")
    assert Nodes(intra=intra, ranks_per_node=8).network(intra, 24).world_size == 24
    with pytest.raises(UserError, match="12 workers do not fill nodes of 8: give at most 8, or a multiple"):
        Nodes(intra=intra, ranks_per_node=8).network(intra, 12)


def test_an_ideal_link_has_the_rate_that_is_asked_for() -> None:
    """Of which headers take their part."""
    link = completed(load_network("ideal")).link_of(4)
    assert (link.alpha_s, link.gamma_s) == (5e-5, 0.0)
    assert link.beta_s == pytest.approx(8e-9 * 1514 / 1448, rel=1e-6)
    with pytest.raises(UserError, match="network ideal has no alpha_s"):
        load_network("ideal").network(4)
    with pytest.raises(UserError, match=r"network nccl_pcie has no rate: .*give rate_bps"):
        load_network("nccl_pcie").network(4)


@pytest.mark.parametrize(
    ("text", "key", "given"),
    [
        (f"{GOOD}fits: [{FIT}]\nfit: 1", "fit", "did you mean 'fits'?"),
        (f"name: x\nsource: z\nfits: [{FIT}]", "interconnect", NOTHING),
        (GOOD, "fits or a link", NOTHING),
        (f"{GOOD}fits: [{FIT}]\nlink: {{}}", "fits or a link", NOTHING),
        (f"{GOOD}fits: []", "fits or a link", NOTHING),
        (f"{GOOD}fits: 3", "fits", 3),
        (f"{GOOD}fits: [{FIT}, {FIT}]", "world_size of fits", "8, 8"),
        (f"{GOOD}fits: [{{world_size: 1, alpha_s: 1, beta_s: 1}}]", "fits[0]: world_size", 1),
        (f"{GOOD}fits: [{{world_size: 2, alpha_s: x, beta_s: 1}}]", "fits[0]: alpha_s", "x"),
        (f"{GOOD}fits: [{{world_size: 2, alpha_s: 1}}]", "fits[0]: 'beta_s'", NOTHING),
        (f"{GOOD}fits: [3]", "fits[0]", "int"),
        (f"{GOOD}link: {{rate_bps: 0}}", "link: rate_bps", 0),
        (f"{GOOD}link: {{alpha: 0}}", "link: 'alpha'", "did you mean 'alpha_s'?"),
        (f"{GOOD}algorithm: tree\nfits: [{FIT}]", "algorithm", "tree"),
        (f"{GOOD}fitted: reduce\nfits: [{FIT}]", "fitted", "reduce"),
        (f"{GOOD}link: {{}}\nnodes: 8", "nodes", "int"),
        (f"{GOOD}link: {{}}\nnodes: {{intra: v100_pcie}}", "nodes: 'ranks_per_node'", NOTHING),
        (f"{GOOD}link: {{}}\nnodes: {{ranks_per_node: 0, intra: v100_pcie}}", "nodes: ranks_per_node", 0),
        (f"{GOOD}link: {{}}\nnodes: {{ranks_per_node: 8, intra: v100_pci}}", "nodes: intra", "v100_pci"),
        ("- 1", "mapping", "list"),
        ("a: [", "mine.yaml", NOTHING),
    ],
)
def test_a_mistake_in_a_file_is_told_in_one_line(tmp_path: Path, text: str, key: str, given: object) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert refused(lambda: load_network(path), key, given, error=UserError).startswith(f"{path}: ")


def test_a_file_of_ones_own_will_do(tmp_path: Path) -> None:
    """By its path."""
    path = tmp_path / "mine.yaml"
    path.write_text(f"{GOOD}fits: [{FIT}]")
    assert load_network(str(path)).network(8).seconds("all_reduce", 1e6) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("call", "key", "given"),
    [
        (lambda: load_network("k80"), "network", "k80"),
        (lambda: load_network("nowhere.yaml"), "nowhere.yaml", NOTHING),
        (lambda: load_network("k80_10gbe").network(4, "rings"), "algorithm", "rings"),
        (lambda: load_network("k80_10gbe").network(0), "world_size", 0),
    ],
)
def test_what_is_no_network_is_refused(call: Callable[[], object], key: str, given: object) -> None:
    refused(call, key, given, error=UserError)
