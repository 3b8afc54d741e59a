-- Take in one job that differs from the default job in nothing but these fields.
-- Arguments: as enqueue_one.
-- Rows:      as enqueue_one.
-- Locks:     as headgate_enqueue in 0003_intake.
SELECT {schema}.headgate_enqueue_plain(
  %(id)s::text, %(kind)s::text, %(payload)b::bytea, %(queue)s::text, %(partition_key)s::text,
  %(lane_key)s::bigint, %(fingerprint)s::text, %(own)s::boolean
)
