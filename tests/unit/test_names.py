"""Every method is named as its yaml says; one without a yaml has stable defaults."""

import pytest

import micro
from experiments.config import method_names
from experiments.config.compose import compose_run
from experiments.config.identity import run_name
from experiments.config.method_names import description, method_of, usual_rules, words_of
from experiments.reports.names import in_order, label

METHODS = sorted(path.stem for path in method_names.METHODS.glob("*.yaml"))
# words of a command line -> the method's part of the run's name, its label
OTHER_PARTS: dict[tuple[str, ...], tuple[str, str]] = {
    ("sparsifier.selector=theirs",): ("theirs", "theirs"),
    ("sparsifier.selector=threshold",): ("threshold", "Hard-threshold"),
    ("sparsifier=topk", "sparsifier.selector=micro"): ("micro", "MiCRO"),
    ("sparsifier=topk", "sparsifier.exchange=oktopk"): ("topk+exchange_oktopk", "Top-k, exchange oktopk"),
    ("sparsifier=micro", "sparsifier.codec=half", "sparsifier.indices=shortest"): (
        *("micro+codec_half+indices_shortest", "MiCRO, codec half, indices shortest"),
    ),
    ("sparsifier=micro", "sparsifier.reducer={name: split, min_dims: 2}"): (
        *("micro+reducer_split", "MiCRO, reducer split"),
    ),
    ("sparsifier=dgc", "sparsifier.feedback=residual"): ("dgc+feedback_residual", "DGC, feedback residual"),
    ("sparsifier=micro_scaled_elements", "sparsifier.selector.selector=topk"): (
        *("scaled_elements_topk", "scaled_elements_topk"),
    ),
    ("sparsifier=fft", "sparsifier.reducer=powersgd"): ("powersgd", label("powersgd")),
    ("sparsifier=topk", "sparsifier.name=micro"): ("topk", "Top-k"),
    ("sparsifier=micro", "sparsifier.name=mine", "sparsifier.codec=half"): ("mine", "mine"),
    ("sparsifier=micro_scaled_elements", "sparsifier.selector.memory=0.5"): (  # settings make variants
        *("micro_scaled_elements", "MiCRO, scaled by element"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", OTHER_PARTS, ids=" ".join)
def test_a_run_is_named_after_the_parts_that_it_has(words: tuple[str, ...]) -> None:
    config = compose_run([*words, "cluster=simulated", "cluster.world_size=4"])
    method, name = OTHER_PARTS[words]
    assert f"-digits-{method}-d" in run_name(config)
    assert label(method) == name


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "dgc+feedback_residual", "topk+exchange_oktopk+codec_half"])
def test_a_method_is_chosen_by_its_name(method: str) -> None:
    assert method_of(compose_run(words_of(method))) == method


def test_the_usual_rule_is_a_parts_default() -> None:
    bases = {"selector": micro.Selector, "exchange": micro.Exchange, "codec": micro.Codec}
    ruled = [(kind, name, rule) for (kind, name), rule in usual_rules().items() if kind in bases and rule]
    assert ruled
    assert [(kind, name, micro.build(bases[kind], name).rule_name) for kind, name, _ in ruled] == ruled


def test_every_method_has_a_label_and_a_place_of_its_own() -> None:
    for key in ("label", "order"):
        said = [description(name)[key] for name in METHODS]
        assert sorted(said) == sorted(set(said))


def test_a_method_without_a_yaml_is_called_by_its_key_and_comes_last() -> None:
    assert label("my_method") == "my_method"
    assert label("my_method", "lr=1") == "my_method (lr=1)"
    assert in_order(["other", "my_method", "micro", "dense"]) == ["dense", "micro", "my_method", "other"]
