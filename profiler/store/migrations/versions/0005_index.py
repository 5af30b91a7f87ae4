"""One index has all that a search reads of records, with their shapes and keys, in the order of its groups."""

from alembic import op

revision = "5"
down_revision = "4"


def upgrade() -> None:
    """Another index in place of the old one: versions that know the old one go on."""
    order = ("fingerprint_id", "operation", "dtype", "is_alone", "status", "mode", "work_hash", "measured_at")
    op.drop_index("records_by_work", "records")
    op.create_index("records_by_work", "records", [*order, "seconds", "id", "shape", "key"])
