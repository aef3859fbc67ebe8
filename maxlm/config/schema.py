"""A whole experiment: its sections, and the figures that follow from several of them. No jax here, so a config error is instant.

Sizes are counted in the unit their name says: `*_steps` in optimizer updates, `*_tokens` in tokens, `global_batch` in sequences. `None`
means "not used" unless the description says otherwise. An optional capability is a section that is absent when it is off. Each section is
in a file of `sections/`, with its rules; declared here are those that other code reads by name, and `maxlm.config.table` adds the others.
"""

from collections.abc import Mapping

from maxlm.config.batch_sizes import BatchSizes, microbatches
from maxlm.config.choices import part
from maxlm.config.fields import ModuleNames, Section
from maxlm.config.part import ObjectiveFacts
from maxlm.config.sections.checkpoint import CheckpointConfig
from maxlm.config.sections.cluster import ClusterConfig
from maxlm.config.sections.compression import CompressionConfig
from maxlm.config.sections.cost import CostConfig
from maxlm.config.sections.data import DataConfig
from maxlm.config.sections.diloco import DilocoConfig
from maxlm.config.sections.elastic import ElasticConfig
from maxlm.config.sections.ema import EmaConfig
from maxlm.config.sections.evaluation import EvaluationConfig
from maxlm.config.sections.health import HealthConfig
from maxlm.config.sections.integrity import IntegrityConfig
from maxlm.config.sections.memory import MemoryConfig
from maxlm.config.sections.memory_checkpoints import MemoryCheckpointsConfig
from maxlm.config.sections.mesh import MeshConfig
from maxlm.config.sections.metrics import MetricsConfig
from maxlm.config.sections.model import ModelConfig
from maxlm.config.sections.objective import ObjectiveConfig
from maxlm.config.sections.optimizer import OptimizerConfig
from maxlm.config.sections.pipeline import PipelineConfig
from maxlm.config.sections.precision import PrecisionConfig
from maxlm.config.sections.prometheus import PrometheusConfig
from maxlm.config.sections.run import RunConfig
from maxlm.config.sections.samples import SamplesConfig
from maxlm.config.sections.trackio import TrackioConfig
from maxlm.config.sections.train import TrainConfig
from maxlm.config.sections.wandb import WandbConfig
from maxlm.config.sections.watchdog import WatchdogConfig


