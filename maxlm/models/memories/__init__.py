"""Memories: parts of a layer that look something up for each token, between its mixer and its feed-forward part.

`maxlm.config.layer_parts` lists them, and a layer has one where its entry of the layer pattern names it after a `+`. A memory has the
interface of a feed-forward part (`maxlm.models.feed_forward`), and no router.
"""
