"""GPUs by their data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """Peaks by the vendor's data sheet: bytes/s of memory, and flop/s in fp32 without TF32 and in float64."""

    name: str
    memory: float
    fp32: float
    fp64: float


GPUS = {
    "v100": GPU("V100 SXM2", 900e9, 15.7e12, 7.8e12),
    "a100": GPU("A100 SXM 80 GB", 2039e9, 19.5e12, 19.5e12),  # float64 on tensor cores
    "h100": GPU("H100 SXM", 3350e9, 67e12, 67e12),  # float64 on tensor cores
}
GPU_OF = {"7.0": "v100", "8.0": "a100", "9.0": "h100"}  # by compute capability
