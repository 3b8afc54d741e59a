"""What is guaranteed, what depends on the store, and what is not promised, as data."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen
from attrs.validators import in_

Level = Literal["guaranteed", "backend", "not_promised"]
LEVELS: tuple[Level, ...] = ("guaranteed", "backend", "not_promised")


@frozen(kw_only=True)
class Semantic:
    """One statement about the library.

    Attributes:
        id: its stable name.
        statement: a sentence.
        level: `guaranteed` by every store; `backend`, by some; `not_promised`, by none.
        memory: whether `MemStore` keeps it, or under which condition.
        postgres: the same of `PgStore`.
        tests: pytest ids of the tests that show it; for what is guaranteed.
    """

    id: str
    statement: str
    level: Level = field(validator=in_(LEVELS))
    memory: bool | str = True
    postgres: bool | str = True
    tests: tuple[str, ...] = ()


WHILE_IT_LIVES = "while the process lives"
SEMANTICS: tuple[Semantic, ...] = (
    Semantic(
        id="at-least-once",
        level="guaranteed",
        statement="An accepted job is run until it is settled, also when its workers "
        "crash.",
        memory=WHILE_IT_LIVES,
        tests=(
            (
                "tests/worker/test_worker.py::"
                "test_due_jobs_are_promoted_and_lost_ones_reclaimed_by_any_worker"
            ),
            "tests/concurrency/test_soup.py::test_everything_at_once_keeps_the_books",
            (
                "tests/crash/test_kill.py::"
                "test_three_hundred_jobs_survive_a_fleet_that_is_killed_again_and_again"
            ),
        ),
    ),
    Semantic(
        id="not-early",
        level="guaranteed",
        statement="A job never starts before its instant on the store's clock.",
        tests=(
            (
                "tests/contract/test_sweeps.py::"
                "test_a_job_is_due_at_its_instant_and_not_before"
            ),
            (
                "tests/contract/test_admit.py::"
                "test_priority_does_not_bring_a_scheduled_job_forward"
            ),
        ),
    ),
    Semantic(
        id="exclusive-lease",
        level="guaranteed",
        statement="A job has one live lease at most, and a superseded holder can "
        "neither settle it nor write to it.",
        tests=(
            "tests/concurrency/test_races.py::test_no_job_is_claimed_twice",
            (
                "tests/contract/test_ack.py::"
                "test_a_superseded_lease_cannot_end_the_attempt"
            ),
        ),
    ),
    Semantic(
        id="fence-monotonic",
        level="guaranteed",
        statement="Each claim of a job raises its fence by one; nothing else changes "
        "it.",
        tests=(
            "tests/contract/test_admit.py::test_the_fence_counts_entries_into_running",
            (
                "tests/scenarios/test_admission_leases.py::"
                "test_the_fence_counts_claims_and_nothing_else"
            ),
        ),
    ),
    Semantic(
        id="crash-recovery",
        level="guaranteed",
        statement="A lost lease is taken back within the lease and two intervals of "
        "the reclaim duty, while any worker runs duties.",
        memory=WHILE_IT_LIVES,
        tests=(
            (
                "tests/contract/test_reclaim.py::"
                "test_a_lease_is_lost_at_its_instant_and_not_before"
            ),
            (
                "tests/crash/test_kill.py::"
                "test_a_worker_killed_in_a_handler_is_replaced_within_its_lease"
            ),
        ),
    ),
    Semantic(
        id="crash-limit",
        level="guaranteed",
        statement="A payload that kills its workers is quarantined at the crash limit, "
        "with its waiting siblings.",
        tests=(
            (
                "tests/contract/test_reclaim.py::"
                "test_backoff_doubles_until_the_crash_limit_quarantines"
            ),
            (
                "tests/contract/test_quarantine.py::"
                "test_waiting_siblings_are_swept_into_quarantine"
            ),
            (
                "tests/crash/test_kill.py::"
                "test_a_payload_that_kills_its_worker_is_quarantined_after_three_starts"
            ),
        ),
    ),
    Semantic(
        id="limit-never-exceeded",
        level="guaranteed",
        statement="Over any interval a rate class passes no more than its burst and "
        "its rate allow.",
        tests=(
            (
                "tests/scenarios/test_admission_rates.py::"
                "test_no_interval_passes_more_than_burst_and_rate_allow"
            ),
            (
                "tests/concurrency/test_gate_soup.py::"
                "test_threads_keep_every_limit_at_every_instant"
            ),
        ),
    ),
    Semantic(
        id="ceiling-never-exceeded",
        level="guaranteed",
        statement="No more jobs run than a ceiling allows, however many workers admit.",
        tests=(
            (
                "tests/scenarios/test_admission_ceilings.py::"
                "test_each_partition_has_the_limit_for_itself"
            ),
            (
                "tests/scenarios/test_admission_ceilings.py::"
                "test_a_queue_can_be_bounded_as_a_whole"
            ),
            (
                "tests/scenarios/test_admission_ceilings.py::"
                "test_a_class_can_be_bounded_over_all_queues"
            ),
            (
                "tests/concurrency/test_gate_soup.py::"
                "test_threads_keep_every_limit_at_every_instant"
            ),
        ),
    ),
    Semantic(
        id="no-starvation",
        level="guaranteed",
        statement="A partition, and a queue with a weight, gets its turn within a "
        "bound, whatever the others bring.",
        tests=(
            (
                "tests/scenarios/test_admission_fairness.py::"
                "test_a_partition_waits_no_longer_than_the_bound_says"
            ),
            (
                "tests/scenarios/test_admission_fairness.py::"
                "test_every_one_of_many_partitions_gets_its_turn"
            ),
            (
                "tests/scenarios/test_admission_queues.py::"
                "test_an_idle_queue_catches_up_with_a_bounded_lag"
            ),
        ),
    ),
    Semantic(
        id="unique-live-key",
        level="guaranteed",
        statement="A unique key is held by one unfinished job at most.",
        tests=(
            (
                "tests/contract/test_uniqueness.py::"
                "test_a_key_is_held_in_every_unfinished_state"
            ),
            (
                "tests/concurrency/test_races.py::"
                "test_of_many_duplicates_one_is_stored_and_the_others_name_it"
            ),
        ),
    ),
    Semantic(
        id="idempotent-id",
        level="guaranteed",
        statement="Enqueueing a job again under its id changes nothing; other content "
        "under that id is refused.",
        tests=(
            (
                "tests/contract/test_ids.py::"
                "test_a_replay_of_an_accepted_id_changes_nothing"
            ),
            "tests/contract/test_ids.py::test_a_conflict_rejects_the_whole_batch",
            "tests/concurrency/test_races.py::test_the_same_new_ids_are_taken_in_once",
        ),
    ),
    Semantic(
        id="all-or-nothing-batch",
        level="guaranteed",
        statement="A batch is taken in whole or not at all.",
        tests=(
            (
                "tests/contract/test_uniqueness.py::"
                "test_a_duplicate_rejects_the_whole_batch"
            ),
            (
                "tests/contract/test_backpressure.py::"
                "test_a_batch_that_would_pass_the_limit_is_refused_whole"
            ),
            (
                "tests/contract/test_quarantine.py::"
                "test_intake_refuses_the_fingerprint_and_the_whole_batch"
            ),
        ),
    ),
    Semantic(
        id="refusal-changes-nothing",
        level="guaranteed",
        statement="A call that is refused leaves every job, counter and policy as it "
        "was.",
        tests=(
            (
                "tests/contract/test_ack.py::"
                "test_a_malformed_ack_leaves_the_attempt_running"
            ),
            (
                "tests/contract/test_ack_batch.py::"
                "test_a_batch_of_rejected_acks_changes_nothing"
            ),
            "tests/contract/test_ids.py::test_a_conflict_rejects_the_whole_batch",
        ),
    ),
    Semantic(
        id="retry-count-exact",
        level="guaranteed",
        statement="Failures are counted one by one up to the limit of attempts, and "
        "lost leases apart from them.",
        tests=(
            "tests/contract/test_ack.py::test_the_last_permitted_failure_archives",
            "tests/contract/test_ack.py::test_attempt_24_of_25_is_the_last",
            (
                "tests/contract/test_reclaim.py::"
                "test_a_lost_lease_counts_a_crash_and_waits"
            ),
        ),
    ),
    Semantic(
        id="steps-skip-once-completed",
        level="guaranteed",
        statement="A step whose end was recorded is not run again by a later attempt.",
        tests=(
            (
                "tests/worker/test_steps.py::"
                "test_the_next_attempt_goes_on_with_the_step_that_failed"
            ),
            (
                "tests/crash/test_steps.py::"
                "test_a_fleet_that_is_killed_again_and_again_finishes_every_step"
            ),
        ),
    ),
    Semantic(
        id="tick-once",
        level="guaranteed",
        statement="Each tick of a schedule becomes one job, however many workers fire "
        "it.",
        tests=(
            (
                "tests/concurrency/test_schedules.py::"
                "test_five_nodes_sweeping_at_once_make_one_job_per_tick"
            ),
            (
                "tests/contract/test_schedules.py::"
                "test_a_tick_that_ran_and_left_no_row_does_not_run_again"
            ),
            (
                "tests/crash/test_ticks.py::"
                "test_nodes_that_are_killed_at_any_point_lose_and_double_no_tick"
            ),
        ),
    ),
    Semantic(
        id="no-silent-eviction",
        level="guaranteed",
        statement="A job is removed only at the end of its retention or on request; "
        "without a retention what failed waits for an operator.",
        memory=WHILE_IT_LIVES,
        tests=(
            (
                "tests/contract/test_sweeps.py::"
                "test_a_failed_job_without_retention_waits_for_an_operator"
            ),
            (
                "tests/contract/test_sweeps.py::"
                "test_retention_ends_at_its_instant_and_not_before"
            ),
            "tests/contract/test_sweeps.py::test_quarantined_jobs_are_kept_for_ever",
        ),
    ),
    Semantic(
        id="transactional-enqueue",
        level="backend",
        statement="A job can be enqueued in the caller's transaction, and exists if "
        "and only if that commits.",
        memory=False,
    ),
    Semantic(
        id="effect-once",
        level="backend",
        statement="What `once` and `step_once` do in the database takes effect once, "
        "together with the record that it did.",
        memory=False,
    ),
    Semantic(
        id="durable-after-commit",
        level="backend",
        statement="What a call has confirmed outlives a crash of process and server.",
        memory=False,
        postgres="as durable as the server is set to be: fsync, synchronous_commit",
    ),
    Semantic(
        id="cold-archive",
        level="backend",
        statement="Where a queue has an archive, a job that is deleted for its age is "
        "copied there in the same commit.",
        memory=False,
    ),
    Semantic(
        id="wake-up-notices",
        level="backend",
        statement="An idle worker is woken by an enqueue, beside asking by itself.",
        memory=False,
        postgres="with connection settings for LISTEN",
    ),
    Semantic(
        id="several-processes",
        level="backend",
        statement="Any number of processes and machines share the jobs and all limits.",
        memory=False,
    ),
    *(
        Semantic(
            id=id, statement=text, level="not_promised", memory=False, postgres=False
        )
        for id, text in {
            "exactly-once-effects": "Side effects outside of the database happen "
            "exactly once.",
            "completion-order": "Jobs end in the order in which they started.",
            "start-order": "Jobs start in one order across retries, partitions or "
            "queues.",
            "exact-start": "A job starts exactly at its instant.",
            "stopping-threads": "A thread that ignores its cancellation is stopped.",
            "permanent-retention": "Finished jobs are kept for ever.",
            "older-release": "A release older than the schema works on it.",
            "autoscaling": "Workers are started and stopped by load.",
            "order-between-databases": "Jobs of several databases have one order.",
        }.items()
    ),
)
