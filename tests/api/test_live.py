"""Live updates: hints that reach whoever looks, and bounds that hold."""

from __future__ import annotations

import json
import threading

import pytest

from headgate_sync.api import LiveUpdates
from headgate_sync.api.live import MAX_NAMES, REMEMBERED, Hub
from headgate_sync.envelope import MAX_RELATIVE_MS
from headgate_sync.lease import AdmitRequest
from headgate_sync.postgres.store import PgStore
from tests.api.caller import Caller, caller, job_body
from tests.builders import enqueue

LONG_MS = 3_600_000
WAIT_S = 30


def hub(signals=None, **settings):
    values = {"coalesce_ms": 0, "tick_ms": LONG_MS, "heartbeat_ms": LONG_MS, **settings}
    return Hub(LiveUpdates(**values), lambda: signals)


def events(chunks, count):
    """The names of the next events of a stream, without its signs of life."""
    found = []
    for chunk in chunks:
        if chunk.startswith(b"event: queue_activity\ndata: "):
            found.append(json.loads(chunk.partition(b"data: ")[2])["queues"])
            if len(found) == count:
                break
    return found


class Signals:
    """Wake-ups that a test gives."""

    def __init__(self):
        self.names = []
        self._given = threading.Condition()

    def give(self, *names):
        with self._given:
            self.names += names
            self._given.notify_all()

    def wait_wakeup(self, queues, timeout_ms):
        with self._given:
            self._given.wait_for(lambda: self.names, timeout_ms / 1000)
            return self.names.pop(0) if self.names else None

    def close(self):
        pass


def test_a_stream_begins_with_how_soon_to_come_back():
    looked_at = hub()
    stream = looked_at.open()
    assert next(stream) == b"retry: 2000\n\n"
    looked_at.close()


def test_names_of_a_burst_are_one_event():
    looked_at = hub(coalesce_ms=200)
    stream = looked_at.open()
    threading.Timer(0.01, lambda: looked_at.publish(["r"])).start()
    looked_at.publish(["q"])
    assert events(stream, 1) == [["q", "r"]]
    looked_at.close()


def test_signals_of_the_store_reach_every_stream():
    signals = Signals()
    looked_at = hub(signals)
    streams = [looked_at.open(), looked_at.open()]
    signals.give("q")
    assert [events(stream, 1) for stream in streams] == [[["q"]], [["q"]]]
    looked_at.close()


def test_lost_signals_mean_everything():
    signals = Signals()
    looked_at = hub(signals)
    stream = looked_at.open()
    signals.give("")
    assert events(stream, 1) == [["*"]]
    looked_at.close()


def test_a_slow_client_is_told_to_look_at_everything():
    looked_at = hub()
    stream = looked_at.open()
    looked_at.publish([f"q{number}" for number in range(MAX_NAMES)])
    assert len(events(stream, 1)[0]) == MAX_NAMES
    looked_at.publish([f"q{number}" for number in range(MAX_NAMES + 1)])
    looked_at.publish(["another"])
    assert events(stream, 1) == [["*"]]
    looked_at.close()


def test_without_signals_everybody_looks_now_and_then():
    looked_at = hub(tick_ms=100)
    assert events(looked_at.open(), 2) == [["*"], ["*"]]
    looked_at.close()


def test_silence_is_broken_by_a_sign_of_life():
    looked_at = hub(heartbeat_ms=10)
    stream = looked_at.open()
    next(stream)
    assert next(stream) == b": hb\n\n"
    looked_at.close()


def test_a_stream_may_be_silent_for_longer_than_a_system_can_wait():
    looked_at = hub(max_life_ms=MAX_RELATIVE_MS, heartbeat_ms=MAX_RELATIVE_MS)
    stream = looked_at.open()
    next(stream)
    later = threading.Timer(0.1, looked_at.publish, [["q"]])
    later.start()
    assert events(stream, 1) == [["q"]]
    later.join(WAIT_S)
    looked_at.close()


def test_a_stream_ends_when_its_time_is_over():
    looked_at = hub(max_life_ms=30, heartbeat_ms=10, max_streams=1)
    chunks = list(looked_at.open())
    assert chunks[0].startswith(b"retry")
    assert set(chunks[1:]) <= {b": hb\n\n"}
    assert looked_at.open() is not None
    looked_at.close()


def test_there_is_room_for_so_many_streams_and_a_closed_one_makes_room():
    looked_at = hub(max_streams=2)
    first, second = looked_at.open(), looked_at.open()
    assert looked_at.open() is None
    first.close()  # before anything was sent
    third = looked_at.open()
    assert third is not None
    next(second)
    second.close()
    second.close()
    assert looked_at.open() is not None
    assert looked_at.open() is None
    looked_at.close()


