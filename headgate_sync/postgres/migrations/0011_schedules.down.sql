-- Schedules are lost; jobs that they made stay.
DROP TABLE {schema}.headgate_schedule_event;
DROP TABLE {schema}.headgate_schedule;
