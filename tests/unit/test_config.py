"""A mistake is one line before anything starts; a correct configuration is typed, complete and named by its content."""

from pathlib import Path

import pytest

from experiments.config.builders import build_reducer
from experiments.config.compose import compose_run
from experiments.config.keys import from_yaml, to_yaml
from experiments.training.preflight import prepare_runs
from tests.products import TIER
from tests.refusals import refused


def compose_one(*words: str, **kwargs: int):
    (config,) = prepare_runs([list(words)], **kwargs)
    return config


# Words that contradict each other, or parts that do not fit, and what the line must have.
MISTAKES = {
    "sparsifier.selector.rul=published": ("sparsifier.selector", "did you mean 'rule'"),
    "sparsifier.exchange=unoin": ("exchange", "did you mean 'union'"),
    "sparsifier.selector=null": ("sparsifier.selector", "sparsifier=dense"),
    "sparsifier.reducer={name:split,min_dim:2}": ("min_dim", "did you mean 'min_dims'"),
    "sparsifier.reducer={name:two_level,ranks_per_node:3}": ("ranks_per_node", "got 3"),
    "sparsifier=cltk sparsifier.exchange=gather": ("exchange", "union"),
    "sparsifier.policy=constant density_warmup.steps=5": ("density_warmup.steps", "5"),
    "sparsifier=powersgd sparsifier.codec=half": ("sparsifier.codec", "half"),
    "sparsifier=dense optimizer.momentum_at=gradient": ("optimizer.momentum_at", "dense"),
    "sparsifier=sparseloco optimizer.momentum_at=gradient": ("optimizer.momentum_at", "0.95"),
    "sparsifier=dgc optimizer.nesterov=pytorch": ("optimizer.momentum=0", "optimizer.nesterov=none"),
    "density_warmup.steps=5 density_warmup.stages=6": ("stages", "5"),
    "density_warmup.stages=3": ("density_warmup.stages", "density_warmup.steps"),
    "schedule=layerwise schedule.select=nofile": ("schedule.select", "layerwise"),
    "schedule=exact": ("schedule.trace", "experiments.profile"),
    "schedule.trace=nofile": ("schedule", "auto"),
    "schedule=exact sparsifier.reducer={name:two_level,ranks_per_node:1}": ("exact", "two_level"),
    "schedule=layerwise cluster=simulated": ("schedule=layerwise", "auto"),
    "model.num_classes=5": ("model.num_classes", "5"),
    "model.settings.depth=3": ("depth", "model.settings"),
    "model=mlp model.settings.hidden=99999999999999": ("mlp", "99999999999999"),
    "model=mlp peak_tflops=1": ("peak_tflops", "mlp"),
    "model=resnet18 batch_size=1": ("batch_size", "resnet18"),
    "model=gpt_small dataset=manuals dataset.sequence_length=2000": ("dataset.sequence_length", "2000", "1024"),
    "model=lstm_small": ("lstm", "digits"),
    "model=neumf_small dataset=latent": ("batch_size", "16"),
    "dataset.augment=flip": ("dataset.augment", "flip"),
    "dataset.negatives=4": ("dataset.negatives", "4"),
    "dataset=cifar10 model=resnet20 dataset.root=/nowhere": ("/nowhere", "data.prepare"),
    "model=lstm_small dataset=manuals channels_last=true": ("channels_last", "lstm"),
    "cluster.nproc_per_node=200": ("200", "1437"),
    "cluster.world_size=3": ("cluster.world_size", "3"),
    "cluster=simulated cluster.world_size=null": ("cluster.world_size", "missing"),
    "cluster=simulated cluster.timeout_s=20": ("cluster.timeout_s", "20"),
    "cluster=nodes": ("cluster.nnodes", "missing"),
    "cluster=nodes cluster.nnodes=2": ("cluster.rdzv_endpoint", "localhost:0"),
    "cluster.rdzv_endpoint=foo": ("cluster.rdzv_endpoint", "foo"),
    "cluster.rdzv_endpoint='localhost:99999'": ("cluster.rdzv_endpoint", "99999"),
    "cluster=nodes cluster.nnodes=2 cluster.rdzv_endpoint='no-host.invalid:1'": ("no-host.invalid:1", "not known"),
    "cluster.slurm.time_limit=0:00:00": ("cluster.slurm.signal_s", "0:00:00"),
    "cluster=slurm cluster.nnodes=2 cluster.slurm.time_limit=3600": ("hours:minutes:seconds", "3600"),
    "cluster=slurm cluster.nnodes=2 cluster.slurm.time_limit=00:01:00": ("signal_s must be shorter", "00:01:00"),
    "cluster=slurm cluster.nnodes=2 cluster.slurm.extra=[exclusive]": ("cluster.slurm.extra", "exclusive"),
    "lr_milestones=[2,1]": ("lr_milestones", "[2.0, 1.0]"),
    "lr_shape=cosine lr_milestones=[1]": ("lr_milestones", "[1.0]"),
    "lr_shape=cosine lr_decay=0.5": ("lr_decay", "0.5"),
    "resize=average": ("resize", "start_from"),
    "tracking.mode=online": ("tracking.mode", "tracking=wandb"),
    "tracking=wandb tracking.project=null": ("tracking.project", "missing"),
    "optimizer=adam optimizer.momentum=0.9": ("optimizer.momentum", "0.9"),
    "optimizer.nesterov=pytorch optimizer.momentum=0": ("optimizer.nesterov", "momentum"),
    "optimizer.momentum_at=gradient optimizer.momentum=0": ("optimizer.momentum_at", "momentum"),
    "optimizer.betas=[0.9]": ("optimizer.betas", "[0.9]"),
    "optimizer.clip_at=update": ("optimizer.clip_at", "optimizer.clip"),
    "optimizer.clip_norm=global": ("optimizer.clip_norm", "optimizer.clip"),
    "rounds.mix=0.5": ("rounds.mix", "rounds.every"),
    "rounds.every=100000": ("rounds.every", "100000"),
    "rounds.every=5 rounds.momentum=0.9": ("rounds.momentum", "micro"),
    "rounds.every=5 rounds.nesterov=true": ("rounds.nesterov", "momentum"),
    "rounds.every=5 rounds.fragments=6": ("rounds.fragments", "5"),
    "rounds.every=5 rounds.delay=5": ("rounds.delay", "5"),
    "rounds.every=5 optimizer.lr_at=gradient": ("optimizer.lr_at", "rounds.every"),
    "rounds.every=5 sparsifier=dgc optimizer.momentum=0": ("momentum", "gradient"),
    "rounds.every=5 rounds.lost_workers=go_on": ("cluster.world_size", "rounds.lost_workers"),
    "rounds.every=5 rounds.lost_workers=go_on cluster.world_size=4": ("rounds.lost_workers", "torchrun"),
}


