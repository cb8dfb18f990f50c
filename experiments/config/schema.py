"""The settings of a run as dataclasses: names and types. The values are in conf/."""

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import IO, Any, cast, get_type_hints

from omegaconf import OmegaConf

Flat = dict[str, Any]  # settings by dotted keys
TIMEOUT_S = 300.0  # of cluster.timeout_s
LAUNCH = "MICRO_LAUNCH"  # "node" in a job script: each srun task starts the ranks of its node
IN_JOB = "slurm"  # a value of cluster.rdzv_endpoint: the nodes meet at the first node of the job
SIMULATED = "simulated"  # a name of a cluster
OWN_DATA = ("imagenet", "text")  # data sets whose files a user chooses; those of others are published


@dataclass(kw_only=True)
class ModelConfig:
    """A network of models/ and its settings.

    Attributes:
        num_classes: outputs of the network; null: as many as the data set has classes.
    """

    name: str
    num_classes: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class DatasetConfig:
    """A data set of data/, where its files are, and how batches are made of it.

    Attributes:
        root: the folder that holds the data set's own folder, which data.prepare makes.
        digest: of a user's own files, of OWN_DATA; filled in where they are. Given, they must have it.
        augment: of images: how the training images are varied.
        sequence_length: of text: words of a sample, after which gradients are cut off.
        negatives: of interactions: items not taken that are drawn beside each one that was.
    """

    name: str
    root: str | None = None
    digest: str | None = None
    augment: str = "none"
    sequence_length: int | None = None
    negatives: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class SparsifierConfig:
    """A composition of selector, exchange, codec, index codec and feedback, or a reducer that is none.

    Each part is a name, or a mapping of ``name`` and settings. The policy says how the density changes from layer to
    layer and with time; without one, density and density_warmup do.

    Attributes:
        reducer: sparse: the composition of the parts below; dense, fft, dct, powersgd have none. split:
            the composition for some parameters, others dense: {name: split, min_dims: 2} takes biases and norms out,
            {name: split, dense: ["embed*"], start_step: 100} embeddings, and the first 100 steps of all. two_level: the
            composition between nodes, the dense mean within them: {name: two_level, ranks_per_node: 4}. They nest in
            any order: {name: split, min_dims: 2, reducer: {name: two_level, ranks_per_node: 4}}.
        selector: which indices are sent; null: none are chosen, the reducer is no composition.
        exchange: how the indices and values of all workers meet.
        codec: what values travel as.
        indices: what indices travel as.
        feedback: what a worker keeps of what it did not send.
        policy: how the density changes from layer to layer and with time; null: by density_warmup alone.
    """

    name: str
    reducer: Any = "sparse"
    selector: Any = None
    exchange: Any = "union"
    codec: Any = "raw"
    indices: Any = "int32"
    feedback: Any = "residual"
    policy: Any = None

    @property
    def is_dense(self) -> bool:
        """Whether this is the baseline that sends everything."""
        return part_name(self.reducer) == "dense"

    @property
    def sends_everything(self) -> bool:
        """Whether every element is in the update: the density is then 1, whatever is configured."""
        return part_name(self.reducer) in ("dense", "powersgd") or part_name(self.selector) == "everything"


