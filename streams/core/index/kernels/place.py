"""An answer of the index as columns over the candidates of one request.

What lives here: putting what a match found where its candidates are. What must not: matching (match), and what a block
is worth (routing).
"""

from __future__ import annotations

from numba import float64, int64, types, void

from streams.core.ids import Float64Array, Int64Array
from streams.core.kernels.compiling import kernel

_INTS = types.Array(int64, 1, "C")
_FLOATS = types.Array(float64, 1, "C")
_COUNT_MASK = (1 << 32) - 1


# Keeps the GIL: it ends within a microsecond, and to get it back from a thread that folds would take longer.
@kernel(void(_INTS, _INTS, float64, _INTS, _FLOATS), nogil=False)
def place_scores(
    found: Int64Array, positions: Int64Array, weight: float, overlap: Int64Array, effective: Float64Array
) -> None:
    """Put what a match found where its candidates are.

    found: int64[k], rank number << 32 | blocks; positions: int64[m], of each rank number, n for no candidate; weight:
    what a block counts. overlap: int64[n] and effective: float64[n], to be written.
    """
    overlap[:] = 0
    effective[:] = 0.0
    for index in range(found.size):
        position = positions[found[index] >> 32]
        if position < overlap.size:
            blocks = found[index] & _COUNT_MASK
            overlap[position] = blocks
            effective[position] = blocks * weight
