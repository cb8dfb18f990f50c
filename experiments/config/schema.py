"""The settings of a run as dataclasses: names, types and ranges. The values are in conf/."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from experiments.config.ranges import (
    COUNT,
    COUNT_OR_NONE,
    DECAY,
    LARGEST_SEED,
    NAME,
    NOT_NEGATIVE,
    ON_A_MACHINE,
    PART,
    PATH,
    POSITIVE,
    SHARE,
    Allowed,
    OneOf,
    Range,
    Text,
)

TIMEOUT_S = 300.0  # default of cluster.timeout_s
LAUNCH = "MICRO_LAUNCH"  # "node" in a job script: each srun task starts the ranks of its node
IN_JOB = "slurm"  # a value of cluster.rdzv_endpoint: the nodes meet at the first node of the job
SIMULATED = "simulated"  # the cluster for workers in one process
GROUPS = ("model", "dataset", "sparsifier", "schedule", "cluster", "optimizer", "tracking", "experiment")  # in conf/
MIRRORS = ("offline", "online")  # the values of tracking.mode
NORMS = ("rank", "global")  # the values of optimizer.clip_norm, as in micro
OWN_DATA = ("imagenet", "text")  # data sets from a user's own files
# Only one of sbatch's formats. sbatch would read 10:00 as minutes; YAML reads 1:00:00 without quotes as 3600.
TIME = Text("'hours:minutes:seconds' or 'days-hours:minutes:seconds', in quotes", r"(?:(\d+)-)?(\d+):(\d{2}):(\d{2})")
_PLACE = OneOf(("update", "gradient"))
_SITE_NAME = Text("a name in one line, or null for the site's own", r"[^\n]*\S[^\n]*")
_WANDB_NAME = Text(r"a name of at most 128 characters without any of /\#?%:", r"(?=.*\S)[^/\\#?%:\x00-\x1f\x7f]{1,128}")


def limited(allowed: Allowed, default: Any = dataclasses.MISSING) -> Any:
    """Return a field that must be null or ``allowed``."""
    return field(default=default, metadata=_each(allowed))


def _each(allowed: Allowed) -> dict[str, Any]:
    """Return the metadata of a list field whose elements must be ``allowed``."""
    return {"allowed": allowed}


@dataclass(kw_only=True)
class ModelConfig:
    """A network of models/ and its settings.

    Attributes:
        num_classes: outputs of the network; null: as many as the data set has classes.
    """

    name: str = limited(NAME)
    num_classes: int | None = limited(COUNT, None)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class DatasetConfig:
    """A data set of data/, where its files are, and how batches are made of it.

    Attributes:
        root: the folder that holds the data set's own folder, which data.prepare makes.
        digest: checksum of a user's own files, filled in from the files; if it is given, the files must match.
        augment: for images: how the training images are varied.
        sequence_length: for text: words of a sample; gradients flow no further.
        drawn: for text and models without a carried state: batches of an epoch, whose rows begin anywhere in the text.
            0: each batch begins where the last one ended.
        negatives: for interactions: items not taken, drawn for each item that was taken.
    """

    name: str = limited(NAME)
    root: str | None = limited(PATH, None)
    digest: str | None = None
    augment: str = "none"
    sequence_length: int | None = limited(COUNT, None)
    drawn: int = limited(COUNT_OR_NONE, 0)
    negatives: int | None = limited(COUNT, None)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class SparsifierConfig:
    """A composition of selector, exchange, codec, index codec and feedback, or another reducer.

    Each part is a name, or a mapping of ``name`` and settings.

    Attributes:
        reducer: sparse: the composition of the parts below; dense, fft, dct and powersgd use none of them. split: some
            parameters densely: {name: split, min_dims: 2} biases and norms, {name: split, dense: ["embed*"],
            start_step: 100} embeddings, and everything in the first 100 steps. two_level: the composition between
            nodes, the dense mean within them: {name: two_level, ranks_per_node: 4}. They nest in any order:
            {name: split, min_dims: 2, reducer: {name: two_level, ranks_per_node: 4}}.
        selector: which indices are sent; null: none are selected.
        exchange: how the indices and values of all workers are combined.
        codec: format of values.
        indices: format of indices.
        feedback: what a worker keeps of the values that it did not send.
        policy: density by parameter and step; null: density and density_warmup for all parameters.
    """

    name: str = limited(NAME)
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
        """Whether every element is in the update; then the density is 1, not the configured one."""
        return part_name(self.reducer) in ("dense", "powersgd", "quantized") or part_name(self.selector) == "everything"


@dataclass(kw_only=True)
class SlurmConfig:
    """How a study is queued by SLURM; it does not change what a run computes.

    Attributes:
        partition, account, qos, constraint: as in sbatch; null: the site's default.
        time_limit: limit of one run, [DAYS-]HOURS:MINUTES:SECONDS; null: the partition's default.
        gpus_per_node: requested GPUs per node; 0: none.
        cpus_per_worker: requested cores per worker.
        throttle: most runs of the study at once; null: all.
        requeue: whether a run that the time limit stops is queued again and resumes.
        signal_s: seconds before the time limit at which a run saves and stops; 0: never.
        setup: lines of shell before Python starts: load modules, activate an environment, ``head=ADDRESS`` for another
            meeting point of the nodes. With such lines, ``python`` is found on the path that they set; otherwise it is
            the one that submits.
        extra: other options of sbatch.
    """

    partition: str | None = limited(_SITE_NAME, None)
    account: str | None = limited(_SITE_NAME, None)
    qos: str | None = limited(_SITE_NAME, None)
    constraint: str | None = limited(_SITE_NAME, None)
    time_limit: str | None = limited(TIME, None)
    gpus_per_node: int = limited(COUNT_OR_NONE, 0)
    cpus_per_worker: int = limited(COUNT, 1)
    throttle: int | None = limited(COUNT, None)
    requeue: bool = True
    signal_s: int = limited(Range(0, 65_535), 120)  # sbatch's largest value
    setup: list[str] = field(default_factory=list, metadata=_each(Text("lines of shell", r"(?s:.*)")))
    extra: list[str] = field(
        default_factory=list, metadata=_each(Text("settings of sbatch such as --exclusive", r"-[^\n]*"))
    )


@dataclass(kw_only=True)
class ClusterConfig:
    """Where the workers are: local or nodes (processes), or simulated in one process.

    Attributes:
        nproc_per_node: workers on each machine.
        nnodes: number of machines.
        rdzv_endpoint: HOST:PORT of one machine, where all machines meet; slurm: the job's first node.
        world_size: number of simulated workers; real workers are nnodes * nproc_per_node.
        device: cpu (gloo) or cuda (NCCL); auto: cuda if each worker can have its own GPU.
        num_threads: threads of each worker; null: OMP_NUM_THREADS, or the cores divided by the workers.
        max_restarts: how often all workers are restarted after one failed.
        timeout_s: seconds that a collective of real workers may wait; a run with a hanging worker or a lost machine
            ends within this time.
    """

    name: str = limited(NAME)
    nproc_per_node: int = limited(ON_A_MACHINE, 1)
    nnodes: int = limited(COUNT)
    rdzv_endpoint: str = "localhost:0"
    world_size: int | None = limited(COUNT, None)
    device: str = limited(OneOf(("auto", "cpu", "cuda")), "auto")
    num_threads: int | None = limited(ON_A_MACHINE, None)
    max_restarts: int = limited(COUNT_OR_NONE, 0)
    timeout_s: float = limited(Range(5, 604_800), TIMEOUT_S)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    @property
    def simulated(self) -> bool:
        """Whether all workers live in one process."""
        return self.name == SIMULATED


@dataclass(kw_only=True)
class ScheduleConfig:
    """Which gradients are sent together: a schedule of experiments.planning.schedules with its settings, or auto.

    Planned schedules need files that `experiments.profile` measures.

    Attributes:
        trace: file of `profile backward`: when backward completes each gradient.
        link: file of `profile link`: the time of each collective over its size.
        select: file of `profile select`: the computing time of each method.
    """

    name: str = limited(NAME)
    settings: dict[str, Any] = field(default_factory=dict)
    trace: str | None = limited(PATH, None)
    link: str | None = limited(PATH, None)
    select: str | None = limited(PATH, None)


@dataclass(kw_only=True)
class OptimizerConfig:
    """How gradients become an update.

    Attributes:
        name: sgd; adam; adamw (weight decay apart from Adam's moments); sparse_adamw (larger steps for elements that
            waited); muon (hidden matrices; adamw for other parameters); sign (every weight moves by the rate).
        momentum: momentum of sgd.
        nesterov: none; pytorch: the step is g + momentum * m; published: g + m, as in the public code of MiCRO, DEFT,
            ExDyna and PowerSGD; with momentum 0 that is 2 g.
        betas: for adam, adamw and sparse_adamw, and for muon's adamw.
        max_steps: for sparse_adamw and sign: most steps that an element takes at once after it waited.
        momentum_at: update: one momentum of the average; gradient: one per worker, before its residual (the momentum
            correction of DGC, Lin et al., ICLR 2018, arXiv 1712.01887).
        lr_at: update: residuals hold gradients, multiplied by lr when they are sent (the public code of MiCRO);
            gradient: residuals hold lr * gradient.
        weight_decay: added to the average, after the exchange.
        decay_of: all parameters; weights: not those of one dimension (norms, biases); published: all but norms that are
            named bn1, bn2 and so on inside a block, as in the public code of the MiCRO family.
        clip: largest norm of a gradient; null: no limit.
        clip_at: gradient: each worker's gradient, before its residual is added; update: the average.
        clip_norm: for clip_at=gradient. rank: each worker clips by its own norm; global: all clip by the root of the
            mean over workers of the squared norms.
    """

    name: str = limited(OneOf(("sgd", "adam", "adamw", "sparse_adamw", "muon", "sign")))
    momentum: float = limited(DECAY, 0.0)
    nesterov: str = limited(OneOf(("none", "pytorch", "published")), "none")
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999], metadata=_each(DECAY))
    max_steps: int = limited(COUNT, 1)
    momentum_at: str = limited(_PLACE, "update")
    lr_at: str = limited(_PLACE, "update")
    weight_decay: float = limited(NOT_NEGATIVE, 0.0)
    decay_of: str = limited(OneOf(("all", "weights", "published")), "all")
    clip: float | None = limited(POSITIVE, None)
    clip_at: str = limited(_PLACE, "gradient")
    clip_norm: str = limited(OneOf(NORMS), "rank")

    @property
    def scales_gradients(self) -> bool:
        """Whether gradients are multiplied by the learning rate before they are reduced."""
        return self.lr_at == "gradient"


@dataclass(kw_only=True)
class RoundsConfig:
    """Rounds of local steps; see micro.LocalSteps.

    Attributes:
        every: local steps between two exchanges of weights; 0: gradients are exchanged at every step.
        lr: learning rate of the outer optimizer, whose gradient is the mean difference of weights.
        momentum: momentum of the outer optimizer.
        nesterov: whether the outer momentum is Nesterov's, as in DiLoCo.
        buffers: the model's buffers after a round: mean: averaged; first: the first worker's; own: unchanged.
        momentum_with_feedback: allow outer momentum together with a residual; both count unsent changes.
        fragments: parts of the model that are exchanged at different steps: a number, or a list of name patterns.
        delay: steps of training during an exchange.
        mix: share of the global weights in a worker's weights after an exchange.
        lost_workers: when torchrun forms a new group with other ranks: stop: the run ends; go_on: these ranks continue
            from the last finished round. Every round is then saved, not every checkpoint.every_s, and
            cluster.world_size is the largest number of ranks.
    """

    every: int = limited(COUNT_OR_NONE, 0)
    lr: float = limited(POSITIVE, 1.0)
    momentum: float = limited(DECAY, 0.0)
    nesterov: bool = False
    buffers: str = limited(OneOf(("mean", "first", "own")), "mean")
    momentum_with_feedback: bool = False
    fragments: Any = 1
    delay: int = limited(COUNT_OR_NONE, 0)
    mix: float = limited(SHARE, 1.0)
    lost_workers: str = limited(OneOf(("stop", "go_on")), "stop")


@dataclass(kw_only=True)
class WarmupConfig:
    """A density that starts higher: in how many steps it falls, from which value, in how many stairs."""

    steps: int = limited(COUNT_OR_NONE, 0)
    start: float = limited(SHARE, 0.25)
    stages: int = limited(COUNT_OR_NONE, 0)


@dataclass(kw_only=True)
class CheckpointConfig:
    """How often a checkpoint is saved: every so many seconds or steps; 0: never.

    Attributes:
        at_end: save the end of the run too, and keep it, so that resume=extend can go on from there.
    """

    every_s: float = limited(NOT_NEGATIVE, 300.0)
    every_steps: int = limited(COUNT_OR_NONE, 0)
    keep: int = limited(COUNT, 2)
    at_end: bool = False


@dataclass(kw_only=True)
class TrackingConfig:
    """Whether a run is mirrored at Weights & Biases, and where.

    Attributes:
        name: none or wandb.
        mode: offline: files in the run's folder, for ``wandb sync``; online: the server as well.
        project, entity, tags: as in Weights & Biases; without an entity, the user's default.
        finish_s: longest wait of a finished run for its mirror, in seconds.
    """

    name: str = limited(OneOf(("none", "wandb")), "none")
    mode: str | None = limited(OneOf(MIRRORS), None)
    project: str | None = limited(_WANDB_NAME, None)
    entity: str | None = limited(_WANDB_NAME, None)
    tags: list[str] = field(default_factory=list, metadata=_each(Text("words of 1 to 64 characters", r"(?s:.{1,64})")))
    finish_s: float = limited(NOT_NEGATIVE, 60.0)


@dataclass(kw_only=True)
class TrainConfig:
    """One run. conf/train.yaml has the values and explains each."""

    model: ModelConfig
    dataset: DatasetConfig
    sparsifier: SparsifierConfig
    schedule: ScheduleConfig
    cluster: ClusterConfig
    optimizer: OptimizerConfig
    scope: str
    density: float = limited(SHARE)
    density_warmup: WarmupConfig
    seed: int = limited(Range(0, LARGEST_SEED))
    epochs: int = limited(COUNT)
    batch_size: int = limited(COUNT)
    lr: float = limited(POSITIVE)
    lr_shape: str = limited(OneOf(("steps", "linear", "cosine")))
    lr_warmup_epochs: float = limited(NOT_NEGATIVE)
    lr_warmup_start: float = limited(NOT_NEGATIVE)
    lr_milestones: list[float] = field(default_factory=list)
    lr_decay: float = limited(POSITIVE, 0.1)
    accumulate: int = limited(COUNT)
    precision: str = limited(OneOf(("float32", "bfloat16")))
    channels_last: bool
    compile: bool
    nonfinite: str
    timed: bool
    lr_end: float = limited(PART, 0.0)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    measure_residual_every: int = limited(COUNT_OR_NONE, 0)
    measure_test_every: int = limited(COUNT_OR_NONE, 0)
    peak_tflops: float | None = limited(POSITIVE, None)
    checkpoint: CheckpointConfig
    start_from: str | None = limited(PATH)
    resize: str = limited(OneOf(("refuse", "average")), "refuse")
    resume: str = limited(OneOf(("auto", "scratch", "extend")), "auto")
    save_weights: bool
    output: str = limited(PATH)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    digests: dict[str, str] = field(default_factory=dict)  # of named files; identity.py fills it in

    @property
    def world_size(self) -> int:
        """Number of workers."""
        assert self.cluster.world_size is not None
        return self.cluster.world_size


def part_name(spec: Any) -> str | None:
    """Return the name of a part, which is a name or a mapping with a name."""
    return spec.get("name") if isinstance(spec, dict) else spec
