"""GPUs by their data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """Peaks by the vendor's data sheet: bytes/s of memory; flop/s in fp32 without TF32, in float64, and in 16 bits with
    sums in fp32; Gbit/s of NVLink in one direction.
    """

    name: str
    memory: float
    fp32: float
    fp64: float
    flops16: float
    nvlink_gbps: float


GPUS = {
    "v100": GPU("V100 SXM2", 900e9, 15.7e12, 7.8e12, 125e12, 1200),
    "a100": GPU("A100 SXM 80 GB", 2039e9, 19.5e12, 19.5e12, 312e12, 2400),  # float64 on tensor cores
    "h100": GPU("H100 SXM", 3350e9, 67e12, 67e12, 989e12, 3600),  # float64 on tensor cores
}
GPU_OF = {7.0: GPUS["v100"], 8.0: GPUS["a100"], 9.0: GPUS["h100"]}  # by compute capability
