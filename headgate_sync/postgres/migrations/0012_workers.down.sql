DROP TABLE {schema}.headgate_worker;
