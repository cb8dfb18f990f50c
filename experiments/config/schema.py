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
        digest: of a user's own files, of OWN_DATA; filled in where they are. Given, they must have it.
        augment: of images: how the training images are varied.
        sequence_length: of text: words of a sample, after which gradients are cut off.
        drawn: of text, for models that carry nothing along: rows begin anywhere, not where the last batch ended, and an
            epoch has so many batches. 0: it reads the text on.
        negatives: of interactions: items not taken that are drawn beside each one that was.
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
        """Whether every element is in the update: the density is then 1, whatever is configured."""
        return part_name(self.reducer) in ("dense", "powersgd", "quantized") or part_name(self.selector) == "everything"


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
        nnodes: machines.
        rdzv_endpoint: HOST:PORT at which several machines meet, HOST being one of them; slurm: the job's first node.
        world_size: number of simulated workers; of real ones it is nnodes * nproc_per_node.
        device: cpu with gloo, or cuda with NCCL; auto is replaced by cuda where each worker can have a GPU of its own.
        num_threads: of each worker; null: OMP_NUM_THREADS, or the cores are shared out.
        max_restarts: how often all workers are started again after one of them failed.
        timeout_s: seconds that a collective of real workers may wait for one of them; a run in which a worker stands
            still, or a machine is gone, ends within it.
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
    """Which gradients travel together: a schedule of experiments.planning.schedules with its settings, or auto.

    The files are what `experiments.profile` measured, for the schedules that plan from it.

    Attributes:
        trace: file of `profile backward`: when backward completes each gradient.
        link: file of `profile link`: what each collective takes over its size.
        select: file of `profile select`: what each method costs beside its collectives.
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
        name: sgd, adam, adamw, whose weight decay leaves Adam's moments alone, sparse_adamw, which makes up for the
            steps that an element waited, muon, for hidden matrices, with adamw for all else, or sign: every weight
            moves by the rate.
        momentum: of sgd.
        nesterov: none; pytorch: a step of g + momentum * m; published: of g + m, as the public code of MiCRO, DEFT,
            ExDyna and DEFT (and PowerSGD, from which they have it) steps, also where the momentum is 0 and the step
            so 2 g.
        betas: of adam, adamw and sparse_adamw, also beside muon.
        max_steps: of sparse_adamw and sign: the most steps that an element takes at once for those that it waited.
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
    """A density that starts higher: over how many steps it falls, from where, and in how many stairs."""

    steps: int = limited(COUNT_OR_NONE, 0)
    start: float = limited(SHARE, 0.25)
    stages: int = limited(COUNT_OR_NONE, 0)


@dataclass(kw_only=True)
class CheckpointConfig:
    """How often a run saves all that it needs to go on: every so many seconds or steps, 0 for never by this measure.

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
        project, entity, tags: of Weights & Biases; without an entity it is the user's own.
        finish_s: seconds that a finished run waits at most for its mirror.
    """

    name: str = limited(OneOf(("none", "wandb")), "none")
    mode: str | None = limited(OneOf(MIRRORS), None)
    project: str | None = limited(_WANDB_NAME, None)
    entity: str | None = limited(_WANDB_NAME, None)
    tags: list[str] = field(default_factory=list, metadata=_each(Text("words of 1 to 64 characters", r"(?s:.{1,64})")))
    finish_s: float = limited(NOT_NEGATIVE, 60.0)


@dataclass(kw_only=True)
class TrainConfig:
    """One run. The values are in conf/; see conf/train.yaml for what each means."""

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
