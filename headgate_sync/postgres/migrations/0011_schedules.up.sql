-- Online-safe: adds tables.
--
-- Schedules and the audit trail of their ticks.
--
-- The database reads no spec: next_run_ms is computed by the library, and whoever moves it on compares it first, so that
-- any number of nodes may try to fire one tick.
CREATE TABLE {schema}.headgate_schedule (
  id text COLLATE "C" PRIMARY KEY,
  kind text COLLATE "C" NOT NULL,
  spec text COLLATE "C" NOT NULL,
  payload bytea NOT NULL,
  schema_version integer NOT NULL,
  queue text COLLATE "C" NOT NULL,
  partition_key text COLLATE "C" NOT NULL,
  rate_class text COLLATE "C" NOT NULL,
  weight integer NOT NULL,
  priority integer NOT NULL,
  max_attempts integer NOT NULL,
  timeout_ms bigint NOT NULL,
  retention_ms bigint NOT NULL,
  headers jsonb NOT NULL,
  tags text[] COLLATE "C" NOT NULL,
  sticky_worker text COLLATE "C" NOT NULL,
  on_missed text COLLATE "C" NOT NULL CHECK (on_missed IN ('skip', 'run_once', 'backfill')),
  backfill_limit integer NOT NULL CHECK (backfill_limit BETWEEN 0 AND 1000),
  next_run_ms bigint NOT NULL CHECK (next_run_ms > 0),
  last_enqueued_ms bigint,
  paused boolean NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX headgate_schedule_due ON {schema}.headgate_schedule (next_run_ms, id) WHERE NOT paused;

-- Outlives the schedule, so there is no foreign key.
CREATE TABLE {schema}.headgate_schedule_event (
  event_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  schedule_id text COLLATE "C" NOT NULL,
  tick_ms bigint NOT NULL,
  job_id text COLLATE "C" NOT NULL,
  outcome text COLLATE "C" NOT NULL CHECK (outcome IN ('enqueued', 'deduplicated', 'failed', 'skipped')),
  reason text COLLATE "C" NOT NULL,
  recorded_at_ms bigint NOT NULL
);
CREATE INDEX headgate_schedule_event_newest ON {schema}.headgate_schedule_event (schedule_id, event_id);
