"""The engine under DeepSpeed at ZeRO 0, 1 and 2 in fp32, and 1 and 2 in bf16, on one rank and on two.

The processes play the same windows (:mod:`tests.integration.run_engine`) and check themselves: windows with a
non-finite loss or gradient leave no trace, a fresh engine given the gathered state goes on bit for bit, a rank without
hits of its selector steps with the others, and state saved on one number of ranks continues on another.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.forked import finish, fork_ranks_of

RUN = "tests.integration.run_engine"


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_bad_windows_leave_no_trace_and_state_moves_between_numbers_of_ranks(
    tmp_path: Path, first: int, then: int
) -> None:
    finish(fork_ranks_of(RUN, [str(tmp_path), "save"], first))
    finish(fork_ranks_of(RUN, [str(tmp_path), "load"], then))
