{mark} Run it as a whole; it may be run again:
--   {run} FILE
-- {facts}
BEGIN;
SET LOCAL standard_conforming_strings = on;
CREATE EXTENSION IF NOT EXISTS vector SCHEMA public;
-- The function keeps this path, and so finds pgvector from everywhere.
SELECT pg_catalog.set_config('search_path', pg_catalog.quote_ident(n.nspname), true)
  FROM pg_catalog.pg_extension e JOIN pg_catalog.pg_namespace n ON n.oid = e.extnamespace
  WHERE e.extname = 'vector';
DO {tag}
DECLARE
  made regprocedure := to_regprocedure({signature});
BEGIN
  IF made IS NOT NULL
      AND starts_with(pg_catalog.obj_description(made, 'pg_proc'), {ours}) IS NOT TRUE THEN
    RAISE EXCEPTION 'there is a function % already, and whiten-index did not make it as it is', made
      USING ERRCODE = 'duplicate_function',
      HINT = 'Export again with another --name, or DROP FUNCTION ' || made || ';';
  END IF;
END
{tag};
CREATE OR REPLACE FUNCTION {name}(embedding vector) RETURNS {type}
  LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE COST {cost} SET search_path FROM CURRENT AS {tag}
BEGIN
  IF vector_dims(embedding) <> {dim} THEN
    RAISE EXCEPTION 'raw embeddings have {dim} numbers here; this one has %',
      vector_dims(embedding) USING ERRCODE = 'data_exception';
  END IF;
{steps}
  RETURN {scaled}(ARRAY[
    {terms}
  ]::vector)::{type};
END
{tag};
COMMENT ON FUNCTION {name}(vector) IS {comment};
COMMIT;
