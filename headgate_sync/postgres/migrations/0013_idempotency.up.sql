-- Online-safe: adds a table.
--
-- Answers of the control API under the caller's keys. A row without a status is a request that is running, or was cut off.
CREATE TABLE {schema}.headgate_idempotency (
  route text COLLATE "C" NOT NULL,
  key text COLLATE "C" NOT NULL,
  request_sha256 text COLLATE "C" NOT NULL,
  status integer,
  headers text COLLATE "C",
  body bytea,
  created_at_ms bigint NOT NULL,
  claimed_at_ms bigint NOT NULL,
  expires_at_ms bigint NOT NULL,
  PRIMARY KEY (route, key)
);
CREATE INDEX headgate_idempotency_lapsing ON {schema}.headgate_idempotency (expires_at_ms);
