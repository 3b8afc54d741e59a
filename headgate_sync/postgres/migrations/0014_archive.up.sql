-- Online-safe: adds tables and functions.
--
-- The cold archive, and the two sweeps that fill it: before jobs of a queue with a policy are deleted because of their age,
-- they are copied, in the same transaction.
--
-- Locks are taken in this order: job rows, skipping what is locked; the table of policies, shared by sweeps; the partition
-- of the month, by the copy. A change of a policy takes the second alone, pruning the third alone.

-- How long copies of a queue's jobs are kept.
--
-- lock_right: always null; see headgate_enqueue_policy.
CREATE TABLE {schema}.headgate_archive_policy (
  queue text COLLATE "C" PRIMARY KEY,
  retention_ms bigint NOT NULL CHECK (retention_ms >= 1),
  lock_right boolean CHECK (lock_right IS NULL)
);

-- Copies of deleted jobs. No call of the store reads them, they hold no id, and no later policy changes how long they stay.
CREATE TABLE {schema}.headgate_job_archive (
  evicted_at_ms bigint NOT NULL,
  finalized_at_ms bigint NOT NULL,
  archive_retention_ms bigint NOT NULL,
  attempt integer NOT NULL,
  crash_attempt integer NOT NULL,
  id text COLLATE "C" NOT NULL,
  kind text COLLATE "C" NOT NULL,
  queue text COLLATE "C" NOT NULL,
  state text COLLATE "C" NOT NULL,
  fingerprint text COLLATE "C" NOT NULL,
  payload bytea NOT NULL,
  errors jsonb NOT NULL,
  PRIMARY KEY (evicted_at_ms, id)
) PARTITION BY RANGE (evicted_at_ms);

