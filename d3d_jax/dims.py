"""Dimension letters used in names and docstrings throughout the project.

A name such as ``logits_BTV`` says: axes batch, query token, vocabulary, in that order.
The suffix goes on arrays at module boundaries, not on every temporary.
"""

DIMENSIONS = {
    "A": "outcomes (successor blocks) of one packed pass",
    "B": "batch (sequences decoded together; rows of a training batch)",
    "D": "model width, `hidden_size`",
    "F": "feed-forward width, `intermediate_size`",
    "G": "block size: tokens verified per round, one anchor and G-1 drafts",
    "H": "width of one attention head, `head_dim`",
    "K": "key/value heads",
    "L": "layers",
    "N": "query heads",
    "P": "prompt tokens",
    "S": "key slots: cache capacity, or keys of a training row",
    "T": "query tokens of one call",
    "V": "vocabulary rows of the embedding",
}
