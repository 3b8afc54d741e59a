"""Keys of effects, which are kept for ever unless somebody asks for their end."""

from __future__ import annotations

from headgate_sync.lifecycle import Outcome
from tests.builders import run_one


def claim(store, *keys):
    with store.transactional.transaction() as tx:
        return [store.transactional.claim_effect(tx, key) for key in keys]


def test_keys_are_forgotten_only_when_they_are_old_and_their_job_is_gone(
    store, postgres
):
    kept = run_one(store, "kept").lease_ref
    claim(store, "kept", "kept/step", "gone", "gone/step")
    postgres.clock.advance_ms(1_000)
    claim(store, "young")
    assert store.maintenance.prune_effects(1_001, 10) == 0
    assert store.maintenance.prune_effects(1_000, 1) == 1
    assert store.maintenance.prune_effects(1_000, 10) == 1
    assert store.maintenance.prune_effects(1_000, 10) == 0
    keys = ("kept", "kept/step", "gone", "gone/step", "young")
    assert claim(store, *keys) == [False, False, True, True, False]
    store.ack(kept, Outcome.REVOKE)
    postgres.clock.advance_ms(1_000)
    assert store.maintenance.prune_effects(2_000, 10) == 2


def test_a_key_that_is_being_claimed_is_not_waited_for(store, postgres):
    with store.transactional.transaction() as tx:
        store.transactional.claim_effect(tx, "a")
        postgres.clock.advance_ms(5_000)
        assert store.maintenance.prune_effects(1, 10) == 0
