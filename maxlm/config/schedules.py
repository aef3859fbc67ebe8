"""Optional sections of `train` about when a run begins, how large its batches are, and what is measured of its gradients."""

from maxlm.config.fields import LocalPath, Positive, Section, Tokens


class BranchFromConfig(Section):
    """Another run's checkpoint that this run continues as if it were its own: weights, optimizer, schedule, place in the data order.

    The other run is read only, and may go on meanwhile. No effect once this run has a checkpoint of its own.
    """

    path: LocalPath  # the folder of the other run
    step: Positive  # of its checkpoint


class BatchStageConfig(Section):
    """Smaller batches, until some token of the run."""

    global_batch: Positive  # sequences an update
    until_tokens: Tokens  # of the whole run, rounded up to whole updates


class NoiseScaleConfig(Section):
    """Measure the gradient noise scale (arXiv 1812.06162). It costs the norm of each microbatch's gradient."""

    updates: Positive = 100  # that it is averaged over, about
