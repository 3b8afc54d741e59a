"""What a claim carries, and what concurrent callers may rely on."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from headgate_sync.lifecycle import Outcome
from tests.backends import Backend, Clock
from tests.builders import claim_one, counts, crash, enqueue
from tests.scenarios.gate import admit, ceiling, fill, ids, rate_class, tokens


def test_all_claims_of_a_call_share_lease_and_expiry(store, backend, clock: Clock):
    fill(store, "job", 20)
    batch = admit(store, 10, lease_id="lease", lease_ms=30_000)
    assert len(batch) == 10
    for claim in batch.claims:
        assert (claim.lease_id, claim.fence) == ("lease", 1)
        assert claim.claimed_at_ms == clock.now_ms()
        assert claim.expires_at_ms == clock.now_ms() + 30_000
    leased = [row for row in backend.snapshot().jobs.values() if row["lease_id"]]
    assert {row["id"] for row in leased} == set(ids(batch))
    assert {row["state"] for row in leased} == {"running"}


def test_the_fence_counts_claims_and_nothing_else(store, clock: Clock):
    enqueue(store, "a")
    first = claim_one(store)
    crash(store, clock, first)
    clock.advance_ms(3_600_000)
    store.promote_due(1)
    second = claim_one(store)
    store.ack(second.lease_ref, Outcome.RATE_LIMITED)
    third = claim_one(store)
    assert [claim.fence for claim in (first, second, third)] == [1, 2, 3]


def test_workers_that_ask_at_once_share_the_queue_out(store):
    fill(store, "job", 500, partition_key="")
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(lambda n: admit(store, 80, worker=f"w{n}"), range(8)))
    while rest := admit(store, 80):
        batches.append(rest)
    claimed = Counter(id for batch in batches for id in ids(batch))
    assert len(claimed) == 500
    assert set(claimed.values()) == {1}
    assert counts(store) == {"running": 500}


def test_workers_that_ask_at_once_keep_to_the_limits(store, backend: Backend):
    rate_class(store, "c", "0/1000", 37)
    ceiling(store, 3, "queue")
    for name in range(10):
        fill(store, f"p{name}", 20, rate_class="c" if name % 2 else "")
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(lambda n: admit(store, 20, worker=f"w{n}"), range(16)))
    claims = [claim.envelope for batch in batches for claim in batch.claims]
    assert len({envelope.id for envelope in claims}) == len(claims)
    by_partition = Counter(envelope.partition_key for envelope in claims)
    assert set(by_partition.values()) == {3}
    assert tokens(store, "c") == 37 - 15
    assert {row[1] for row in backend.snapshot().partitions.values()} == {3}
