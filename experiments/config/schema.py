"""The settings of a run as dataclasses: names and types. The values are in conf/."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from omegaconf import OmegaConf

from experiments.config.optimizer_settings import OptimizerConfig
from experiments.config.rounds_settings import RoundsConfig
from experiments.config.slurm_settings import SlurmConfig
from experiments.config.tracking_settings import TrackingConfig

TIMEOUT_S = 300.0  # of cluster.timeout_s
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
        return self.name == "simulated"


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
    lr_milestones: list[float]
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
    resize: str
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


def to_yaml(config: TrainConfig) -> str:
    """Return the configuration as yaml, complete."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def from_yaml(source: Path | IO[str]) -> TrainConfig:
    """Return the configuration that ``to_yaml`` wrote."""
    loaded = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(source)))
    assert isinstance(loaded, TrainConfig)
    return loaded
