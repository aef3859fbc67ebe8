"""Rematerialisation: which activations the backward pass keeps, by a named policy or by the names of tensors."""

from collections.abc import Callable

import jax

from maxlm.config.schema import MemoryConfig


def rematerialise(function: Callable, memory: MemoryConfig) -> Callable:
    """Wrap `function` so that its activations are kept, offloaded to the host or recomputed as `memory` says."""
    if memory.remat == "none":
        return function
    names = [] if isinstance(memory.remat, str) else list(memory.remat)
    policies = jax.checkpoint_policies
    if memory.remat == "dots":
        policy = policies.dots_with_no_batch_dims_saveable
    elif memory.offload:
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=names,
            names_which_can_be_offloaded=list(memory.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = policies.save_only_these_names(*names)
    # Inside a scan the compiler cannot merge the recomputation with the forward pass, so no barrier is needed against it.
    return jax.checkpoint(function, policy=policy, prevent_cse=False)
