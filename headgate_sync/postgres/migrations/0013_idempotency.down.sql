DROP TABLE {schema}.headgate_idempotency;
