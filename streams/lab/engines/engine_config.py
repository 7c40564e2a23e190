"""The configuration of one simulated engine, and what its prefills cost (pure).

What lives here: the size of the cache, the cost model, and their limits. What must not: how requests are scheduled
(model) or how blocks are stored (block_cache).
"""

from __future__ import annotations

from dataclasses import dataclass

from streams.core.ids import U64_MASK
from streams.errors import SettingsError

#: The largest GPUs hold hundreds of thousands of blocks. With millions, each per-block array takes about 100 MB.
N_BLOCKS_MAX = 1 << 22
#: The largest block of any known engine is 256 tokens. The limit exists so that a typo is reported at once.
BLOCK_SIZE_MAX = 4096


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Size and speed of one engine.

    The defaults describe a 70B model on 4 H100 or an 8B model on one A100, which are about equally fast.
    block_size: tokens per block. n_blocks: blocks in the whole cache. engine_seed: private seed of the engine's hashes.
    in_place_us_per_token: of each decode step, for each token whose blocks a request reads in the shared pool instead
    of loading them (EngineModel.use_pool); 0 for models whose attention reads only few of them. Raises SettingsError.
    """

    block_size: int = 16  # vLLM's default on CUDA
    n_blocks: int = 16_384  # 262,144 tokens: 32 GiB at 128 KiB per token, an 8B model with grouped-query attention
    prefill_ms_base: float = 15.0  # launch and sampling overhead of one forward pass, however short the prompt is
    # 8B: 16 GFLOP per token, at half of one A100's 312 TFLOPS. 70B: about the same, at a third of what 4 H100 compute.
    prefill_us_per_token: float = 100.0
    decode_ms_per_token: float = 20.0  # 16 GB of weights at 2 TB/s take 8 ms; the rest is the batch's KV and overhead
    transfer_us_per_token: float = 5.0  # from another engine: 128 KiB per token at 25 GB/s
    engine_seed: int = 0x5EED_5EED_7412_D00D  # differs from every public seed, so no engine hash is a sequence hash
    in_place_us_per_token: float = 0.0

    def __post_init__(self) -> None:
        for name, value, most in (
            ("block_size", self.block_size, BLOCK_SIZE_MAX),
            ("n_blocks", self.n_blocks, N_BLOCKS_MAX),
        ):
            if not 1 <= value <= most:
                raise SettingsError(f"{name} is {value}; it must be 1..{most}")
        for name, duration in (
            ("prefill_ms_base", self.prefill_ms_base),
            ("prefill_us_per_token", self.prefill_us_per_token),
            ("decode_ms_per_token", self.decode_ms_per_token),
            ("transfer_us_per_token", self.transfer_us_per_token),
            ("in_place_us_per_token", self.in_place_us_per_token),
        ):
            if not 0.0 <= duration < float("inf"):  # also refuses NaN: a prefill of that length would never end
                raise SettingsError(f"{name} is {duration}; it must be finite and not negative")
        if not 0 <= self.engine_seed <= U64_MASK:
            raise SettingsError(f"engine_seed is {self.engine_seed}; it must be a u64")

    def transfer_ms(self, n_tokens: int) -> float:
        """Return the time in which the KV cache of this many tokens comes from another engine."""
        return n_tokens * self.transfer_us_per_token / 1000.0

    @property
    def n_tokens_max(self) -> int:
        """Tokens that the cache holds. The prompt and the answer of one request must fit."""
        return self.n_blocks * self.block_size

    def prefill_ms(self, n_uncached_tokens: int) -> float:
        """Return the duration of a prefill that computes this many tokens."""
        return self.prefill_ms_base + n_uncached_tokens * self.prefill_us_per_token / 1000.0

    def decode_ms(self, n_in_place_tokens: int) -> float:
        """Return the duration of a decode step of a request that reads this many tokens in the shared pool."""
        return self.decode_ms_per_token + n_in_place_tokens * self.in_place_us_per_token / 1000.0
