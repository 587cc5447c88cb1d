-- DuckDB. The table directions has a row for each of the k numbers:
--   place INTEGER, direction DOUBLE[] (d numbers, a column of the matrix), bias DOUBLE
CREATE OR REPLACE MACRO unit(x) AS
    list_transform(x, lambda number: number / greatest(sqrt(list_inner_product(x, x)), 1e-300));

-- Of a raw embedding DOUBLE[]. Where normalize_input is true, give unit(embedding); where the
-- similarity is dot, select y itself.
CREATE OR REPLACE MACRO whiten(embedding) AS (
    SELECT unit(y) FROM (
        SELECT list(list_inner_product(embedding, direction) + bias ORDER BY place) AS y
        FROM directions
    )
);
