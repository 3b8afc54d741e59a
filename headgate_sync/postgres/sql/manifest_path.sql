-- Let the server leave out the name of a schema where it writes definitions, until the end of the transaction.
-- Arguments: quoted_name text.
-- Rows:      one, of no meaning.
-- Locks:     none.
SELECT set_config('search_path', %(quoted_name)s || ', pg_temp', true)
