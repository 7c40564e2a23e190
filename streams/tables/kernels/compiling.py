"""How kernels of this package are compiled; see core.kernels.compiling.

What lives here: the decorator. What must not: kernels.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from streams.core import run_kernels
from streams.core.kernels.compiling import kernel as kernel_of

#: These kernels are stale when one of this folder changes, one of core.run_kernels, or one of core.kernels.
kernel = partial(kernel_of, beside=(Path(__file__).parent, Path(run_kernels.__file__).parent))
