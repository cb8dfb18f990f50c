"""A mistake is told in one line before anything starts; what is right is typed, complete and named by its content."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from experiments.config.builders import build_reducer
from experiments.config.compose import compose_run
from experiments.config.errors import UserError
from experiments.config.overrides import expand
from experiments.config.schema import from_yaml, to_yaml
from experiments.sweeps.study import jobs_of
from experiments.training.preflight import prepare_runs


def compose_one(*words: str, **kwargs: int):
    (config,) = prepare_runs([list(words)], **kwargs)
    return config


MISTAKES = {
    "sede=1": "'sede' is not a key of the configuration.*did you mean 'seed'",
    "sparsifier=mikro": "sparsifier must be one of .*micro.*got 'mikro'.*did you mean 'micro'",
    "model=resnet9": "model must be one of .*got 'resnet9'",
    "experiment=nothing": "experiment must be one of .*got 'nothing'",
    "sparsifier.selector.rul=published": "'rul' is not a key of sparsifier.selector, .*did you mean 'rule'",
    "sparsifer.codec=half": "sparsifer",
    "sparsifier.selector.rule=publishd": "rule of micro must be one of agreed, repaired, published, got 'publishd'",
    "sparsifier.exchange=unoin": "exchange must be one of .*gather.*, got 'unoin'; did you mean 'union'",
    "sparsifier.codec=int4": "codec must be one of .*half.*raw",
    "sparsifier.feedback=some": "feedback must be one of .*none, residual",
    "density=0": r"density must be in \(0, 1\], got 0",
    "density=-1": r"density must be in \(0, 1\], got -1",
    "density=2": r"density must be in \(0, 1\], got 2",
    "density=nan": "density must be a finite number, got nan",
    "density=much": "density must be a finite number, got 'much'",
    "seed=1.5": "seed must be a whole number, got 1.5",
    "epochs=abc": "epochs must be a whole number, got 'abc'",
    "epochs=null": "epochs must be a whole number, got null",
    "compile=perhaps": "compile must be true or false, got 'perhaps'",
    "lr_milestones=3": r"lr_milestones must be a list, got 3: write 'lr_milestones=\[...\]'",
    "cluster.nproc_per_node=two": "cluster.nproc_per_node must be a whole number, got 'two'",
    "density_warmup=1000": r"density_warmup holds several settings \(steps, start, stages\), got 1000: set one",
    "sparsifier.feedback.name=momentum": "'name' is not a key of sparsifier.feedback, .*set sparsifier.feedback=VALUE",
    "sparsifier.feedback.momentum=0.9": "together, 'sparsifier.feedback={name: NAME, momentum: VALUE}'",
    "model=5": "model must be one of .*, got '5'",
    "epochs": "'epochs' is not KEY=VALUE",
    "output=a b(": r"cannot read 'output=a b\(': put a value .* in quotes",
    "network=ideal": "network is not a setting of a training, .*experiments.simulate --network ideal",
    "sweep=demo": "sweep is not a setting of a training, it lists the runs of a study: .*experiments.sweep demo",
    "paper=micro": "paper is not a setting of a training, .*python -m experiments.reproduce micro",
    "seed=${nothing}": "nothing",
    "seed=-1": "seed must be at least 0",
    "cluster.timeout_s=0": r"cluster.timeout_s must be in \[5, 604,800\] seconds, got 0",
    "cluster.timeout_s=-3": r"cluster.timeout_s must be in \[5, 604,800\] seconds, got -3",
    "cluster.timeout_s=inf": "cluster.timeout_s must be a finite number, got inf",
    "cluster.timeout_s=nan": "cluster.timeout_s must be a finite number, got nan",
    "cluster.timeout_s=1e9": r"cluster.timeout_s must be in \[5, 604,800\] seconds, got 1e\+09",
    "epochs=0": "epochs must be at least 1",
    "batch_size=0": "batch_size must be at least 1",
    "lr=0": "lr must be positive",
    "lr=inf": "lr must be a finite number, got inf",
    "optimizer.momentum=1": r"optimizer.momentum must be in \[0, 1\)",
    "nonfinite=ignore": "nonfinite must be one of stop, skip, got 'ignore'",
    "model.num_classes=5": "model.num_classes is 5, dataset digits has 10 classes",
    "model.settings.depth=3": "depth",
    "dataset.augment=flip": "augment must be one of none, crop_flip",
    "cluster.nproc_per_node=0": "nproc_per_node must be at least 1",
    "cluster.nproc_per_node=200": r"x accumulate 1 is more than an epoch of dataset digits has \(1437\)",
    "cluster.world_size=3": "cluster.world_size is 3, but 2 = nnodes x nproc_per_node",
    "cluster.device=tpu": "cluster.device must be one of auto, cpu, cuda",
    "+new_key=1": "'new_key' is not a key of the configuration",
    "++new_key=1": "'new_key' is not a key of the configuration",
    "++model.sede=1": "'sede' is not a key of model",
    "~seed": "seed cannot be removed",
    "~cluster.device": "cluster.device cannot be removed",
    "seed=0,1": "-m",
    "density_warmup.steps=-1": "density_warmup.steps must be at least 0",
    "sparsifier=dgc": "feedback momentum holds the momentum, got optimizer.momentum=0.9 .*: set optimizer.momentum=0$",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_a_mistake_is_one_line(word: str) -> None:
    with pytest.raises(UserError, match=MISTAKES[word]) as caught:
        compose_one(word)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sparsifier=cltk", "sparsifier.exchange=gather"), "one rank chooses for all: use exchange union"),
        (("sparsifier=randomk_unbiased", "sparsifier.feedback=residual"), "set feedback=none"),
        (("sparsifier=threshold", "sparsifier.selector.value=-1"), "must be positive"),
        (("sparsifier=topk", "sparsifier.indices=bitmap", "density=0.01"), "pays from density 1/32 on, got 0.01"),
        (("sparsifier=topk", "sparsifier.indices=bitmap", "density=0.98"), "up to density 31/32, got 0.98: dense"),
        (("sparsifier=accordion", "sparsifier.selector.scope=model"), "density accordion differs by layer"),
        (("sparsifier=accordion", "density_warmup.steps=5"), "density_warmup.steps is 5, but sparsifier.policy"),
        (("sparsifier=powersgd", "sparsifier.codec=half"), "sparsifier.codec means nothing for powersgd, got 'half'"),
        (("sparsifier=dense", "sparsifier.codec=half"), "sparsifier.codec means nothing for dense, got 'half'"),
        (("density_warmup.steps=5", "density_warmup.start=3"), r"must be in \(0, 1\], got 3"),
        (("density_warmup.steps=5", "density_warmup.stages=6"), r"stages of the warm-up must be in \[0, 5\]"),
        (("sparsifier=dgc", "optimizer.nesterov=pytorch"), "set optimizer.momentum=0 optimizer.nesterov=none$"),
        (("cluster=simulated", "cluster.world_size=0"), "cluster.world_size must be at least 1"),
        (("cluster.num_threads=0",), "cluster.num_threads must be at least 1, got 0"),
        (("optimizer.nesterov=pytorch", "optimizer.momentum=0"), "nesterov=pytorch needs a momentum"),
        (("cluster=nodes", "cluster.nproc_per_node=2"), "'cluster.nnodes' is missing"),
        (("cluster=slurm", "cluster.nproc_per_node=2"), "'cluster.nnodes' is missing"),
        (("cluster=nodes", "cluster.nnodes=2"), "cluster.rdzv_endpoint must name a port .* got 'localhost:0'"),
        (
            ("cluster.rdzv_endpoint=foo",),
            "cluster.rdzv_endpoint must be HOST:PORT, one of the nodes and a free port of",
        ),
        (("cluster.rdzv_endpoint='localhost:99999'",), "must have a port from 1 to 65535, got 'localhost:99999'"),
        (("cluster.rdzv_endpoint='localhost:ssh'",), "must have a port from 1 to 65535, got 'localhost:ssh'"),
        (
            ("sparsifier.reducer={name:split}",),
            "split reduces nothing densely: set dense, only, min_dims or start_step",
        ),
        (("sparsifier.reducer={name:split,dense:['*norm*']}",), r"dense: no trained parameter is called '\*norm\*'"),
        (("sparsifier.reducer={name:split,min_dim:2}",), "has .* got 'min_dim'; did you mean 'min_dims'"),
        (
            ("sparsifier=topk_layers", "sparsifier.policy={name:by_name,patterns:[['embed*',0.1]]}"),
            r"patterns: no trained parameter is called 'embed\*'",
        ),
        (
            ("sparsifier=dgc", "optimizer.momentum=0", "sparsifier.reducer={name:split,min_dims:2}"),
            "feedback momentum holds the optimizer's momentum, which dense parameters",
        ),
        (
            ("sparsifier=dgc", "sparsifier.reducer={name:two_level,ranks_per_node:1}", "optimizer.momentum=0.9"),
            "feedback momentum holds the momentum, got optimizer.momentum=0.9 too",
        ),
        (
            ("sparsifier.reducer={name:split,min_dims:2,reducer:{name:two_level,ranks_per_node:3}}",),
            "ranks_per_node of sparsifier micro must divide the number of workers, got 3 for",
        ),
        (
            ("sparsifier.reducer={name:two_level,ranks_per_node:1,reducer:powersgd}",),
            "reducer of a sparsifier's reducer must be sparse, split or two_level, got 'powersgd'",
        ),
        (
            ("schedule=exact", "sparsifier.reducer={name:two_level,ranks_per_node:1}"),
            "schedule exact plans from a link that was measured in one level, two_level has two: choose schedule=layer",
        ),
        (("dataset=cifar10", "model=resnet20", "dataset.root=/nowhere"), "/nowhere"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        compose_one(*words)
    assert "\n" not in str(caught.value)


def test_reducers_nest_in_a_configuration() -> None:
    words = "sparsifier.reducer={name:split,min_dims:2,reducer:{name:two_level,ranks_per_node:2}}"
    reducer = build_reducer(compose_one("cluster=simulated", "cluster.world_size=4", words))
    assert reducer.method == "split two_level 2 micro (agreed)"


def test_torn_data_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    whole = pickle.dumps({"data": [], "labels": []})
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]:
        (folder / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="data_batch_1"):
        compose_one("dataset=cifar10", "model=resnet20", f"dataset.root={tmp_path}")


def test_joined_ranks_set_the_world_size() -> None:
    assert compose_one("cluster.nproc_per_node=2", joined_world_size=6).world_size == 6
    with pytest.raises(UserError, match="3, but 6 ranks were started"):
        compose_one("cluster.world_size=3", joined_world_size=6)
    with pytest.raises(UserError, match=r"cluster=simulated trains in one process, .* \(6\): call it without them"):
        compose_one("cluster=simulated", joined_world_size=6)


def write_images(root: Path) -> Path:
    """Write 100 images in the layout of CIFAR-10."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    batch = {b"data": np.zeros((100, 3072), np.uint8), b"labels": [i % 10 for i in range(100)]}
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / name).write_bytes(pickle.dumps(batch))
    return root


