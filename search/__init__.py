"""Search for the best plan: the space of legal plans, and the study that explores it."""

if __name__ != "autoplan.search":  # imported as plain `search`, from its folder on the path
    raise ImportError("import autoplan.search, not search")
