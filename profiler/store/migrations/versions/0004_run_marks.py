"""Training runs are hidden, and taken back into use, as records of operations are."""

import sqlalchemy as sa
from alembic import op

revision = "4"
down_revision = "3"

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """The marks of runs."""
    op.create_table(
        "run_marks",
        sa.Column("id", _ID, primary_key=True),
        sa.Column("record_id", _ID, sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("hides", sa.Boolean, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("by", "reason", "at")),
    )
    op.create_index("run_marks_by_record", "run_marks", ["record_id", "at", "by", "hides"], unique=True)
