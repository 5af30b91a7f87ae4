"""Facts of frameworks that plans are priced for, and no more: what they admit and how they are started is not known."""
