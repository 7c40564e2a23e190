"""Default weights and bandwidths of the policy `expected-time`.

What lives here: what the settings show as defaults. What must not: the formula (expected_time), and timing lines
(timings). It is apart from the policy, so that processes that only read settings import no kernel.
"""

#: Of a model of 8B parameters with grouped-query attention and 16-bit caches (32 layers, 8 heads of 128).
KV_BYTES_PER_TOKEN = 131_072

#: Memory that is loaded over PCIe of the fourth generation, a fast disk, and external memory, which is not credited,
#: since it is not known which ranks reach it. A CXL pool is read over the same PCIe as host memory.
HOST_GB_PER_S, DISK_GB_PER_S, EXTERNAL_GB_PER_S, POOL_GB_PER_S = 25.0, 5.0, 0.0, 25.0

#: Source: docs/quality.md, as for the formula.
UNCACHED_WEIGHT = 1.25
DECODE_WEIGHT = 0.01

#: A waiting request leaves for a rank that is busy for no longer than this. Longer, and it is bound too early; shorter,
#: and engines idle until the router hears that they are free.
EXPECTED_TIME_QUEUE_MS = 200.0
