"""Which plan is best?  The space of legal plans, and the study that looks through it."""
