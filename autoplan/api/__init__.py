"""The functions behind the public names of `autoplan`, and behind every command: one module for each task.

They take keyword arguments with plain values or loaded objects, and return objects; none prints.  A user's mistake is
an `AutoplanError`, what a user should know without having asked is an `AutoplanWarning`.  The long-running ones take a
`progress` callback.
"""