@pytest.mark.parametrize("words", list(MISTAKES)[:: 4 if TIER == "fast" else 1])
def test_what_does_not_go_together_is_one_line(words: str) -> None:
    refused(lambda: compose_one(*words.split()), *MISTAKES[words])


def test_a_mistake_has_the_same_message_if_causes_of_errors_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OC_CAUSE", "1")  # as under a debugger
    refused(lambda: compose_one("seed=1.5"), "seed must be", "1.5")
    refused(lambda: compose_one("sparsifier.selector.rul=published"), "sparsifier.selector", "rul")


def test_reducers_nest_in_a_configuration() -> None:
    words = "sparsifier.reducer={name:split,min_dims:2,reducer:{name:two_level,ranks_per_node:2}}"
    reducer = build_reducer(compose_one("cluster=simulated", "cluster.world_size=4", words))
    assert reducer.method == "split two_level 2 micro (agreed)"


def test_joined_ranks_set_the_world_size() -> None:
    assert compose_one("cluster.nproc_per_node=2", joined_world_size=6).world_size == 6
    refused(lambda: compose_one("cluster.world_size=3", joined_world_size=6), "cluster.world_size", 6)
    refused(lambda: compose_one("cluster=simulated", joined_world_size=6), "cluster=simulated", 6)


def test_yaml_holds_everything_and_dense_has_density_one(tmp_path: Path) -> None:
    config = compose_one("sparsifier=topk_gather", "density=0.003", "density_warmup.steps=7")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert from_yaml(tmp_path / "config.yaml") == config
    assert compose_one("sparsifier=dense", "density=0.001").density == 1.0


def test_the_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = compose_run(["dataset.root=~/data", "output=~/runs", "start_from=~"])
    assert (config.dataset.root, config.output) == ("/home/somebody/data", "/home/somebody/runs")
    assert config.start_from == "/home/somebody"