@dataclass(kw_only=True)
class SlurmConfig:
    """How a study is queued on a site that SLURM runs; it changes nothing of what a run computes.

    Attributes:
        partition, account, qos, constraint: as sbatch has them; null leaves the choice to the site.
        time_limit: of one run, hours:minutes:seconds, with days- before it where need be; null for the partition's own.
        gpus_per_node: GPUs to ask for, 0 for none.
        cpus_per_worker: cores to ask for, for each worker of a node.
        throttle: how many runs of the study may run at once, null for all.
        requeue: whether a run that the time limit stops is queued again and resumes.
        signal_s: how long before the time limit a run gets the signal to save and stop, in seconds; 0: never.
        setup: lines of shell before Python starts: modules to load, the environment to activate, ``head=ADDRESS``
            where the nodes meet elsewhere. With any, ``python`` is the one they make available; without, it is the
            one that submits.
        extra: more settings of sbatch, as it has them on its command line.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time_limit: str | None = None
    gpus_per_node: int = 0
    cpus_per_worker: int = 1
    throttle: int | None = None
    requeue: bool = True
    signal_s: int = 120
    setup: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class ClusterConfig:
    """Where the workers are: local or nodes (processes), or simulated in one process.

    Attributes:
        nproc_per_node: workers on each machine.
        nnodes: machines.
        rdzv_endpoint: HOST:PORT at which several machines meet, HOST being one of them; slurm: the job's first node.
        world_size: number of simulated workers; of real ones it is nnodes * nproc_per_node.
        device: cpu with gloo, or cuda with NCCL; auto is replaced by cuda where each worker can have a GPU of its own.
        num_threads: of each worker; null: OMP_NUM_THREADS, or the cores are shared out.
        max_restarts: how often all workers are started again after one of them failed.
        timeout_s: seconds that a collective of real workers may wait for one of them; a run in which a worker stands
            still, or a machine is gone, ends within it.
    """

    name: str
    nproc_per_node: int = 1
    nnodes: int
    rdzv_endpoint: str = "localhost:0"
    world_size: int | None = None
    device: str = "auto"
    num_threads: int | None = None
    max_restarts: int = 0
    timeout_s: float = TIMEOUT_S
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    @property
    def simulated(self) -> bool:
        """Whether all workers live in one process."""
        return self.name == SIMULATED


@dataclass(kw_only=True)
class ScheduleConfig:
    """Which gradients travel together: a schedule of micro.planning.schedules with its settings, or auto.

    The files are what `experiments.profile` measured, for the schedules that plan from it.

    Attributes:
        trace: file of `profile backward`: when backward completes each gradient.
        link: file of `profile link`: what each collective takes over its size.
        select: file of `profile select`: what each method costs beside its collectives.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    trace: str | None = None
    link: str | None = None
    select: str | None = None


@dataclass(kw_only=True)
class OptimizerConfig:
    """How gradients become an update.

    Attributes:
        name: sgd, adam, adamw, whose weight decay leaves Adam's moments alone, or sign: every weight moves by the rate.
        momentum: of sgd.
        nesterov: none; pytorch: a step of g + momentum * m; published: of g + m, as the public code of MiCRO, DEFT,
            ExDyna and SAGE (and PowerSGD, from which they have it) steps, also where the momentum is 0 and the step
            so 2 g.
        betas: of adam and adamw.
        momentum_at: update: the momentum is that of the average; gradient: each worker's own, before its residual (the
            momentum correction of DGC, Lin et al., ICLR 2018, arXiv 1712.01887).
        lr_at: update: residuals hold gradients, and take the learning rate of the step in which they are sent (the
            public code of MiCRO); gradient: residuals hold lr * gradient.
        weight_decay: added to the average, after the exchange.
        decay_of: all parameters; weights: none of one dimension (norms, biases); published: all but norms that are
            named bn1, bn2 and so on inside a block, as the public code of the MiCRO family finds them.
        clip: the greatest norm of a gradient, null for none.
        clip_at: gradient: of each worker's, before its residual is added; update: of the average.
        clip_norm: rank: each worker's own norm, by which it scales alone; global: the root of the mean over workers of
            their squared norms, by which all scale alike. For clip_at=gradient.
    """

    name: str
    momentum: float = 0.0
    nesterov: str = "none"
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    momentum_at: str = "update"
    lr_at: str = "update"
    weight_decay: float = 0.0
    decay_of: str = "all"
    clip: float | None = None
    clip_at: str = "gradient"
    clip_norm: str = "rank"

    @property
    def scales_gradients(self) -> bool:
        """Whether gradients are multiplied by the learning rate before they are reduced."""
        return self.lr_at == "gradient"


