"""Time of the kernels of a device: shapes of the products, fitted curves, measured times."""
