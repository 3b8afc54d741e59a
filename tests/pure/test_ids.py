"""ULIDs: their text, their order and what a fork does to them."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate_sync.ids import UlidGenerator, encode_ulid

LAST_MS = 2**48 - 1
LAST_RANDOM = 2**80 - 1


@pytest.mark.parametrize(
    ("at_ms", "random_bytes", "text"),
    [
        (0, bytes(10), "00000000000000000000000000"),
        (1_469_918_176_385, bytes(10), "01ARYZ6S410000000000000000"),
        (LAST_MS, b"\xff" * 10, "7ZZZZZZZZZZZZZZZZZZZZZZZZZ"),
        (1_788_393_600_123, bytes(range(10)), "01M1J91D3V000G40R40M30E209"),
    ],
)
def test_the_text_of_an_id_is_fixed(at_ms, random_bytes, text):
    assert encode_ulid(at_ms, int.from_bytes(random_bytes)) == text
    generate = UlidGenerator(
        clock_ms=lambda: at_ms, random_bytes=lambda length: random_bytes[:length]
    )
    assert generate() == text


parts = st.tuples(st.integers(0, LAST_MS), st.integers(0, LAST_RANDOM))


@given(parts, parts)
def test_the_order_of_texts_is_the_order_of_instants(one, other):
    assert (encode_ulid(*one) < encode_ulid(*other)) == (one < other)


def test_ids_of_one_millisecond_strictly_increase():
    generate = UlidGenerator(clock_ms=lambda: 5)
    made = [generate() for _ in range(1000)]
    assert made == sorted(set(made))
    assert {text[:10] for text in made} == {encode_ulid(5, 0)[:10]}


def test_ids_increase_while_the_clock_steps_back():
    ticks = iter([100, 99, 1, 100, 101])
    generate = UlidGenerator(clock_ms=lambda: next(ticks))
    made = [generate() for _ in range(5)]
    assert made == sorted(set(made))
    assert made[3][:10] == encode_ulid(100, 0)[:10]


def test_a_used_up_millisecond_borrows_from_the_next():
    generate = UlidGenerator(clock_ms=lambda: 5, random_bytes=lambda n: b"\xff" * n)
    assert generate() == encode_ulid(5, LAST_RANDOM)
    assert generate() == encode_ulid(6, 0)
    assert generate() == encode_ulid(6, 1)


def test_a_new_millisecond_draws_new_randomness():
    ticks = iter(range(100))
    generate = UlidGenerator(clock_ms=lambda: next(ticks))
    assert len({generate()[10:] for _ in range(100)}) == 100


def test_threads_never_share_an_id():
    generate = UlidGenerator(clock_ms=lambda: 5)
    made: list[list[str]] = [[] for _ in range(8)]
    barrier = threading.Barrier(8)

    def draw(kept: list[str]) -> None:
        barrier.wait()
        kept.extend(generate() for _ in range(500))

    threads = [threading.Thread(target=draw, args=(kept,)) for kept in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({text for kept in made for text in kept}) == 4000
    assert all(kept == sorted(kept) for kept in made)


# Forks happen in a program of their own: this process may have threads by now.

FORK = """
import os
from headgate_sync.ids import UlidGenerator

def in_child(call):
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, call().encode())
        os._exit(0)
    os.close(writer)
    return os.read(reader, 99).decode()
"""

FRESH = f"""
{FORK}
generate = UlidGenerator(clock_ms=lambda: 5)
generate()
print(in_child(generate), in_child(generate), generate())
"""

UNDER_THE_LOCK = f"""
{FORK}
forked = []

def random_bytes(length):
    if not forked:
        forked.append(True)
        print(in_child(generate))
    return bytes(length)

generate = UlidGenerator(clock_ms=lambda: 5, random_bytes=random_bytes)
print(generate())
"""


def run(program: str) -> list[str]:
    """The words that a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.stdout.split()


def test_a_forked_child_starts_afresh():
    """With the inherited state two children would mint the same id."""
    made = run(FRESH)
    assert len(set(made)) == 3
    assert {len(text) for text in made} == {26}


def test_a_child_forked_while_the_lock_is_held_can_still_draw():
    assert {len(text) for text in run(UNDER_THE_LOCK)} == {26}
