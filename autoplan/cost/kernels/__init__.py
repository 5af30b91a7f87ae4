"""Kernel times on a device: shapes of matrix products, fitted curves, measured times."""
