-- Made by whiten-index. Run it as a whole; it may be run again:
--   psql -v ON_ERROR_STOP=1 -f FILE
-- query digest a5d28296a0fdf6d984434ff023b58ec8; whitening 16 -> 4, by cosine; encoder column embedding d6c3499a35c7c2ca52c7520974c44784; index version 000001-6d3df42da552
BEGIN;
SET LOCAL standard_conforming_strings = on;
CREATE EXTENSION IF NOT EXISTS vector SCHEMA public;
-- The function keeps this path, and so finds pgvector from everywhere.
SELECT pg_catalog.set_config('search_path', pg_catalog.quote_ident(n.nspname), true)
  FROM pg_catalog.pg_extension e JOIN pg_catalog.pg_namespace n ON n.oid = e.extnamespace
  WHERE e.extname = 'vector';
DO $whiten_a5d28296a0fdf6d984434ff023b58ec8$
DECLARE
  made regprocedure := to_regprocedure('"public"."whiten"(vector)');
BEGIN
  IF made IS NOT NULL
      AND starts_with(pg_catalog.obj_description(made, 'pg_proc'), 'whiten-index: ') IS NOT TRUE THEN
    RAISE EXCEPTION 'there is a function % already, and whiten-index did not make it as it is', made
      USING ERRCODE = 'duplicate_function',
      HINT = 'Export again with another --name, or DROP FUNCTION ' || made || ';';
  END IF;
END
$whiten_a5d28296a0fdf6d984434ff023b58ec8$;
CREATE OR REPLACE FUNCTION "public"."whiten"(embedding vector) RETURNS vector
  LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE COST 4 SET search_path FROM CURRENT AS $whiten_a5d28296a0fdf6d984434ff023b58ec8$
BEGIN
  IF vector_dims(embedding) <> 16 THEN
    RAISE EXCEPTION 'raw embeddings have 16 numbers here; this one has %',
      vector_dims(embedding) USING ERRCODE = 'data_exception';
  END IF;
  embedding := embedding - '[-0.19920927,0.11080813,-1.3257747,0.37195155,0.21816163,-0.42397934,0.17024204,0.06537987,-0.48425722,0.70069957,0.08368435,-0.47671396,1.1104456,-0.007941207,-0.4003371,0.4008663]'::vector;
  embedding := embedding - '[1.5456074e-09,-2.5875246e-09,-2.5831785e-08,-3.928629e-09,-3.0869463e-09,-1.4528632e-09,-4.7637148e-09,-1.8658466e-09,-5.740828e-09,-4.7342232e-09,-2.044253e-09,-1.3703636e-08,-2.7893112e-09,2.9259048e-10,1.3164329e-08,4.3120236e-09]'::vector;
  RETURN l2_normalize(ARRAY[
    -(embedding <#> '[-0.15570714,0.2343508,0.35138735,-0.09756103,0.7177079,-0.05878086,0.05632205,-0.09156087,-0.1468754,-0.15748884,0.07169142,-0.14489584,0.21783286,0.311932,0.18482675,0.13180007]'::vector),
    -(embedding <#> '[-0.02192195,-0.26989084,-0.106115334,-0.2935543,-0.19592318,-0.43654275,0.44099683,-0.07575234,-0.09724452,0.030899022,0.2861317,-0.3673263,0.38986507,-0.08675327,0.26763347,-0.29452658]'::vector),
    -(embedding <#> '[0.54284424,-0.06422482,0.05530442,0.004813417,0.086431034,-0.022556359,0.029449677,-0.15765287,0.24433905,0.34179184,-0.12369943,-0.4482605,-0.13606623,0.50758785,-0.35966608,-0.2080713]'::vector),
    -(embedding <#> '[-0.16334607,0.48849633,0.64101565,-0.1486531,-0.4530037,-0.13040657,-0.12666945,0.31771547,0.14394191,0.09040716,0.19898681,-0.2552734,-0.030160462,-0.049283486,-0.13166234,0.033581145]'::vector)
  ]::vector)::vector;
END
$whiten_a5d28296a0fdf6d984434ff023b58ec8$;
COMMENT ON FUNCTION "public"."whiten"(vector) IS 'whiten-index: query digest a5d28296a0fdf6d984434ff023b58ec8; whitening 16 -> 4, by cosine; encoder column embedding d6c3499a35c7c2ca52c7520974c44784; index version 000001-6d3df42da552';
COMMIT;
-- BLAKE2b of the lines above: b2ef1ef30beb7d0a8d4df911e20a9480ef3b4d794eae19aa5226ed4e56cf3a23664af4fca1d143482b286c577ad1c2087f3e56bf9f8de2d715ce08737afcd6ec
