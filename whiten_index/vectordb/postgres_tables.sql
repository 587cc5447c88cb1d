SELECT c.relname, c.relkind, t.typname, a.atttypmod, k.conname,
    obj_description(k.oid, 'pg_constraint'), col_description(c.oid, a.attnum)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = %(vector)s AND NOT a.attisdropped
LEFT JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_constraint k ON k.conrelid = c.oid AND k.contype = 'p'
WHERE n.nspname = %(schema)s
    AND (c.relname = %(name)s OR starts_with(c.relname, %(name)s || '__')
        -- Others may make tables with such names and descriptions, and triggers on them.
        AND pg_get_userbyid(c.relowner) = current_user)
