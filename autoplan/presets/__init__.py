"""Data that ships with autoplan: models, devices, clusters, frameworks and calibrations, as TOML with their sources."""
