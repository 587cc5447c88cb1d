"""The text of the script that makes the function, with places for what is told of a transform."""

from __future__ import annotations

RUN = "psql -v ON_ERROR_STOP=1 -f"
# What the first lines of a script say, by which it is told from other files.
MADE_BY, HEAD_BYTES = "-- Made by whiten-index.", 2000
# And what the comment of a function begins with.
OURS = "whiten-index: "
SCRIPT = """\
-- {title}
{made_by} Run it as a whole; it may be run again:
--   {run} FILE
-- {facts}
BEGIN;
SET LOCAL standard_conforming_strings = on;
CREATE EXTENSION IF NOT EXISTS vector SCHEMA {home};
DO {tag}
DECLARE
  place regnamespace := to_regnamespace({schema_text});
  made regprocedure;
  seen record;
BEGIN
  SELECT n.nspname AS home,
      string_to_array(substring(e.extversion FROM '^[0-9]+[.][0-9]+'), '.')::int[] AS version
    INTO seen
    FROM pg_catalog.pg_extension e JOIN pg_catalog.pg_namespace n ON n.oid = e.extnamespace
    WHERE e.extname = 'vector';
  IF seen.home <> {home_text} THEN
    RAISE EXCEPTION 'pgvector is in schema %, not in %', seen.home, {home_text}
      USING HINT = 'Export again with --vector-schema and the name of that schema.';
  END IF;
  IF seen.version < ARRAY[0, 7] THEN
    RAISE EXCEPTION 'pgvector is older than 0.7'
      USING HINT = 'ALTER EXTENSION vector UPDATE, or install a later pgvector.';
  END IF;
  IF place IS NULL THEN
    RAISE EXCEPTION 'there is no schema %', {schema_text} USING ERRCODE = 'invalid_schema_name',
      HINT = 'CREATE SCHEMA ' || {schema_text} || '; or export again with --schema and another.';
  END IF;
  IF NOT has_schema_privilege(place, 'CREATE') THEN
    RAISE EXCEPTION 'role % may not make functions in schema %', current_user, place
      USING ERRCODE = 'insufficient_privilege',
      HINT = format('Export again with --schema and a schema of your own, or let its owner run '
        'GRANT CREATE ON SCHEMA %s TO %I;', place, current_user);
  END IF;
  made := to_regprocedure({signature_text});
  SELECT p.prorettype::regtype AS type, p.prorettype = {type_text}::regtype AS same,
      pg_get_userbyid(p.proowner) AS owner, pg_has_role(p.proowner, 'USAGE') AS mine,
      starts_with(obj_description(p.oid, 'pg_proc'), {ours_text}) AS ours
    INTO seen FROM pg_catalog.pg_proc p WHERE p.oid = made;
  IF seen.ours IS NOT TRUE AND made IS NOT NULL THEN
    RAISE EXCEPTION 'there is a function % already, and whiten-index did not make it as it is', made
      USING ERRCODE = 'duplicate_function',
      HINT = 'Export again with another --name, or DROP FUNCTION ' || {signature_text} || ';';
  END IF;
  IF NOT seen.mine THEN
    RAISE EXCEPTION 'function % belongs to role %', made, seen.owner
      USING ERRCODE = 'insufficient_privilege',
      HINT = format('Run this as role %I, or let it run DROP FUNCTION %s; or export again with '
        'another --name.', seen.owner, {signature_text});
  END IF;
  IF NOT seen.same THEN
    RAISE EXCEPTION 'function % returns a % until now, and not a %', made, seen.type, {type_text}
      USING ERRCODE = 'invalid_function_definition',
      HINT = 'DROP FUNCTION ' || {signature_text} || '; and run this again: what uses it must be '
        'dropped as well, and made again. Or export again with another --name or --dtype.';
  END IF;
END
{tag};
CREATE OR REPLACE FUNCTION {name}(embedding {home}.vector) RETURNS {type}
  LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE COST {cost} AS {tag}
BEGIN
  IF {home}.vector_dims(embedding) <> {dim} THEN
    RAISE EXCEPTION 'raw embeddings have {dim} numbers here; this one has %',
      {home}.vector_dims(embedding) USING ERRCODE = 'data_exception';
  END IF;
{steps}
  RETURN {home}.l2_normalize({vector}){cast};
END
{tag};
COMMENT ON FUNCTION {name}({home}.vector) IS {comment};
COMMIT;
"""