@dataclass(kw_only=True)
class RoundsConfig:
    """Rounds of local steps; see micro.LocalSteps.

    Attributes:
        every: steps of each worker's own optimizer between two exchanges of weights; 0: gradients are exchanged at
            every step.
        lr: of the outer optimizer, which takes the mean difference of weights for a gradient.
        momentum: of the outer optimizer.
        nesterov: whether the outer momentum is Nesterov's, as in DiLoCo.
        buffers: of the model at the end of a round. mean: averaged; first: those of the first worker; own: each keeps
            its.
        momentum_with_feedback: allow outer momentum beside a residual, which both add up what was not applied at once.
        fragments: of the model, each exchanged at a step of its own: a number, or a list of patterns of names for each.
        delay: steps that an exchange goes on beside training.
        mix: share of the new global weights in a worker's after an exchange; the rest stays as it is.
        lost_workers: what becomes of the run when torchrun forms a new group with other ranks than before. stop: it
            ends; go_on: the ranks that are there go on from the last round that ended. Every round is then saved, in
            place of what checkpoint.every_s says; cluster.world_size says how many ranks there are at the most.
    """

    every: int = 0
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    buffers: str = "mean"
    momentum_with_feedback: bool = False
    fragments: Any = 1
    delay: int = 0
    mix: float = 1.0
    lost_workers: str = "stop"


@dataclass(kw_only=True)
class WarmupConfig:
    """A density that starts higher: over how many steps it falls, from where, and in how many stairs."""

    steps: int = 0
    start: float = 0.25
    stages: int = 0


@dataclass(kw_only=True)
class CheckpointConfig:
    """How often a run saves all that it needs to go on: every so many seconds or steps, 0 for never by this measure."""

    every_s: float = 300.0
    every_steps: int = 0
    keep: int = 2


@dataclass(kw_only=True)
class TrackingConfig:
    """Whether a run is mirrored at Weights & Biases, and where.

    Attributes:
        name: none or wandb.
        mode: offline: files in the run's folder, for ``wandb sync``; online: the server as well.
        project, entity, tags: of Weights & Biases; without an entity it is the user's own.
        finish_s: seconds that a finished run waits at most for its mirror.
    """

    name: str = "none"
    mode: str | None = None
    project: str | None = None
    entity: str | None = None
    tags: list[str] = field(default_factory=list)
    finish_s: float = 60.0


@dataclass(kw_only=True)
class TrainConfig:
    """One run. The values are in conf/; see conf/train.yaml for what each means."""

    model: ModelConfig
    dataset: DatasetConfig
    sparsifier: SparsifierConfig
    schedule: ScheduleConfig
    cluster: ClusterConfig
    optimizer: OptimizerConfig
    scale: str
    scope: str
    density: float
    density_warmup: WarmupConfig
    seed: int
    epochs: int
    batch_size: int
    lr: float
    lr_shape: str
    lr_warmup_epochs: float
    lr_warmup_start: float
    lr_milestones: list[float] = field(default_factory=list)
    lr_decay: float
    accumulate: int
    precision: str
    channels_last: bool
    compile: bool
    nonfinite: str
    timed: bool
    lr_end: float = 0.0
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    measure_residual_every: int = 0
    measure_test_every: int = 0
    peak_tflops: float | None = None
    checkpoint: CheckpointConfig
    start_from: str | None
    resize: str = "refuse"
    resume: str = "auto"
    save_weights: bool
    output: str
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    digests: dict[str, str] = field(default_factory=dict)  # of the files that settings name, filled in: digests.py

    @property
    def world_size(self) -> int:
        """Number of workers."""
        assert self.cluster.world_size is not None
        return self.cluster.world_size


def part_name(spec: Any) -> str | None:
    """Return the name of a part, which is a name or a mapping with a name."""
    return spec.get("name") if isinstance(spec, dict) else spec


def flat(node: Mapping[str, Any], prefix: str = "") -> Flat:
    """Return nested settings by dotted keys; an empty mapping is a value."""
    found: Flat = {}
    for key, value in node.items():
        inner = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def defaults_of_schema(kind: type = TrainConfig) -> dict[str, Any]:
    """Return the default of every setting of a dataclass and of its inner dataclasses, MISSING without one."""
    values = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(kind)))
    inner = {name: hint for name, hint in get_type_hints(kind).items() if is_dataclass(hint)}
    return values | {name: defaults_of_schema(cast(type, hint)) for name, hint in inner.items()}


def to_yaml(config: TrainConfig) -> str:
    """Return the configuration as yaml, complete."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(source: Path | IO[str]) -> TrainConfig:
    """Return the configuration that ``to_yaml`` wrote."""
    loaded = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(source)))
    assert isinstance(loaded, TrainConfig)
    return loaded
