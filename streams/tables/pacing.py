"""How many records one transaction takes, and how long a partition waits before the next transaction.

What lives here: the limits of a batch, the rate of transactions, and the estimate of the rate of records. What must
not: the queue, its lock, reading a clock.
"""

from __future__ import annotations

#: Readers consider a partition record stale after 3 s, so two in a row may be late without consequence.
PARTITION_RECORD_EVERY_S = 1.0

#: A worker starts at most this many transactions per second, over all its partitions, unless full batches are waiting:
#: with four partitions, each waits 16 ms. A transaction costs the broker four requests, whether it holds one record or
#: a hundred. Without this limit, 1,000 records per second kept the broker so busy with transactions that the time saved
#: by not waiting was lost in the broker's queue. With 400, broker and worker used all of two cores at that rate, and
#: requests waited for them.
TRANSACTIONS_PER_SECOND_MAX = 250

#: The same while the process answers requests. Agents and the router share the interpreter, which 1,000 records per
#: second keep busy all the time: with 250 transactions, half of the requests waited for 3 ms and one in a hundred for
#: 60 ms; with this limit for 1.7 and 22 ms.
TRANSACTIONS_PER_SECOND_MAX_ANSWERING = 180

#: If more records than this arrive between two transactions, the wait grows in proportion, at most by the factor below.
#: Ranks and runs that change again during the wait are written once; at thousands of records per second, writing them
#: is most of the work of the broker and the worker.
RECORDS_PER_TRANSACTION = 4
BATCH_WAIT_FACTOR_MAX = 5.0

#: The weight of the latest transaction in the smoothed rate of records.
_RATE_WEIGHT = 0.1

#: Bytes of source records in one transaction: a batch must commit well within the transaction's timeout.
BATCH_BYTES_MAX = 1 << 20


class Pacer:
    """Spaces the transactions of one partition. Times are of one monotonic clock, in seconds. Owner: its thread.

    interval_s: that of the function of this name.
    """

    def __init__(self) -> None:
        self._taken_at = 0.0
        self._n_between = 0.0  # records that arrive between two transactions, smoothed

    def next_at(self, interval_s: float) -> float:
        """Return the time before which the next batch is not taken, unless it is full."""
        factor = min(max(self._n_between / RECORDS_PER_TRANSACTION, 1.0), BATCH_WAIT_FACTOR_MAX)
        return self._taken_at + interval_s * factor

    def took(self, n_records: int, now: float, interval_s: float) -> None:
        """Take note of a batch."""
        since_s, self._taken_at = now - self._taken_at, now
        self._n_between += (n_records * interval_s / max(since_s, interval_s) - self._n_between) * _RATE_WEIGHT


def interval_s(partitions_open: int, *, answers: bool) -> float:
    """Return how long a partition waits between two transactions. answers: whether the process answers requests."""
    per_second = TRANSACTIONS_PER_SECOND_MAX_ANSWERING if answers else TRANSACTIONS_PER_SECOND_MAX
    return partitions_open / per_second
