"""Residual rules: how a sublayer reads the residual stream and is added to it. `maxlm.config.layer_parts` lists them.

A rule is a frozen dataclass, made by `Rule.from_config(config, ahead=)`. `modules(config)` declares the modules that each sublayer of a
block has for it, by name; called with these, hidden states and the sublayer, it returns the new hidden states and the sublayer's second
result.
"""
