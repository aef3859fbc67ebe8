"""Learning rate as a function of the step."""

import optax

from maxlm.config.schema import Config


def learning_rate(config: Config) -> optax.Schedule:
    """Linear warm-up to `peak_lr`, then the schedule's shape down to `end_lr_fraction` of it at the last step.

    Step s (from 0) of the warm-up uses (s + 1) / warm-up of the peak, so no update is spent on a rate of 0.
    wsd: warm-up, stable, linear decay (MiniCPM, arXiv 2404.06395).
    """
    optimizer = config.optimizer
    peak, end = optimizer.peak_lr, optimizer.peak_lr * optimizer.end_lr_fraction
    total = config.total_steps
    warmup = config.steps_of(optimizer.warmup_steps, optimizer.warmup_tokens, 0)
    after = max(total - warmup, 1)
    if optimizer.schedule == "cosine":
        body = optax.cosine_decay_schedule(peak, after, alpha=optimizer.end_lr_fraction)
    elif optimizer.schedule == "wsd":
        decay = config.steps_of(optimizer.decay_steps, optimizer.decay_tokens, max(total // 10, 1))
        stable = max(after - decay, 0)
        body = optax.join_schedules([optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay)], [stable])
    else:
        body = optax.constant_schedule(peak)
    if not warmup:
        return body
    ramp = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)) if warmup > 1 else optax.constant_schedule(peak)
    return optax.join_schedules([ramp, body], [warmup])
