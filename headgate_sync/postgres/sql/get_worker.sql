-- One worker, however long it has been silent.
-- Arguments: worker_id text.
-- Rows:      its columns.
-- Locks:     none.
SELECT worker.worker_id, worker.host, worker.pid, worker.queues, worker.concurrency, worker.started_at_ms,
  worker.heartbeat_at_ms, worker.inflight, worker.polls, worker.empty_polls, worker.status, worker.duties_active,
  worker.beat_ms, worker.command
FROM {schema}.headgate_worker AS worker
WHERE worker.worker_id = %(worker_id)s
