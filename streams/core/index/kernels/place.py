"""An answer of the index as arrays over the candidates of one request.

What lives here: writing the scores of a match to the positions of the candidates. What must not: matching (match) and
the weights of blocks (routing).
"""

from __future__ import annotations

from numba import float64, int64, types, void

from streams.core.ids import Float64Array, Int64Array
from streams.core.kernels.compiling import kernel

_INTS = types.Array(int64, 1, "C")
_FLOATS = types.Array(float64, 1, "C")
_COUNT_MASK = (1 << 32) - 1


# The GIL is kept: the call takes less than a microsecond, and waiting for the GIL while a thread folds takes longer.
@kernel(void(_INTS, _INTS, float64, _INTS, _FLOATS), nogil=False)
def place_scores(
    found: Int64Array, positions: Int64Array, weight: float, overlap: Int64Array, effective: Float64Array
) -> None:
    """Write the scores of a match to the positions of the candidates.

    found: int64[k], rank number << 32 | blocks. positions: int64[m], the candidate position of each rank number, n for
    ranks that are not candidates. weight: weight of one block. Output: overlap: int64[n] and effective: float64[n].
    """
    overlap[:] = 0
    effective[:] = 0.0
    for index in range(found.size):
        position = positions[found[index] >> 32]
        if position < overlap.size:
            blocks = found[index] & _COUNT_MASK
            overlap[position] = blocks
            effective[position] = blocks * weight
