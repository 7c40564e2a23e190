"""Malformed and hostile ext_proc streams leave nothing behind in a picker.

`python -m tests.picker_fuzz_soak` sends 100,000 of them.
"""

from __future__ import annotations

import pytest

from tests.helpers.picker_fuzz import StreamFuzzer, fuzz


@pytest.mark.parametrize("ends_stream", [True, False])
async def test_hostile_streams_leave_nothing_behind(ends_stream: bool) -> None:
    """No stream, body, task or buffer stays, no booking without an end, and no answer is the picker's fault."""
    outcomes = await fuzz(StreamFuzzer(seed=1), 1500, ends_stream=ends_stream)
    assert outcomes["pick: picked"] > 100 and outcomes["pick: request_timeout"] > 0
    assert len(outcomes) > 10, outcomes