def test_a_stream_that_the_server_forgot_makes_room_when_its_time_is_over():
    now = [0.0]
    settings = LiveUpdates(max_streams=1, max_life_ms=1_000)
    looked_at = Hub(settings, lambda: None, now_s=lambda: now[0])
    assert looked_at.open() is not None
    assert looked_at.open() is None
    now[0] = 1.1
    assert looked_at.open() is not None
    looked_at.close()


def test_an_end_wakes_every_stream():
    looked_at = hub()
    stream = looked_at.open()
    next(stream)
    ended = []
    thread = threading.Thread(target=lambda: ended.extend(stream))
    thread.start()
    looked_at.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert ended == []


def test_a_poll_tells_what_came_since():
    looked_at = hub()
    seq, names = looked_at.poll(None)
    assert names == ["*"]
    assert looked_at.poll(seq) == (seq, [])
    looked_at.publish(["q", "r", "q"])
    later, names = looked_at.poll(seq)
    assert (later, names) == (seq + 3, ["q", "r"])
    assert looked_at.poll(seq + 2) == (later, ["q"])
    assert looked_at.poll(later) == (later, [])
    looked_at.close()


def test_a_poll_from_too_far_back_or_of_another_process_means_everything():
    looked_at = hub()
    seq, _ = looked_at.poll(None)
    for number in range(REMEMBERED + 1):
        looked_at.publish([str(number)])
    now, names = looked_at.poll(seq)
    assert names == ["*"]
    assert looked_at.poll(now + 1)[1] == ["*"]
    assert looked_at.poll(0)[1] == ["*"]
    assert looked_at.poll(-1)[1] == ["*"]
    assert len(looked_at.poll(now - REMEMBERED)[1]) == REMEMBERED
    assert now < 2**53
    looked_at.close()


def test_everything_hides_single_names():
    looked_at = hub()
    seq, _ = looked_at.poll(None)
    looked_at.publish(["q", "*", "r"])
    assert looked_at.poll(seq)[1] == ["*"]
    looked_at.close()


# Over HTTP


def test_the_ninth_stream_is_sent_away(store):
    api = caller(store)
    streams = [api.get("/events") for _ in range(8)]
    assert {stream.status_code for stream in streams} == {200}
    assert streams[0].headers["Content-Type"] == "text/event-stream"
    assert streams[0].headers["X-Accel-Buffering"] == "no"
    ninth = api.get("/events")
    assert ninth.status_code == 503
    assert ninth.headers["Retry-After"] == "15"
    assert api.get("/events/poll").status_code == 200
    streams[0].close()
    assert api.get("/events").status_code == 200
    api.app.close()


def test_head_opens_no_stream(store):
    api = caller(store, live=LiveUpdates(max_streams=1))
    for _ in range(3):
        assert api.send("HEAD", "/events").status_code == 200
    assert api.get("/events").status_code == 200
    api.app.close()


def test_what_is_done_over_http_is_told_to_whoever_looks(store):
    api = caller(store, live=LiveUpdates(tick_ms=LONG_MS))
    seq = api.get("/events/poll").json["seq"]
    api.post("/jobs", job_body(queue="one"))
    api.post("/queues/two/pause")
    found = api.get(f"/events/poll?since={seq}").json
    assert found["queues"] == ["one", "two"]
    assert api.get("/events/poll?since=x").status_code == 400
    api.app.close()


def test_enqueues_of_others_are_one_event_with_both_names(pool, database_url, postgres):
    postgres.reset()
    store = PgStore(pool, listen=database_url)
    looked_at = Caller(caller(store, live=LiveUpdates(tick_ms=LONG_MS)).app)
    stream = looked_at.get("/events")
    chunks = stream.iter_encoded()
    assert next(chunks).startswith(b"retry")
    # Until the connection listens, everything may have been missed.
    assert events(chunks, 1) == [["*"]]
    for queue in ("q", "r"):  # a signal is given where a worker sleeps
        request = AdmitRequest(worker="w", lease_id="l", queues=(queue,), capacity=1,
            lease_ms=1000)  # fmt: skip
        assert not store.admit(request).claims
        enqueue(store, queue, queue=queue)
    assert events(chunks, 1) == [["q", "r"]]
    stream.close()
    looked_at.app.close()
    store.close()


@pytest.mark.parametrize("count", [0, 1])
def test_streaming_may_be_switched_off(store, count):
    api = caller(store, live=LiveUpdates(max_streams=count))
    answer = api.get("/events")
    assert answer.status_code == (200 if count else 503)
    api.app.close()
