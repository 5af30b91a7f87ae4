"""Tables of the first timing database."""

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Fingerprints, records and the marks that hide some of them."""
    op.create_table(
        "fingerprints",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("content", sa.Text, nullable=False),
    )
    op.create_index("ix_fingerprints_device", "fingerprints", ["device"])
    op.create_table(
        "records",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("key", sa.String(64), nullable=False, unique=True),
        sa.Column("fingerprint_id", _ID, sa.ForeignKey("fingerprints.id"), nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("operation", "shape", "dtype")),
        sa.Column("work_hash", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("kernel", "mode", "status", "reason")),
        sa.Column("is_alone", sa.Boolean, nullable=False),
        sa.Column("seconds", sa.Double),
        sa.Column("samples", sa.LargeBinary, nullable=False),
        sa.Column("conditions", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("protocol", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("measured_by", "host", "measured_at", "added_at")),
    )
    choice = ("operation", "dtype", "status", "is_alone", "work_hash", "mode", "measured_at", "seconds")
    op.create_index("records_by_work", "records", ["fingerprint_id", *choice])
    op.create_table(
        "hidden",
        sa.Column("record_id", _ID, sa.ForeignKey("records.id"), primary_key=True),
        sa.Column("by", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("at", sa.Text, nullable=False),
    )
