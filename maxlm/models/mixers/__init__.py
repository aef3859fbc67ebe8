"""Sequence mixers: parts of a layer that move information along the sequence. `maxlm/config/parts/layers.py` lists them.

A mixer is an `nnx.Module`, made by `Mixer(config, name)` with its name in the layer pattern. Called with (hidden states, `BlockContext`,
cache or None), it returns (its output, the cache with this call added). It declares its parameters with logical axes, which shard them, and
has, for everything that is not the forward pass:

- `rotary(config, name)`: rotary embedding and dims that it reads from `BlockContext.angles`, or None
- `empty_cache(config, batch, length, dtype)`: its cache in generation, with a method `grown(more)`; `cache_dims(config)`: (heads, dims of a
  key, dims of a value) of a cached position
- `flops_per_token(seq_len, masked=)`, `pair_flops(seq_len)`, `kernel_flops(seq_len, device_kind)`: training FLOPs, the FLOPs
  of pairs of positions alone, and the FLOPs that its TPU kernel is charged
- `matmuls()`, `saved_tensors()`: see `maxlm.models.saved_tensors`
- `mask`: the pairs of positions that it computes; None for a mixer without pairs, which has `pair_flops` and `kernel_flops` of 0
- `rewritten`: numbers a token of its inner tensors that are written again after their matmuls
- `adaptable`: True if LoRA adapts its matrices
"""
