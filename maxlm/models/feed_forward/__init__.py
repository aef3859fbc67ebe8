"""Feed-forward parts of a layer. `maxlm/config/parts/layers.py` lists them.

A feed-forward part is an `nnx.Module`, made by `Part(config)`. Called with (hidden states, `BlockContext`), it returns (its output, the
report of its router or None), and has `flops_per_token()`, `matmuls()`, `saved_tensors()` (see `maxlm.models.saved_tensors`), and
`adaptable`: True if LoRA adapts its matrices.
"""