-- A partition for each month (UTC) of seven years and one on either side, all of them now: nobody has a right to create
-- tables at run time.
CREATE TABLE {schema}.headgate_job_archive_before_2025 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (MINVALUE) TO (1735689600000);
CREATE TABLE {schema}.headgate_job_archive_202501 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1735689600000) TO (1738368000000);
CREATE TABLE {schema}.headgate_job_archive_202502 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1738368000000) TO (1740787200000);
CREATE TABLE {schema}.headgate_job_archive_202503 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1740787200000) TO (1743465600000);
CREATE TABLE {schema}.headgate_job_archive_202504 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1743465600000) TO (1746057600000);
CREATE TABLE {schema}.headgate_job_archive_202505 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1746057600000) TO (1748736000000);
CREATE TABLE {schema}.headgate_job_archive_202506 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1748736000000) TO (1751328000000);
CREATE TABLE {schema}.headgate_job_archive_202507 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1751328000000) TO (1754006400000);
CREATE TABLE {schema}.headgate_job_archive_202508 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1754006400000) TO (1756684800000);
CREATE TABLE {schema}.headgate_job_archive_202509 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1756684800000) TO (1759276800000);
CREATE TABLE {schema}.headgate_job_archive_202510 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1759276800000) TO (1761955200000);
CREATE TABLE {schema}.headgate_job_archive_202511 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1761955200000) TO (1764547200000);
CREATE TABLE {schema}.headgate_job_archive_202512 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1764547200000) TO (1767225600000);
CREATE TABLE {schema}.headgate_job_archive_202601 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1767225600000) TO (1769904000000);
CREATE TABLE {schema}.headgate_job_archive_202602 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1769904000000) TO (1772323200000);
CREATE TABLE {schema}.headgate_job_archive_202603 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1772323200000) TO (1775001600000);
CREATE TABLE {schema}.headgate_job_archive_202604 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1775001600000) TO (1777593600000);
CREATE TABLE {schema}.headgate_job_archive_202605 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1777593600000) TO (1780272000000);
CREATE TABLE {schema}.headgate_job_archive_202606 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1780272000000) TO (1782864000000);
CREATE TABLE {schema}.headgate_job_archive_202607 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1782864000000) TO (1785542400000);
CREATE TABLE {schema}.headgate_job_archive_202608 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1785542400000) TO (1788220800000);
CREATE TABLE {schema}.headgate_job_archive_202609 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1788220800000) TO (1790812800000);
CREATE TABLE {schema}.headgate_job_archive_202610 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1790812800000) TO (1793491200000);
CREATE TABLE {schema}.headgate_job_archive_202611 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1793491200000) TO (1796083200000);
CREATE TABLE {schema}.headgate_job_archive_202612 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1796083200000) TO (1798761600000);
CREATE TABLE {schema}.headgate_job_archive_202701 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1798761600000) TO (1801440000000);
CREATE TABLE {schema}.headgate_job_archive_202702 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1801440000000) TO (1803859200000);
CREATE TABLE {schema}.headgate_job_archive_202703 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1803859200000) TO (1806537600000);
CREATE TABLE {schema}.headgate_job_archive_202704 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1806537600000) TO (1809129600000);
CREATE TABLE {schema}.headgate_job_archive_202705 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1809129600000) TO (1811808000000);
CREATE TABLE {schema}.headgate_job_archive_202706 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1811808000000) TO (1814400000000);
CREATE TABLE {schema}.headgate_job_archive_202707 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1814400000000) TO (1817078400000);
CREATE TABLE {schema}.headgate_job_archive_202708 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1817078400000) TO (1819756800000);
CREATE TABLE {schema}.headgate_job_archive_202709 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1819756800000) TO (1822348800000);
CREATE TABLE {schema}.headgate_job_archive_202710 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1822348800000) TO (1825027200000);
CREATE TABLE {schema}.headgate_job_archive_202711 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1825027200000) TO (1827619200000);
CREATE TABLE {schema}.headgate_job_archive_202712 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1827619200000) TO (1830297600000);
CREATE TABLE {schema}.headgate_job_archive_202801 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1830297600000) TO (1832976000000);
CREATE TABLE {schema}.headgate_job_archive_202802 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1832976000000) TO (1835481600000);
CREATE TABLE {schema}.headgate_job_archive_202803 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1835481600000) TO (1838160000000);
CREATE TABLE {schema}.headgate_job_archive_202804 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1838160000000) TO (1840752000000);
CREATE TABLE {schema}.headgate_job_archive_202805 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1840752000000) TO (1843430400000);
CREATE TABLE {schema}.headgate_job_archive_202806 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1843430400000) TO (1846022400000);
CREATE TABLE {schema}.headgate_job_archive_202807 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1846022400000) TO (1848700800000);
CREATE TABLE {schema}.headgate_job_archive_202808 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1848700800000) TO (1851379200000);
CREATE TABLE {schema}.headgate_job_archive_202809 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1851379200000) TO (1853971200000);
CREATE TABLE {schema}.headgate_job_archive_202810 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1853971200000) TO (1856649600000);
CREATE TABLE {schema}.headgate_job_archive_202811 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1856649600000) TO (1859241600000);
CREATE TABLE {schema}.headgate_job_archive_202812 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1859241600000) TO (1861920000000);
CREATE TABLE {schema}.headgate_job_archive_202901 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1861920000000) TO (1864598400000);
CREATE TABLE {schema}.headgate_job_archive_202902 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1864598400000) TO (1867017600000);
CREATE TABLE {schema}.headgate_job_archive_202903 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1867017600000) TO (1869696000000);
CREATE TABLE {schema}.headgate_job_archive_202904 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1869696000000) TO (1872288000000);
CREATE TABLE {schema}.headgate_job_archive_202905 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1872288000000) TO (1874966400000);
CREATE TABLE {schema}.headgate_job_archive_202906 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1874966400000) TO (1877558400000);
CREATE TABLE {schema}.headgate_job_archive_202907 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1877558400000) TO (1880236800000);
CREATE TABLE {schema}.headgate_job_archive_202908 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1880236800000) TO (1882915200000);
CREATE TABLE {schema}.headgate_job_archive_202909 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1882915200000) TO (1885507200000);
CREATE TABLE {schema}.headgate_job_archive_202910 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1885507200000) TO (1888185600000);
CREATE TABLE {schema}.headgate_job_archive_202911 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1888185600000) TO (1890777600000);
CREATE TABLE {schema}.headgate_job_archive_202912 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1890777600000) TO (1893456000000);
CREATE TABLE {schema}.headgate_job_archive_203001 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1893456000000) TO (1896134400000);
CREATE TABLE {schema}.headgate_job_archive_203002 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1896134400000) TO (1898553600000);
CREATE TABLE {schema}.headgate_job_archive_203003 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1898553600000) TO (1901232000000);
CREATE TABLE {schema}.headgate_job_archive_203004 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1901232000000) TO (1903824000000);
CREATE TABLE {schema}.headgate_job_archive_203005 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1903824000000) TO (1906502400000);
CREATE TABLE {schema}.headgate_job_archive_203006 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1906502400000) TO (1909094400000);
CREATE TABLE {schema}.headgate_job_archive_203007 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1909094400000) TO (1911772800000);
CREATE TABLE {schema}.headgate_job_archive_203008 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1911772800000) TO (1914451200000);
CREATE TABLE {schema}.headgate_job_archive_203009 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1914451200000) TO (1917043200000);
CREATE TABLE {schema}.headgate_job_archive_203010 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1917043200000) TO (1919721600000);
CREATE TABLE {schema}.headgate_job_archive_203011 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1919721600000) TO (1922313600000);
CREATE TABLE {schema}.headgate_job_archive_203012 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1922313600000) TO (1924992000000);
CREATE TABLE {schema}.headgate_job_archive_203101 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1924992000000) TO (1927670400000);
CREATE TABLE {schema}.headgate_job_archive_203102 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1927670400000) TO (1930089600000);
CREATE TABLE {schema}.headgate_job_archive_203103 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1930089600000) TO (1932768000000);
CREATE TABLE {schema}.headgate_job_archive_203104 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1932768000000) TO (1935360000000);
CREATE TABLE {schema}.headgate_job_archive_203105 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1935360000000) TO (1938038400000);
CREATE TABLE {schema}.headgate_job_archive_203106 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1938038400000) TO (1940630400000);
CREATE TABLE {schema}.headgate_job_archive_203107 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1940630400000) TO (1943308800000);
CREATE TABLE {schema}.headgate_job_archive_203108 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1943308800000) TO (1945987200000);
CREATE TABLE {schema}.headgate_job_archive_203109 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1945987200000) TO (1948579200000);
CREATE TABLE {schema}.headgate_job_archive_203110 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1948579200000) TO (1951257600000);
CREATE TABLE {schema}.headgate_job_archive_203111 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1951257600000) TO (1953849600000);
CREATE TABLE {schema}.headgate_job_archive_203112 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1953849600000) TO (1956528000000);
CREATE TABLE {schema}.headgate_job_archive_after_2031 PARTITION OF {schema}.headgate_job_archive
  FOR VALUES FROM (1956528000000) TO (MAXVALUE);

