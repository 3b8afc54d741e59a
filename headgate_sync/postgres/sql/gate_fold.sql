-- Take appended rows of the next queue that has any into the gate's counters.
-- Arguments: after text, the queue of the last call; max_rows integer.
-- Rows:      one: the queue, null when there is none behind, and how many rows were taken.
-- Locks:     the queue, unless it is busy; see headgate_gate_fold in 0008_upkeep.
SELECT fold.queue, fold.taken
FROM {schema}.headgate_gate_fold(%(after)s::text, %(max_rows)s::integer) AS fold
