"""The waiting room by itself: who has a thread, who waits, and how many are invited."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headgate_sync.attempt import LiveAttempt
from headgate_sync.cancel import CancelReason
from headgate_sync.lease import Claim
from headgate_sync.memory.store import MemStore
from headgate_sync.worker.batching import Chunk, Member
from headgate_sync.worker.prefetch import AHEAD_S, PATIENCE_S, WaitingRoom
from tests.builders import START_MS, envelope
from tests.worker.rig import Steps


class Room(WaitingRoom):
    """A waiting room on stepped time, with claims of its own."""

    def __init__(self, threads: int, prefetch: int) -> None:
        self.steps = Steps()
        self.told = 0
        super().__init__(
            threads, prefetch, now_s=self.steps, half_empty=self._count_told
        )
        self.store = MemStore()

    def _count_told(self) -> None:
        self.told += 1

    def claims(self, count: int) -> list[LiveAttempt]:
        return [
            LiveAttempt(
                Claim(
                    envelope=envelope(f"j{number}"),
                    fence=1,
                    lease_id="l",
                    claimed_at_ms=START_MS,
                    expires_at_ms=START_MS + 30_000,
                ),
                self.store,
                lease_due_s=self.steps() + 30,
                returned_s=self.steps(),
                now_s=self.steps,
            )
            for number in range(count)
        ]

    def keep_pace(self, per_s: float) -> None:
        """Let one thread begin so many claims per second for a while."""
        self.invite(0)
        self.steps.advance(0.125)
        for claim in self.claims(round(per_s * 0.125)):
            self.enter([claim])
            self.leave()
        self.invite(0)


def chunk_of(members: list[Member]) -> Chunk:
    binding: Any = None  # the room does not look at it
    return Chunk(binding, members)


def test_no_more_claims_begin_than_there_are_threads() -> None:
    """Whatever comes and goes: in order, none lost, none twice."""
    for seed in range(50):
        draw = random.Random(seed)
        threads = draw.randint(1, 4)
        room = Room(threads, 8)
        came: list[LiveAttempt] = []
        began: list[LiveAttempt] = []
        chunks: list[Chunk] = []
        ran: list[Chunk] = []
        busy: list[str] = []
        while busy or len(came) < 100:
            step = draw.random()
            if step < 0.3 and len(came) < 100:
                fresh = room.claims(draw.randint(0, 5))
                came += fresh
                at_once = room.enter(fresh)
                began += at_once
                busy += ["claim"] * len(at_once)
            elif step < 0.4 and busy.count("call") < 2 and len(came) < 100:
                room.occupy()
                busy.append("call")
            elif step < 0.5 and len(came) < 100:
                chunks.append(chunk_of([]))
                if room.enter_chunk(chunks[-1]):
                    ran.append(chunks[-1])
                    busy.append("chunk")
            elif busy:
                busy.pop(draw.randrange(len(busy)))
                following = room.leave()
                if isinstance(following, Chunk):
                    ran.append(following)
                    busy.append("chunk")
                elif following is not None:
                    began.append(following)
                    busy.append("claim")
            assert busy.count("claim") + busy.count("chunk") <= threads
            assert room.crowded == (len(busy) > threads)
        assert began == came
        assert ran == chunks


def test_as_much_is_taken_ahead_as_the_threads_begin_in_a_moment() -> None:
    room = Room(4, 20)
    slots = 24  # nothing is held
    assert room.invite(slots) == 4  # nothing is known of the pace
    room.keep_pace(48)
    assert room.invite(slots) == 4 + 4  # of the 4.8 that begin in a tenth of a second
    room.keep_pace(5_000)
    assert room.invite(slots) == 24
    room.steps.advance(10 * AHEAD_S)  # nothing has begun for a while
    assert room.invite(slots) == 4


def test_what_waited_before_it_began_is_part_of_the_pace() -> None:
    room = Room(1, 20)
    room.enter(room.claims(13))
    room.steps.advance(0.125)
    for _ in range(12):
        room.leave()
    assert room.invite(21) == 1 + 10  # 13 in an eighth of a second


def test_without_prefetch_the_pace_does_not_matter() -> None:
    room = Room(4, 0)
    room.keep_pace(5_000)
    assert room.invite(4) == 4


def test_more_is_asked_for_when_the_room_is_half_empty() -> None:
    room = Room(2, 8)
    room.keep_pace(1_000)
    room.enter(room.claims(10))
    assert room.invite(0) == 0
    for waiting in (7, 6, 5):
        assert room.leave() is not None
        assert room.invite(8 - waiting) == 0
    assert room.told == 0
    assert room.leave() is not None
    assert room.told == 1  # whoever was sent away comes again
    assert room.invite(4) == 4
    assert room.leave() is not None
    assert room.told == 1


def test_what_was_handed_back_is_not_asked_for_again_by_the_pace_of_before() -> None:
    room = Room(1, 20)
    room.keep_pace(5_000)
    room.enter(room.claims(1))
    for claim in room.claims(500):
        room.leave()
        room.enter([claim])
    room.enter(room.claims(20))
    room.steps.advance(PATIENCE_S)
    claims, _, _ = room.overdue()
    assert len(claims) == 20
    assert room.invite(20) == 0
    assert room.leave() is None
    assert room.invite(21) == 1


def test_what_waits_for_a_second_or_was_cancelled_goes() -> None:
    room = Room(1, 8)
    early = room.claims(3)
    room.enter(early)
    room.steps.advance(PATIENCE_S / 2)
    late = room.claims(2)
    room.enter(late)
    assert room.due_s() == early[0].returned_s + PATIENCE_S
    assert room.overdue() == ([], [], early[0].returned_s + PATIENCE_S)
    late[1].token.set(CancelReason.LEASE_LOST)
    room.steps.advance(PATIENCE_S / 2)
    claims, chunks, due_s = room.overdue()
    assert (claims, chunks) == ([*early[1:], late[1]], [])
    assert due_s == pytest.approx(late[0].returned_s + PATIENCE_S)
    assert room.leave() is late[0]
    assert room.due_s() == float("inf")
    chunk = chunk_of([])
    assert not room.enter_chunk(chunk)
    assert room.due_s() == room.steps() + PATIENCE_S
    room.steps.advance(PATIENCE_S)
    assert room.overdue() == ([], [chunk], float("inf"))
    assert room.leave() is None