-- Keep copies of the jobs of a queue from now on, or, without a retention, none.
--
-- Locks: the table of policies, against sweeps: what is answered holds for every job that is deleted afterwards.
-- Fails: lock_not_available, when a sweep takes longer than the given time.
CREATE FUNCTION {schema}.headgate_set_archive_policy(p_queue text, p_retention_ms bigint, p_lock_wait_ms integer)
  RETURNS void
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET lock_timeout = 0
  AS $$
BEGIN
  PERFORM set_config('lock_timeout', p_lock_wait_ms::text, true);
  LOCK TABLE {schema}.headgate_archive_policy IN EXCLUSIVE MODE;
  IF p_retention_ms IS NULL THEN
    DELETE FROM {schema}.headgate_archive_policy AS policy WHERE policy.queue = p_queue;
  ELSE
    INSERT INTO {schema}.headgate_archive_policy AS policy (queue, retention_ms)
    VALUES (p_queue, p_retention_ms)
    ON CONFLICT (queue) DO UPDATE SET retention_ms = excluded.retention_ms;
  END IF;
END $$;

-- Copy jobs that are about to be deleted, as far as their queues have a policy.
--
-- Arguments: the rows, which the caller has locked and deletes in this transaction; their queues, with repeats; the instant.
-- Locks:     the policies, shared, until the end of the transaction. Reading them is all that is done without one.
-- Fails:     serialization_failure, when a job of the same id was archived at this very instant.
CREATE FUNCTION {schema}.headgate_archive_jobs(p_tids tid[], p_queues text[], p_now bigint) RETURNS void
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
BEGIN
  PERFORM
  FROM {schema}.headgate_archive_policy AS policy
  WHERE policy.queue = ANY (p_queues)
  ORDER BY policy.queue
  FOR SHARE;
  IF NOT FOUND THEN
    RETURN;
  END IF;
  BEGIN
    INSERT INTO {schema}.headgate_job_archive (
      evicted_at_ms, finalized_at_ms, archive_retention_ms, attempt, crash_attempt,
      id, kind, queue, state, fingerprint, payload, errors)
    SELECT p_now, job.finalized_at_ms, kept.retention_ms, job.attempt, job.crash_attempt,
      job.id, job.kind, job.queue, job.state, job.fingerprint, job.payload, job.errors
    FROM {schema}.headgate_job AS job
    CROSS JOIN LATERAL (
      SELECT policy.retention_ms
      FROM {schema}.headgate_archive_policy AS policy
      WHERE policy.queue = job.queue
      LIMIT 1
    ) AS kept
    WHERE job.ctid = ANY (p_tids);
  EXCEPTION WHEN unique_violation THEN
    RAISE serialization_failure USING MESSAGE = 'a job of the same id was archived in this millisecond';
  END;
