SELECT 'column ' || quote_ident(attname) FROM pg_attribute WHERE attrelid = %(old)s::regclass
    AND attnum > 0 AND NOT attisdropped AND attname <> ALL(%(columns)s::text[])
UNION SELECT 'row level security' FROM pg_class WHERE oid = %(old)s::regclass
    AND (relrowsecurity OR relforcerowsecurity)
UNION SELECT 'inheritance of ' || inhparent::regclass FROM pg_inherits
    WHERE inhrelid = %(old)s::regclass
UNION SELECT pg_describe_object(d.classid, d.objid, d.objsubid)
    FROM pg_class c LEFT JOIN pg_type t ON t.oid = c.reltype
    JOIN pg_depend d ON d.deptype IN ('n', 'a') AND (
        (d.refclassid, d.refobjid) = ('pg_class'::regclass, c.oid)
        OR d.refclassid = 'pg_type'::regclass AND d.refobjid IN (t.oid, t.typarray))
    LEFT JOIN pg_constraint k ON d.classid = 'pg_constraint'::regclass AND k.oid = d.objid
    LEFT JOIN pg_class i ON d.classid = 'pg_class'::regclass AND i.oid = d.objid
    WHERE c.oid = %(old)s::regclass AND i.relname IS DISTINCT FROM %(index)s
        AND (k.conrelid IS DISTINCT FROM c.oid OR k.contype NOT IN ('p', 'n'))
ORDER BY 1
