"""Units, errors, arrays, files, processes: what every layer shares."""
