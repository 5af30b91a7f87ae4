"""Units, errors, arrays, files and processes for all layers."""
