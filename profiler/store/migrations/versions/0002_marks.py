"""Marks of records are appended, and one index holds all that the choice of timings reads."""

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = "1"

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Replace the one mark of a record, which hides it, by all marks of it."""
    op.create_table(
        "marks",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("record_id", _ID, sa.ForeignKey("records.id"), nullable=False),
        sa.Column("hides", sa.Boolean, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("by", "reason", "at")),
    )
    op.create_index("marks_by_record", "marks", ["record_id", "at", "by", "hides"], unique=True)
    op.execute(
        'INSERT INTO marks (record_id, hides, "by", reason, at) '
        'SELECT record_id, true, "by", reason, at FROM hidden ORDER BY record_id'
    )
    op.drop_table("hidden")
    choice = ("operation", "dtype", "status", "is_alone", "work_hash", "mode", "measured_at", "seconds", "id")
    op.drop_index("records_by_work", "records")
    op.create_index("records_by_work", "records", ["fingerprint_id", *choice])
