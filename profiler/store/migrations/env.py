"""How do migrations run?  On the connection and in the transaction of whoever opened the database."""

from alembic import context

from autoplan.profiler.store.schema import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"], version_table=VERSION_TABLE, transactional_ddl=True
)
context.run_migrations()
