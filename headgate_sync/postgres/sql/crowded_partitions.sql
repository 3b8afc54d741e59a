-- Partitions with work of many rate classes, the most first.
-- Arguments: most, max_rows, max_lanes integer: classes that are no crowd; rows to answer; lanes of a queue to look at.
-- Rows:      queue, partition key, classes with waiting jobs.
-- Locks:     none.
SELECT crowded.queue, crowded.partition_key, crowded.classes
FROM (
  -- Only a queue that has met so many classes can have a partition with as many.
  SELECT lane_group.queue
  FROM {schema}.headgate_lane_group AS lane_group
  GROUP BY lane_group.queue
  HAVING count(DISTINCT lane_group.rate_class) > %(most)s::integer
) AS wide
CROSS JOIN LATERAL (
  SELECT lane.queue, lane.partition_key, count(DISTINCT lane.rate_class)::integer AS classes
  FROM (
    SELECT known.queue, known.partition_key, known.rate_class, known.active
    FROM {schema}.headgate_lane AS known
    WHERE known.queue = wide.queue
    ORDER BY known.partition_key, known.rate_class
    LIMIT %(max_lanes)s::integer
  ) AS lane
  WHERE lane.active
  GROUP BY lane.queue, lane.partition_key
  HAVING count(DISTINCT lane.rate_class) > %(most)s::integer
) AS crowded
ORDER BY crowded.classes DESC, crowded.queue, crowded.partition_key
LIMIT %(max_rows)s::integer
