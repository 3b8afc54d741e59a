-- All rate classes with their budgets, refilled up to now without writing.
-- Arguments: max_waiting integer, how far waiting jobs are counted.
-- Rows:      per budget the class (name, paused, paused until, reason, waiting jobs), then slot, limit, window, burst, units; a class
--            without budgets has one row with nulls.
-- Locks:     none.
SELECT class.name, class.paused, class.paused_until_ms, class.pause_reason, waiting.jobs,
  budget.slot, budget.limit_tokens, budget.window_ms, budget.burst,
  {schema}.headgate_units_at(
    budget.units, budget.limit_tokens, budget.window_ms, budget.burst, budget.refilled_at_ms, clock.now_ms) AS units
FROM (SELECT {schema}.headgate_now_ms() AS now_ms) AS clock
CROSS JOIN {schema}.headgate_rate_class AS class
CROSS JOIN LATERAL (
  SELECT count(*) AS jobs
  FROM (
    SELECT
    FROM {schema}.headgate_job AS job
    WHERE job.state = 'available' AND job.rate_class = class.name AND job.rate_class <> ''
    LIMIT %(max_waiting)s::integer
  ) AS sample
) AS waiting
LEFT JOIN {schema}.headgate_budget AS budget ON budget.rate_class = class.name
ORDER BY class.name, budget.slot
