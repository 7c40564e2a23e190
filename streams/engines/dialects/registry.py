"""The dialects that `--engine …,dialect=NAME` can select (pure).

What lives here: the list. What must not: any engine's format. A new dialect is a module next to this one and an entry
in `DIALECTS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from streams.engines.dialects.auto import AUTO
from streams.engines.dialects.interface import Dialect
from streams.engines.dialects.sglang import SGLANG
from streams.engines.dialects.trtllm import TRTLLM
from streams.engines.dialects.vllm import VLLM

#: Every dialect by its name.
DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in (AUTO, VLLM, SGLANG, TRTLLM)}

#: The dialect of an engine whose address names none.
DEFAULT_DIALECT = AUTO
