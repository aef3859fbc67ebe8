"""Length of the training, and size of a step."""

import math
from typing import Annotated

from pydantic import Field

from maxlm.config.capability import Capability, Problems, Sizes, divisors_text, keeps
from maxlm.config.fields import Count, NonNegative, Positive, Section, Seed, Tokens
from maxlm.config.sections.batch_ramp import BatchStageConfig
from maxlm.config.sections.branch_from import BranchFromConfig
from maxlm.config.sections.data import HeldOutConfig
from maxlm.config.sections.diloco import DilocoConfig, shards_of
from maxlm.config.sections.noise_scale import NoiseScaleConfig
from maxlm.config.sections.start_from import StartFromConfig


class TrainConfig(Section):
    """Length of the training and size of a step."""

    steps: Positive | None = None
    """Length of the run; exactly one of `steps` and `tokens` is set. Unit: updates."""
    tokens: Tokens | None = None
    """Length of the run in place of `steps`, rounded up to whole updates; padding counts. Unit: tokens."""
    global_batch: Positive
    """Sequences in the batch of one update, over all devices. Unit: sequences."""
    microbatches: Positive = 1
    """Parts of the global batch that are computed one after another, with their gradients added up (gradient accumulation), or that pass
    through the stages of a pipeline. Unit: microbatches.
    """
    seed: Seed = 0
    """Seed of the initial weights and of the data order. Unit: seed."""
    z_loss: NonNegative = 0.0
    """Weight of mean(logsumexp(logits)^2), which keeps logits small (PaLM, arXiv 2204.02311). Unit: weight of a loss."""
    loss_chunks: Positive = 8
    """Parts into which the sequence is cut for the loss, so that the logits of only one part exist at a time; must divide data.seq_len.
    Unit: parts.
    """
    start_from: StartFromConfig | None = None
    """Run or imported model from which the parameters are taken at the beginning; null: parameters are drawn at random. It has no effect
    once the run has a checkpoint of its own.
    """
    branch_from: BranchFromConfig | None = None
    """Checkpoint of another run that this run continues with its optimizer state, schedule and place in the data; null: none."""
    batch_ramp: Annotated[tuple[BatchStageConfig, ...], Field(min_length=1, max_length=8)] | None = None
    """Smaller batches at the beginning of the run, the smallest first. The schedule of the learning rate then goes by tokens, and each size
    has its own compiled program; null: one size throughout.
    """
    noise_scale: NoiseScaleConfig | None = None
    """Measure the gradient noise scale in training (arXiv 1812.06162); null: it is not measured."""
    eval_every: Positive | None = None
    """Updates between two evaluations on held-out documents; null: one evaluation at the end. Unit: updates."""
    eval_batches: Count = 8
    """Batches of each held-out set that an evaluation reads; 0: no evaluation. Unit: batches."""


def _problems(train: TrainConfig, data_seq_len: int, data_eval: HeldOutConfig | None) -> Problems:
    if train.steps is None and train.tokens is None:
        yield "train.steps", None, "exactly one of train.steps and train.tokens must be set", "set one of them"
    if train.steps is not None and train.tokens is not None:
        rule = f"train.tokens = {train.tokens} is set, too, and exactly one of them must be"
        yield "train.steps", train.steps, rule, "write train.tokens=null to keep the steps, or train.steps=null to keep the tokens"
    if train.global_batch % train.microbatches:
        rule = f"is not a multiple of train.microbatches = {train.microbatches}"
        yield "train.global_batch", train.global_batch, rule, "change one of them"
    if data_seq_len % train.loss_chunks:
        yield "train.loss_chunks", train.loss_chunks, f"does not divide data.seq_len = {data_seq_len}", f"use {divisors_text(data_seq_len)}"
    if train.eval_every is not None and train.eval_batches == 0:
        yield "train.eval_every", train.eval_every, "train.eval_batches = 0 turns evaluation off", "remove it, or raise eval_batches"
    if data_eval is not None and train.eval_batches == 0:
        yield "data.eval", data_eval.stores, "train.eval_batches = 0 turns evaluation off", "remove it, or raise eval_batches"


def _batch(train: TrainConfig, sizes: Sizes, diloco: DilocoConfig | None) -> Problems:
    """Rows of a microbatch, which workers that train apart share first."""
    shards, by = shards_of(diloco, sizes), "mesh data" if diloco is None else "diloco.workers"
    if train.global_batch // train.microbatches % shards:
        good = math.ceil(train.global_batch // train.microbatches / shards) * shards * train.microbatches
        parts = f"each of its {train.microbatches} microbatches" if train.microbatches > 1 else "it"
        rule = f"{parts} must split over the {shards} shards of {by} x fsdp x expert"
        yield "train.global_batch", train.global_batch, rule, f"use {good}, or fewer shards"


CAPABILITY = Capability(key="train", rules=(_problems,), mesh_rules=(_batch,), identity=keeps("train.seed", "train.global_batch"))
