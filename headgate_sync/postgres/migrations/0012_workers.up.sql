-- Online-safe: adds tables.
--
-- Worker processes that have beaten. One row per worker, written by its own beats and by the operator who signals it;
-- nothing but the primary key is indexed, so that a beat is an update within the page.
CREATE TABLE {schema}.headgate_worker (
  worker_id text COLLATE "C" PRIMARY KEY,
  host text NOT NULL,
  pid integer NOT NULL,
  queues text[] NOT NULL,
  concurrency integer NOT NULL,
  started_at_ms bigint NOT NULL,
  heartbeat_at_ms bigint NOT NULL,
  inflight integer NOT NULL,
  polls integer NOT NULL,
  empty_polls integer NOT NULL,
  status text NOT NULL,
  duties_active boolean NOT NULL,
  beat_ms bigint NOT NULL,
  command text,
  CHECK (status IN ('running', 'quiet', 'restarting', 'terminating')),
  CHECK (command IN ('quiet', 'resume', 'restart', 'terminate', 'resign'))
) WITH (fillfactor = 50);
