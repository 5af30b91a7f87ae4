"""Describe a problem, a plan and an answer: the model, its training, the framework, the plan, timings and results."""
