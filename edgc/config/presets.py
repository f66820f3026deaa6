"""What each preset sets: values of ``edgc.config.EDGCConfig`` by name."""

from typing import Any

# What safe, balanced and fast share: a volume for the whole run, several warm-started factors used in turn, gradients
# equalised, errors of which a half waits after the first part of the run, a short warm-up in few bits, gradients
# rounded on their way from stage to stage, and weights of 16 bits gathered in fewer. What they say of embeddings and
# other parameters, and of how matrices share a rank, holds where ranks are given or set by entropy. Evidence:
# docs/frontier, docs/convergence.md.
_FRONT = {
    "equalise": True,
    "basis_cycle": 8,
    "error_gain": 0.5,
    "whole_error_fraction": 0.4,
    "allocation": "waterfill",
    "learning_rate_power": 0.7,
}
_EIGHT_BITS = {
    "basis_wire": "int8",
    "wire": "int8",
    "rest_wire": "int8",
    "dense_wire": "int8",
    "pp": "auto:int8",
    "param_wire": "auto:int8",
}
_FEWER_BYTES = {"compress_embeddings": True, "dense_wire": "int4", "pp": "auto:int4"}
PRESETS: dict[str, dict[str, Any]] = {
    # as published; which messages the paper means is our choice: docs/reproduction.md
    "paper": {"pp": "auto-epilogue:powersgd", "fuse_embedding_sync": False},
    "safe": {**_FRONT, **_EIGHT_BITS, "warmup_fraction": 0.025, "volume": 8.0},
    "balanced": {
        **_FRONT,
        **_FEWER_BYTES,
        "basis_wire": "int5",
        "wire": "int5",
        "rest_wire": "int6",
        "param_wire": "auto:int8",
        "warmup_fraction": 0.025,
        "volume": 24.0,
    },
    "fast": {
        **_FRONT,
        **_FEWER_BYTES,
        "basis_wire": "int5+int3",
        "wire": "int5",
        "rest_wire": "int4",
        "param_wire": "auto:int4",
        "warmup_fraction": 0.01,
        "volume": 48.0,
    },
    # the rival of the paper (Song et al., ASPLOS 2023), for pipelines with tied embeddings; the share is our choice
    "optimus": {
        "pp": "epilogue:powersgd:16",
        "fuse_embedding_sync": True,
        "static_rank": 128,
        "stage_share": 3 / 4,
    },
}
