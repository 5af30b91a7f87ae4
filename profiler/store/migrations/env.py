"""Environment of Alembic: migrations run on the connection and in the transaction of the caller."""

from alembic import context

from autoplan.profiler.store.schema import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"], version_table=VERSION_TABLE, transactional_ddl=True
)
context.run_migrations()
