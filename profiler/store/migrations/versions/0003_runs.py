"""Training runs are held beside the measurements of operations."""

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """The table of runs."""
    op.create_table(
        "runs",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("key", sa.String(64), nullable=False, unique=True),
        sa.Column("fingerprint_id", _ID, sa.ForeignKey("fingerprints.id"), nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("framework", "model", "status")),
        sa.Column("seconds", sa.Double),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("content", "measured_by", "host")),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("measured_at", "added_at")),
    )
