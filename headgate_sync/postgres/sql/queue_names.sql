-- Name the queues that were ever used or set up, in order.
-- Arguments: after text, max_queues integer.
-- Rows:      queue.
-- Locks:     none.
WITH RECURSIVE tallied AS (
  (SELECT tally.queue, 1 AS place
  FROM {schema}.headgate_tally AS tally
  WHERE tally.queue > %(after)s::text
  ORDER BY tally.queue
  LIMIT 1)
  UNION ALL
  SELECT (
    SELECT tally.queue
    FROM {schema}.headgate_tally AS tally
    WHERE tally.queue > tallied.queue
    ORDER BY tally.queue
    LIMIT 1), tallied.place + 1
  FROM tallied
  WHERE tallied.queue IS NOT NULL AND tallied.place < %(max_queues)s::integer
)
SELECT named.queue
FROM (
  SELECT tallied.queue FROM tallied WHERE tallied.queue IS NOT NULL
  UNION
  (SELECT setting.queue
  FROM {schema}.headgate_queue AS setting
  WHERE setting.queue > %(after)s::text
  ORDER BY setting.queue
  LIMIT %(max_queues)s::integer)
  UNION
  (SELECT policy.queue
  FROM {schema}.headgate_enqueue_policy AS policy
  WHERE policy.queue > %(after)s::text
  ORDER BY policy.queue
  LIMIT %(max_queues)s::integer)
  UNION
  (SELECT depth.queue
  FROM {schema}.headgate_unfinished AS depth
  WHERE depth.queue > %(after)s::text
  ORDER BY depth.queue
  LIMIT %(max_queues)s::integer)
) AS named
ORDER BY named.queue
LIMIT %(max_queues)s::integer
