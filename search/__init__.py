"""Search for the best plan: the space of legal plans, and the study that explores it."""

if __name__ != "autoplan.search":  # the folder on the path of a program of that name
    raise ImportError("import autoplan.search, not search")
