-- Statements that give the table "new" what "old" has. "new" has some rights by ALTER DEFAULT
-- PRIVILEGES, which "old" may not have any more.
WITH acls AS (
    SELECT oid, relowner, NULL AS attname, relacl AS acl FROM pg_class
    UNION ALL SELECT attrelid, relowner, attname, attacl FROM pg_attribute
        JOIN pg_class c ON c.oid = attrelid WHERE attnum > 0 AND NOT attisdropped),
grants AS (
    SELECT oid, attname, privilege_type, is_grantable,
        CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END AS role
    FROM acls, LATERAL aclexplode(acl)
    WHERE grantee <> relowner AND oid IN (%(old)s::regclass, %(new)s::regclass)),
kept AS (SELECT attname FROM pg_attribute WHERE attrelid = %(new)s::regclass AND attnum > 0)
SELECT 1, format('ALTER TABLE %%s OWNER TO %%I', %(place)s::text, pg_get_userbyid(relowner))
    FROM pg_class WHERE oid = %(old)s::regclass
UNION ALL SELECT 2, format('REVOKE ALL ON %%s FROM %%s', %(place)s::text, role)
    FROM grants WHERE oid = %(new)s::regclass AND attname IS NULL
UNION ALL SELECT 3, format('GRANT %%s%%s ON %%s TO %%s%%s', privilege_type,
        '(' || quote_ident(attname) || ')', %(place)s::text, role,
        CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END)
    FROM grants WHERE oid = %(old)s::regclass AND (attname IS NULL OR attname IN (TABLE kept))
UNION ALL SELECT 4, format('COMMENT ON %%s %%s%%s IS %%L',
        CASE WHEN attname IS NULL THEN 'TABLE' ELSE 'COLUMN' END, %(place)s::text,
        '.' || quote_ident(attname), description)
    FROM pg_description LEFT JOIN pg_attribute
        ON attrelid = objoid AND attnum = objsubid AND objsubid > 0
    WHERE objoid = %(old)s::regclass AND classoid = 'pg_class'::regclass
        AND (objsubid = 0 OR attname IN (TABLE kept))
ORDER BY 1