def test_a_study_of_conf_experiment_has_the_last_word_but_for_the_command_line(tmp_path: Path) -> None:
    words = ["experiment=cifar10_small", f"dataset.root={write_images(tmp_path)}"]
    config = compose_one(*words)
    assert (config.epochs, config.lr, config.batch_size, config.world_size) == (2, 0.05, 16, 4)
    assert compose_one(*words, "epochs=7").epochs == 7


def test_a_study_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="did you mean 'demo'"):
        jobs_of("dmeo", [])


def test_yaml_holds_everything(tmp_path: Path) -> None:
    config = compose_one("sparsifier=topk_gather", "density=0.003", "density_warmup.steps=7")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert from_yaml(path) == config


def test_dense_has_density_one_whatever_is_asked() -> None:
    assert compose_one("sparsifier=dense", "density=0.001").density == 1.0


def test_the_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = compose_run(["dataset.root=~/data", "output=~/runs", "start_from=~"])
    assert (config.dataset.root, config.output) == ("/home/somebody/data", "/home/somebody/runs")
    assert config.start_from == "/home/somebody"


def test_a_sweep_expands_to_all_combinations() -> None:
    assert expand(["seed=0,1", "sparsifier=topk,micro", "lr=0.1"]) == [
        ["seed=0", "sparsifier=topk", "lr=0.1"],
        ["seed=0", "sparsifier=micro", "lr=0.1"],
        ["seed=1", "sparsifier=topk", "lr=0.1"],
        ["seed=1", "sparsifier=micro", "lr=0.1"],
    ]