END $$;

-- Delete finished jobs past their retention, the longest overdue first.
--
-- Arguments: limit.
-- Returns:   how many.
-- Locks:     the job rows, skipping what is locked; then as the archive does.
CREATE FUNCTION {schema}.headgate_evict(p_limit integer) RETURNS integer
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  SET enable_sort = off  -- so that what is looked at comes in the order of its index, and stops at the limit
  AS $$
DECLARE
  v_now bigint := {schema}.headgate_now_ms();
  v_tids tid[];
  v_seqs bigint[];
  v_queues text[];
BEGIN
  SELECT array_agg(lapsed.tid), array_agg(lapsed.seq), array_agg(lapsed.queue)
  INTO v_tids, v_seqs, v_queues
  FROM (
    SELECT job.ctid AS tid, job.seq, job.queue
    FROM {schema}.headgate_job AS job
    WHERE job.retention_ms > 0 AND job.state IN ('completed', 'archived', 'cancelled', 'undecodable')
      AND job.finalized_at_ms + job.retention_ms <= v_now
    ORDER BY job.finalized_at_ms + job.retention_ms, job.seq
    LIMIT p_limit
    FOR UPDATE SKIP LOCKED
  ) AS lapsed;
  IF v_tids IS NULL THEN
    RETURN 0;
  END IF;
  PERFORM {schema}.headgate_archive_jobs(v_tids, v_queues, v_now);
  DELETE FROM {schema}.headgate_job AS job WHERE job.ctid = ANY (v_tids);
  DELETE FROM {schema}.headgate_job_tag AS tag WHERE tag.job_seq = ANY (v_seqs);
  RETURN cardinality(v_tids);
END $$;