class Config(Section):
    """A whole experiment."""

    model: ModelConfig
    """The decoder-only transformer that is trained: its sizes and the parts of its layers."""
    data: DataConfig
    """Token stores to train on, and how they become batches."""
    train: TrainConfig
    """Length of the training, size of an update, and what a run begins from."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Update rule, and its learning rate over time."""
    mesh: MeshConfig = MeshConfig()
    """Sizes of the named axes of the device mesh, by which state and batch are split."""
    memory: MemoryConfig = MemoryConfig()
    """Activations saved for the backward pass, and state that is kept off the device."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats of the computation; master weights, optimizer state, norms, softmax and loss are always float32."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Schedule of checkpoints, and how many of them stay."""
    run: RunConfig = RunConfig()
    """Name and folder of the run, and its output."""
    objective: ObjectiveConfig | None = None
    """Training loss, told by its `kind`: next-token prediction, supervised fine-tuning or direct preference optimization; null: next-token
    prediction.
    """
    metrics: MetricsConfig = MetricsConfig()
    """Metrics of a batch, in addition to the metrics of the objective."""
    cluster: ClusterConfig | None = None
    """Machine that the run is for: planning compiles for it, and training checks that it has it; null: the devices that are found."""
    pipeline: PipelineConfig | None = None
    """Schedule of the pipeline over mesh.stage; null: 1f1b with one chunk."""
    ema: EmaConfig | None = None
    """Exponential moving average of the parameters, which is evaluated and exported in addition to them; null: none."""
    diloco: DilocoConfig | None = None
    """Local updates of workers that synchronize now and then (DiLoCo, arXiv 2311.08105), for slices or regions that cannot afford a
    reduction in every update; null: none.
    """
    compression: CompressionConfig | None = None
    """Compression of gradients between slices, or of changes between the workers of diloco, by the method named in its `kind`; null: none.
    """
    integrity: IntegrityConfig | None = None
    """Checks for silent corruption by a device; null: none."""
    samples: SamplesConfig | None = None
    """Texts that the model writes at the end of the run; null: none."""
    watchdog: WatchdogConfig | None = None
    """Limits after which a run without progress counts as hung; null: with their defaults."""
    wandb: WandbConfig | None = None
    """Figures to Weights & Biases; null: none are sent."""
    trackio: TrackioConfig | None = None
    """Figures to trackio; null: none are sent."""
    prometheus: PrometheusConfig | None = None
    """Figures, events and the ledger of the run for Prometheus; null: none are served."""
    evaluation: EvaluationConfig | None = None
    """Tasks that are run on the training mesh; null: none."""
    health: HealthConfig | None = None
    """Answers to trouble in training; null: alarms, and exit code 4 where a run is beyond repair."""
    cost: CostConfig | None = None
    """Price and power of the chips of this run, where list prices are not what is paid; null: list prices and published power."""
    memory_checkpoints: MemoryCheckpointsConfig | None = None
    """Copies of the state in the memory of the hosts, at short intervals, in addition to `checkpoint`; null: none."""
    elastic: ElasticConfig | None = None
    """Going on with fewer hosts until lost ones return; null: all hosts wait for a lost one."""
    extensions: ModuleNames | None = None
    """Modules of other packages that the config needs, as in [my_package.my_module]; null: none (docs/how-to/extensions.md)."""

    @property
    def objective_facts(self) -> ObjectiveFacts:
        """Properties of the objective."""
        found: ObjectiveFacts = part("objective", "next_token" if self.objective is None else self.objective.kind).facts
        return found

    @property
    def batch_sizes(self) -> BatchSizes:
        """Sequences of every batch."""
        ramp = [(stage.global_batch, self._sequences(stage.until_tokens)) for stage in self.train.batch_ramp or ()]
        return BatchSizes(self.train.global_batch, ramp)

    def microbatches_of(self, size: int, mesh: Mapping[str, int]) -> int | None:
        """Number of microbatches of a batch of `size` sequences on a mesh of these sizes; None if it has no place there."""
        train, chunked = self.train, self.pipeline is not None and self.pipeline.chunks > 1
        least = 1 if train.noise_scale is None else 2  # which compares them
        full = {"full": train.global_batch, "parts": train.microbatches, "least": least}
        split = {"shards": mesh["data"] * mesh["fsdp"] * mesh["expert"], "stages": mesh["stage"]}
        return microbatches(size, **full, **split, chunked=chunked, fixed=self.model.balances_microbatches)

    def with_batches_of(self, size: int, mesh: Mapping[str, int]) -> "Config | None":
        """These settings for the updates with batches of `size` sequences; None if all batches are alike."""
        if not self.batch_sizes.vary:
            return None
        parts = self.microbatches_of(size, mesh)
        assert parts is not None, "the rules of train.batch_ramp check every size"
        train = self.train.model_copy(update={"global_batch": size, "microbatches": parts, "batch_ramp": None})
        return self.model_copy(update={"train": train})

    @property
    def tokens_per_step(self) -> int:
        """Tokens an update consumes, padding included; with `train.batch_ramp` one of its last, the largest."""
        return self.train.global_batch * self.data.seq_len

    @property
    def has_length(self) -> bool:
        """True if the run has a length; a rule refuses it otherwise."""
        return self.train.steps is not None or self.train.tokens is not None

    @property
    def total_steps(self) -> int:
        """Updates in the whole run; `train.tokens` is rounded up to whole steps."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.tokens is not None, "a rule demands one of the two"
        return self.batch_sizes.holding(self._sequences(self.train.tokens))

    @property
    def total_tokens(self) -> int:
        """Tokens that the whole run consumes, padding included."""
        return self.batch_sizes.before(self.total_steps) * self.data.seq_len

    def steps_of(self, steps: int | None, tokens: int | None, default: int) -> int:
        """A duration from the beginning of the run, given as steps or as tokens, in whole steps."""
        if steps is not None:
            return steps
        return default if tokens is None else self.batch_sizes.holding(self._sequences(tokens))

    @property
    def warmup_steps(self) -> int:
        """Updates in which the learning rate rises."""
        return self.steps_of(self.optimizer.warmup_steps, self.optimizer.warmup_tokens, 0)

    @property
    def decay_steps(self) -> int:
        """Updates of the decay at the end of a schedule that has one, such as `wsd`; 0 with another."""
        optimizer, total, sizes = self.optimizer, self.total_steps, self.batch_sizes
        if not optimizer.decays_at_end:
            return 0
        if optimizer.decay_tokens is None:
            return optimizer.decay_steps or max(total // 10, 1)
        before = sizes.before(total) - self._sequences(optimizer.decay_tokens)
        if before < 0:  # longer than the run, which a rule refuses
            return total - before // sizes.of(0)
        begins = sizes.holding(before)
        return total - begins + (sizes.before(begins) > before)

    def _sequences(self, tokens: int) -> int:
        """Sequences that hold so many tokens, rounded up."""
        return -(-tokens // self.data.seq_len)
