"""How fast models compute and devices copy, by name, for simulated engines and pools (pure).

What lives here: the figures of a class of models and of a device. What must not: what they are used for (engine_config,
pool). Options that name one of them are overridden by options that give a figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ModelClass = Literal["8b", "70b"]
DeviceClass = Literal["cxl-x8", "cxl-x16"]


@dataclass(frozen=True, slots=True)
class ModelSpeed:
    """What one token costs. bytes_per_token: of the KV cache. Others: see EngineConfig."""

    bytes_per_token: int
    prefill_ms_base: float
    prefill_us_per_token: float
    decode_ms_per_token: float


#: By the number of parameters. Both have grouped-query attention with 8 heads of 128 numbers for keys and for values,
#: 16 bits each: 4,096 bytes per layer, times 32 layers and 80 layers.
MODELS: dict[ModelClass, ModelSpeed] = {
    # 16 GFLOP per token on four H100 at a quarter of what they compute; 16 GB of weights at 2 TB/s.
    "8b": ModelSpeed(131_072, 8.0, 15.0, 8.0),
    # 140 GFLOP per token, on the same machine at a third.
    "70b": ModelSpeed(327_680, 15.0, 100.0, 20.0),
}

#: Bytes per second of memory behind PCIe 5, in 10^9 each way. x8 without flits and protocol, as in PoolConfig; x16 as
#: devices are specified.
DEVICES: dict[DeviceClass, float] = {"cxl-x8": 25.0, "cxl-x16": 64.0}
