"""Data types: model, training, framework, plan, timings and results."""
