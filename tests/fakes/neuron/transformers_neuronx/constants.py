"""Names of layouts and of ways to share key and value heads."""

import enum

LAYOUT_BSH = "BSH"
LAYOUT_HSB = "HSB"
LAYOUT_SBH = "SBH"


class Layout(enum.Enum):
    HSB = LAYOUT_HSB
    BSH = LAYOUT_BSH
    SBH = LAYOUT_SBH

    def __eq__(self, other):  # a plain string will do as well
        return self is Layout(other)


class GQA(enum.Enum):
    SHARD_OVER_HEADS = "shard-over-heads"
    SHARD_OVER_BATCH = "shard-over-batch"
    REPLICATED_HEADS = "replicated-heads"
    ALL_GATHER_HEADS = "all-gather-heads"
