"""The built-in trainer: plain torch that runs a plan, measures it, and proves it right."""