-- Delete finished jobs that ended before an instant, the earliest first.
--
-- Arguments: terminal states; the instant; limit; whether the archive gets copies.
-- Returns:   how many.
-- Locks:     the job rows, skipping what is locked; then as the archive does.
CREATE FUNCTION {schema}.headgate_delete_ended(
  p_states text[], p_before_ms bigint, p_limit integer, p_is_archived boolean)
  RETURNS integer
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan
  AS $$
DECLARE
  v_tids tid[];
  v_queues text[];
BEGIN
  SELECT array_agg(ended.tid), array_agg(ended.queue) INTO v_tids, v_queues
  FROM (
    SELECT found.tid, found.queue
    FROM unnest(p_states) AS wanted (state)
    CROSS JOIN unnest(ARRAY[false, true]) AS history (is_kept)
    CROSS JOIN LATERAL (
      SELECT job.ctid AS tid, job.queue, job.finalized_at_ms, job.seq
      FROM {schema}.headgate_job AS job
      WHERE job.state = wanted.state AND (job.errors <> '[]') = history.is_kept AND job.finalized_at_ms < p_before_ms
      ORDER BY job.finalized_at_ms, job.seq
      LIMIT p_limit
      FOR UPDATE SKIP LOCKED
    ) AS found
    ORDER BY found.finalized_at_ms, found.seq
    LIMIT p_limit
  ) AS ended;
  IF v_tids IS NULL THEN
    RETURN 0;
  END IF;
  IF p_is_archived THEN
    PERFORM {schema}.headgate_archive_jobs(v_tids, v_queues, {schema}.headgate_now_ms());
  END IF;
  PERFORM {schema}.headgate_touch_jobs('delete', v_tids);
  RETURN cardinality(v_tids);
END $$;

-- Empty a month of the archive once it has ended and nothing in it is to be kept any longer.
--
-- Arguments: the month as YYYYMM; how long to wait for a lock.
-- Returns:   how many rows it held, null when nothing was done; the instant before which nothing can be, where there is one.
-- Locks:     the partition: writers are kept out while its rows are judged, readers only while it is emptied. A copy that
--            was on its way into a month that has just ended is waited for, or comes into the month that is empty then.
-- Fails:     lock_not_available, when somebody holds the partition for longer than the given time.
CREATE FUNCTION {schema}.headgate_prune_archive(
  p_month text, p_lock_wait_ms integer, OUT pruned bigint, OUT not_before_ms bigint)
  LANGUAGE plpgsql VOLATILE
  SET search_path = pg_catalog, pg_temp
  SET lock_timeout = 0
  SET jit = off
  AS $$
DECLARE
  v_partition regclass;
  v_rows bigint;
BEGIN
  SELECT link.inhrelid INTO STRICT v_partition
  FROM pg_class AS parent
  JOIN pg_inherits AS link ON link.inhparent = parent.oid
  JOIN pg_class AS child ON child.oid = link.inhrelid
  WHERE parent.reltype = pg_typeof(NULL::{schema}.headgate_job_archive)::oid
    AND child.relname = 'headgate_job_archive_' || p_month;
  not_before_ms := (extract(epoch FROM to_date(p_month, 'YYYYMM') + interval '1 month') * 1000)::bigint;
  IF not_before_ms > {schema}.headgate_now_ms() THEN
    RETURN;
  END IF;
  PERFORM set_config('lock_timeout', p_lock_wait_ms::text, true);
  EXECUTE 'LOCK TABLE ' || v_partition || ' IN EXCLUSIVE MODE';
  EXECUTE 'SELECT count(*), max(kept.evicted_at_ms + kept.archive_retention_ms) FROM ' || v_partition || ' AS kept'
  INTO v_rows, not_before_ms;
  IF not_before_ms > {schema}.headgate_now_ms() THEN
    RETURN;
  END IF;
  EXECUTE 'TRUNCATE TABLE ' || v_partition;
  pruned := v_rows;
END $$;
